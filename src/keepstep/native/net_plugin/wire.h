// What crosses the network, and the only code that reads it. No sockets here: a fuzzer feeds it.
//
// A path is one TCP connection. The sending end opens it and says Hello; from then on Data frames
// run one way and State frames the other. Every frame begins with the same 32 bytes:
//
//   mark(2) type(1) path(1) length(4) message(8) offset(8) total(8)      little endian
//
//   Hello   message = epoch of this connection, payload = cookie of the communicator
//   Data    a run of chunks of a message that follow each other; where a chunk begins and ends in a
//           message follows from kChunkBytes alone, how many of them travel together does not
//   State   what the receiver has: cumulative, so any copy of it may be lost or repeated;
//           message = 1 if it is about to close on purpose
//   Bye     the sender is about to close on purpose, and everything was delivered
//
// Whatever a header says is checked here, so that nobody behind it has to doubt a length.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>

namespace keepstep::net {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

constexpr int kPathsMax = 8;
// A multiple of 128 bytes: readers of NCCL's LL128 lines never see half a line moved.
constexpr uint64_t kChunkBytes = 128 * 1024;
// A run is one system call at either end: as much as NCCL has in one of its buffers.
constexpr uint64_t kRunBytes = 4 * kChunkBytes;
constexpr uint64_t kMessageBytesMax = 1ull << 40;
constexpr size_t kHeaderBytes = 32;
constexpr size_t kHandleBytes = 128;  // NCCL_NET_HANDLE_MAXSIZE

using Cookie = std::array<uint8_t, 16>;

enum class Type : uint8_t { Hello = 1, State = 2, Data = 3, Bye = 4 };

struct Header {
  Type type;
  uint8_t path;
  uint32_t length;  // of the payload that follows
  uint64_t message;
  uint64_t offset;
  uint64_t total;
};

// What the receiver knows of one path.
struct PathState {
  uint32_t epoch;   // of the connection it reads from, 0: none
  uint32_t buried;  // connections up to this epoch are dead for it, whatever the sender believes
  uint64_t frames;  // of Data, received whole over the connection of `epoch`
};

struct State {
  bool leaving;
  uint64_t posted;  // receives posted so far: the sender may send so many messages
  uint64_t done;    // messages received whole, without a gap
  int paths;
  PathState path[kPathsMax];
};

constexpr size_t kHelloBytes = kHeaderBytes + sizeof(Cookie);
constexpr size_t kStateBytesMax = kHeaderBytes + 16 + 16 * kPathsMax;

// The length that the chunk at this offset must have.
inline uint64_t chunk_length(uint64_t offset, uint64_t total) {
  uint64_t left = total - offset;
  return left < kChunkBytes ? left : kChunkBytes;
}

// Whole chunks, at least one; `offset` is where one begins.
inline bool is_run(uint64_t offset, uint64_t length, uint64_t total) {
  uint64_t left = total - offset;
  if (length == left) return length <= kRunBytes;
  return length > 0 && length < left && length <= kRunBytes && length % kChunkBytes == 0;
}

namespace detail {
constexpr uint16_t kMark = 0x534B;

template <typename T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
uint8_t* store(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
  return at + sizeof value;
}
}  // namespace detail

inline void encode(const Header& header, uint8_t* out) {
  using detail::store;
  out = store(out, detail::kMark);
  out = store(out, static_cast<uint8_t>(header.type));
  out = store(out, header.path);
  out = store(out, header.length);
  out = store(out, header.message);
  out = store(out, header.offset);
  store(out, header.total);
}

// Nothing if these bytes can not begin a frame.
inline std::optional<Header> parse_header(const uint8_t* in) {
  using detail::load;
  Header header{static_cast<Type>(in[2]),   in[3],
                load<uint32_t>(in + 4),     load<uint64_t>(in + 8),
                load<uint64_t>(in + 16),    load<uint64_t>(in + 24)};
  if (load<uint16_t>(in) != detail::kMark || header.path >= kPathsMax) return std::nullopt;
  switch (header.type) {
    case Type::Hello:
      if (header.length != sizeof(Cookie) || header.message == 0) return std::nullopt;
      if (header.message > UINT32_MAX) return std::nullopt;
      return header;
    case Type::State: {
      uint32_t paths = (header.length - 16) / 16;
      if (header.length < 32 || header.length % 16 || paths > kPathsMax) return std::nullopt;
      if (header.message > 1) return std::nullopt;
      return header;
    }
    case Type::Bye:
      if (header.length || header.message || header.offset || header.total) return std::nullopt;
      return header;
    case Type::Data:
      if (header.total > kMessageBytesMax || header.offset % kChunkBytes) return std::nullopt;
      if (header.offset > header.total || (header.offset == header.total && header.total)) {
        return std::nullopt;
      }
      if (!is_run(header.offset, header.length, header.total)) return std::nullopt;
      return header;
  }
  return std::nullopt;
}

inline size_t encode_hello(int path, uint32_t epoch, const Cookie& cookie, uint8_t* out) {
  encode({Type::Hello, static_cast<uint8_t>(path), sizeof(Cookie), epoch, 0, 0}, out);
  std::memcpy(out + kHeaderBytes, cookie.data(), cookie.size());
  return kHelloBytes;
}

inline size_t encode_state(int path, const State& state, uint8_t* out) {
  using detail::store;
  uint32_t length = 16 + 16 * static_cast<uint32_t>(state.paths);
  encode({Type::State, static_cast<uint8_t>(path), length, state.leaving, 0, 0}, out);
  uint8_t* at = store(out + kHeaderBytes, state.posted);
  at = store(at, state.done);
  for (int i = 0; i < state.paths; ++i) {
    at = store(at, state.path[i].epoch);
    at = store(at, state.path[i].buried);
    at = store(at, state.path[i].frames);
  }
  return kHeaderBytes + length;
}

// `header` is a State's, `payload` has header.length bytes.
inline State parse_state(const Header& header, const uint8_t* payload) {
  using detail::load;
  State state{};
  state.leaving = header.message == 1;
  state.posted = load<uint64_t>(payload);
  state.done = load<uint64_t>(payload + 8);
  state.paths = static_cast<int>((header.length - 16) / 16);
  for (int i = 0; i < state.paths; ++i) {
    const uint8_t* at = payload + 16 + 16 * i;
    state.path[i] = {load<uint32_t>(at), load<uint32_t>(at + 4), load<uint64_t>(at + 8)};
  }
  return state;
}

// A listener's addresses, as they travel in NCCL's handle: mark(4) cookie(16) families(1) count(1)
// port(2), then 4 or 16 bytes each. The last 8 bytes belong to the connecting side's own notes.
struct Endpoint {
  bool v6;
  uint8_t address[16];
};

struct Handle {
  Cookie cookie;
  uint16_t port;  // host order, one for all addresses
  int count;
  Endpoint endpoint[kPathsMax];
};

constexpr size_t kHandleNotes = kHandleBytes - 8;

// False if these addresses do not fit.
inline bool encode_handle(const Handle& handle, uint8_t* out) {
  std::memset(out, 0, kHandleBytes);
  std::memcpy(out, "KSN1", 4);
  std::memcpy(out + 4, handle.cookie.data(), 16);
  uint8_t families = 0;
  size_t at = 24;
  for (int i = 0; i < handle.count; ++i) {
    size_t size = handle.endpoint[i].v6 ? 16 : 4;
    if (at + size > kHandleNotes) return false;
    if (handle.endpoint[i].v6) families |= static_cast<uint8_t>(1 << i);
    std::memcpy(out + at, handle.endpoint[i].address, size);
    at += size;
  }
  out[20] = families;
  out[21] = static_cast<uint8_t>(handle.count);
  detail::store(out + 22, handle.port);
  return true;
}

inline std::optional<Handle> parse_handle(const uint8_t* in) {
  Handle handle{};
  if (std::memcmp(in, "KSN1", 4) != 0) return std::nullopt;
  std::memcpy(handle.cookie.data(), in + 4, 16);
  handle.count = in[21];
  handle.port = detail::load<uint16_t>(in + 22);
  if (handle.count < 1 || handle.count > kPathsMax || handle.port == 0) return std::nullopt;
  size_t at = 24;
  for (int i = 0; i < handle.count; ++i) {
    handle.endpoint[i].v6 = in[20] >> i & 1;
    size_t size = handle.endpoint[i].v6 ? 16 : 4;
    if (at + size > kHandleNotes) return std::nullopt;
    std::memcpy(handle.endpoint[i].address, in + at, size);
    at += size;
  }
  return handle;
}

}  // namespace keepstep::net
