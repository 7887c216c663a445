// Drives the plugin's tables as NCCL's proxy does: at most 8 requests posted, only the oldest one is
// tested and only while one is open, buffers are reused the moment "done" is said. Every byte is
// checked; buffers are poisoned after "done", and a receive buffer must still hold the poison when
// it is posted again.
//
//   harness --lib PATH|plain --abi 6|8|11 [--listen FILE] [--connect FILE] --size BYTES|mix
//           [--messages N] [--stop FILE] [--verify 0|1|2] [--address A]
//
// --listen makes a receiving communicator and writes its handle, --connect a sending one; both
// together make a member of a ring. Without --messages the sender goes on until --stop exists; its
// last message has 3 bytes. "ready" on stdout means connected; the last line is a JSON object.
// Then the process waits for the end of its stdin before it closes anything, as NCCL would.
//
// `plain` is one TCP connection driven in the way of NCCL's own socket transport (a size, then the
// bytes, "done" when the kernel has taken them): what the plugin is compared with.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "abi.h"

using namespace keepstep::net::abi;

namespace {

constexpr int kDepth = 8;
constexpr uint64_t kStopBytes = 3;
constexpr uint64_t kMixMax = 700'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "harness: %s\n", why.c_str());
  std::_Exit(3);
}

void log_line(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level > LogWarn && !std::getenv("HARNESS_VERBOSE")) return;
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

// ------------------------------------------------------------------------------- tables as one

struct Net {
  virtual ~Net() = default;
  virtual Result init() = 0;
  virtual Result listen(void* handle, void** listener) = 0;
  virtual Result connect(void* handle, void** comm) = 0;
  virtual Result accept(void* listener, void** comm) = 0;
  virtual Result isend(void* comm, void* data, size_t size, void** request) = 0;
  virtual Result irecv(void* comm, void* data, size_t size, void** request) = 0;
  virtual Result test(void* request, int* done, int* size) = 0;
  virtual Result close_send(void* comm) = 0;
  virtual Result close_recv(void* comm) = 0;
  virtual Result close_listen(void* listener) = 0;
};

template <typename Table>
struct Plugin : Net {
  const Table* table;
  explicit Plugin(const void* found) : table(static_cast<const Table*>(found)) {}
  static constexpr bool v6 = std::is_same_v<Table, TableV6>;
  static constexpr bool v11 = std::is_same_v<Table, TableV11>;
  void* context = nullptr;

  Result init() override {
    int count = 0;
    Result result;
    if constexpr (v11) {
      result = table->init(&context, 42, nullptr, log_line, nullptr);
    } else {
      result = table->init(log_line);
    }
    if (result) return result;
    if (table->devices(&count) || count < 1) die("no devices");
    std::conditional_t<v6, PropertiesV6, std::conditional_t<v11, PropertiesV11, PropertiesV8>> p;
    std::memset(&p, 0xFF, sizeof p);
    if (table->get_properties(0, &p) || p.receives_max != 1 || p.pointer_support != kPointerHost ||
        p.speed < 1) {
      die("odd properties");
    }
    if constexpr (v11) {
      if (p.virtual_count != 1 || p.p2p_bytes_max == 0 || p.multi_request_size_max != 1) {
        die("odd properties");
      }
    }
    return result;
  }
  Result listen(void* handle, void** listener) override {
    if constexpr (v11) return table->listen(context, 0, handle, listener);
    else return table->listen(0, handle, listener);
  }
  Result connect(void* handle, void** comm) override {
    void* device = nullptr;
    if constexpr (v11) return table->connect(context, 0, handle, comm, &device);
    else if constexpr (v6) return table->connect(0, handle, comm);
    else return table->connect(0, handle, comm, &device);
  }
  Result accept(void* listener, void** comm) override {
    void* device = nullptr;
    if constexpr (v6) return table->accept(listener, comm);
    else return table->accept(listener, comm, &device);
  }
  Result isend(void* comm, void* data, size_t size, void** request) override {
    if constexpr (v11) return table->isend(comm, data, size, 0, nullptr, nullptr, request);
    else return table->isend(comm, data, static_cast<int>(size), 0, nullptr, request);
  }
  Result irecv(void* comm, void* data, size_t size, void** request) override {
    void* mr = nullptr;
    int tag = 0;
    *request = reinterpret_cast<void*>(1);  // NCCL's hint that completion is optional
    if constexpr (v11) {
      return table->irecv(comm, 1, &data, &size, &tag, &mr, nullptr, request);
    } else {
      int capacity = static_cast<int>(size);
      return table->irecv(comm, 1, &data, &capacity, &tag, &mr, request);
    }
  }
  Result test(void* request, int* done, int* size) override {
    return table->test(request, done, size);
  }
  Result close_send(void* comm) override { return table->close_send(comm); }
  Result close_recv(void* comm) override { return table->close_recv(comm); }
  Result close_listen(void* listener) override { return table->close_listen(listener); }
};

struct Plain : Net {
  struct Ask {
    bool sends, open;
    uint8_t* data;
    uint32_t size, header;
    size_t moved;  // of header and data
  };
  Ask asks[2][kDepth] = {};
  int socket_[2] = {-1, -1};  // 0 sends, 1 receives
  unsigned next_[2] = {0, 0};
  std::string address;

  Result init() override { return Success; }
  Result listen(void* handle, void** listener) override {
    int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    inet_pton(AF_INET, address.c_str(), &at.sin_addr);
    socklen_t size = sizeof at;
    if (bind(fd, reinterpret_cast<sockaddr*>(&at), size) || ::listen(fd, 1)) return SystemError;
    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
    std::memcpy(handle, &at, sizeof at);
    *listener = new int(fd);
    return Success;
  }
  static void prepare(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
  }
  Result connect(void* handle, void** comm) override {
    socket_[0] = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(socket_[0], static_cast<sockaddr*>(handle), sizeof(sockaddr_in))) return SystemError;
    prepare(socket_[0]);
    *comm = &socket_[0];
    return Success;
  }
  Result accept(void* listener, void** comm) override {
    socket_[1] = ::accept(*static_cast<int*>(listener), nullptr, nullptr);
    prepare(socket_[1]);
    *comm = &socket_[1];
    return Success;
  }
  Result post(int way, void* data, size_t size, void** request) {
    Ask& ask = asks[way][next_[way]++ % kDepth];
    ask = {way == 0, true, static_cast<uint8_t*>(data), static_cast<uint32_t>(size),
           static_cast<uint32_t>(size), 0};
    *request = &ask;
    return Success;
  }
  Result isend(void*, void* data, size_t size, void** request) override {
    return post(0, data, size, request);
  }
  Result irecv(void*, void* data, size_t size, void** request) override {
    return post(1, data, size, request);
  }
  Result test(void* request, int* done, int* size) override {
    Ask& ask = *static_cast<Ask*>(request);
    *done = 0;
    while (ask.moved < 4 + ask.header || ask.moved < 4) {
      bool head = ask.moved < 4;
      uint8_t* at = head ? reinterpret_cast<uint8_t*>(&ask.header) + ask.moved
                         : ask.data + (ask.moved - 4);
      size_t want = head ? 4 - ask.moved : ask.header - (ask.moved - 4);
      ssize_t n = ask.sends ? send(socket_[0], at, want, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(socket_[1], at, want, MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) return Success;
      if (n <= 0) return RemoteError;
      ask.moved += static_cast<size_t>(n);
    }
    *done = 1;
    *size = static_cast<int>(ask.header);
    return Success;
  }
  Result close_send(void*) override { return close(socket_[0]), Success; }
  Result close_recv(void*) override { return close(socket_[1]), Success; }
  Result close_listen(void*) override { return Success; }
};

Net* load(const std::string& lib, int abi, const std::string& address) {
  if (lib == "plain") {
    auto* plain = new Plain;
    plain->address = address;
    return plain;
  }
  void* handle = dlopen(lib.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) die(dlerror());
  const void* table = dlsym(handle, ("ncclNetPlugin_v" + std::to_string(abi)).c_str());
  if (!table) die("no such table");
  if (abi == 6) return new Plugin<TableV6>(table);
  if (abi == 8) return new Plugin<TableV8>(table);
  return new Plugin<TableV11>(table);
}

// ------------------------------------------------------------------------------------- messages

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7FB5D329728EA185ull;
  x = (x ^ (x >> 27)) * 0x81DADEF4BC2DD44Dull;
  return x ^ (x >> 33);
}

struct Sizes {
  uint64_t fixed;  // 0: mixed
  uint64_t most() const { return fixed ? fixed : kMixMax; }
  uint64_t of(uint64_t id) const {
    if (fixed) return fixed;
    uint64_t draw = mixed(id + 1);
    uint64_t bound[] = {2, 300, 5000, 70'000, 140'000, kMixMax};
    uint64_t size = (draw >> 8) % bound[draw % 6];
    return size == kStopBytes ? 4 : size;
  }
};

uint64_t word(uint64_t id, uint64_t i) {
  return (id + 1) * 0x9E3779B97F4A7C15ull ^ (i * 0xD1B54A32D192ED03ull);
}

void fill(uint8_t* data, uint64_t id, uint64_t size) {
  uint64_t words = size / 8;
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t w = word(id, i);
    std::memcpy(data + 8 * i, &w, 8);
  }
  uint64_t w = word(id, words);
  std::memcpy(data + 8 * words, &w, size % 8);
}

bool right(const uint8_t* data, uint64_t id, uint64_t size) {
  uint64_t wrong = 0, words = size / 8;
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t w;
    std::memcpy(&w, data + 8 * i, 8);
    wrong |= w ^ word(id, i);
  }
  uint64_t w = word(id, words);
  return wrong == 0 && std::memcmp(data + 8 * words, &w, size % 8) == 0;
}

struct Options {
  std::string lib, listen, connect, stop, address = "127.0.0.1";
  int abi = 11, verify = 1;
  Sizes sizes{0};
  uint64_t messages = 0;
};

// One direction: what is posted, what is done, and what was seen.
struct Lane {
  Net& net;
  const Options& options;
  bool sends;
  void* comm = nullptr;
  std::vector<std::vector<uint8_t>> buffers;
  void* requests[kDepth] = {};
  uint64_t sizes[kDepth] = {};
  uint64_t posted = 0, done = 0, bytes = 0, first_bytes = 0, corrupt = 0, wrong_size = 0, late = 0;
  bool last_posted = false, finished = false;
  int error = 0;
  int64_t first_at = 0, done_at = 0, error_at = 0;
  std::vector<std::pair<int64_t, int64_t>> gaps;  // begin, length
  std::vector<std::pair<int64_t, uint64_t>> buckets;

  Lane(Net& n, const Options& o, bool s) : net(n), options(o), sends(s), buffers(kDepth) {
    for (auto& buffer : buffers) buffer.assign(o.sizes.most() + 64, poison());
  }
  uint8_t poison() const { return sends ? 0xEE : 0xDD; }
  std::vector<uint8_t>& buffer(uint64_t id) { return buffers[id % kDepth]; }

  bool post() {
    if (error || last_posted || posted >= done + kDepth) return false;
    if (!sends && options.messages && posted > options.messages) return false;
    auto& data = buffer(posted);
    uint64_t size = options.sizes.most();
    if (sends) {
      bool stop = options.messages ? posted == options.messages
                                   : posted % 16 == 0 && access(options.stop.c_str(), F_OK) == 0;
      size = stop ? kStopBytes : options.sizes.of(posted);
      if (options.verify) fill(data.data(), posted, size);
    } else if (options.verify > 1) {
      for (uint8_t byte : data) late += byte != poison();
    }
    void* request = nullptr;
    Result result = sends ? net.isend(comm, data.data(), size, &request)
                          : net.irecv(comm, data.data(), size, &request);
    if (result) return fail(result);
    if (!request) return false;
    last_posted = sends && size == kStopBytes;
    requests[posted % kDepth] = request;
    sizes[posted % kDepth] = size;
    ++posted;
    return true;
  }

  bool fail(int result) {
    error = result;
    error_at = now_ns();
    finished = true;
    return false;
  }

  bool test() {
    if (error || done == posted) return false;
    int complete = 0, size = -1;
    Result result = net.test(requests[done % kDepth], &complete, &size);
    if (result) return fail(result);
    if (!complete) return false;
    int64_t at = now_ns();
    auto& data = buffer(done);
    auto got = static_cast<uint64_t>(size);
    bool stop = got == kStopBytes;
    if (!sends) {
      uint64_t wanted = stop ? got : options.sizes.of(done);
      if (got != wanted) ++wrong_size;
      if (options.verify && got <= data.size() && !right(data.data(), done, got)) ++corrupt;
      note(at, got);
    }
    if (options.verify) std::memset(data.data(), poison(), std::min<size_t>(got, data.size()));
    bytes += got;
    if (!first_at) {
      first_at = at;
      first_bytes = got;
    }
    done_at = at;
    ++done;
    finished |= stop;
    return true;
  }

  void note(int64_t at, uint64_t got) {
    if (done_at && at - done_at > 5'000'000 && gaps.size() < 10000) gaps.push_back({done_at, at - done_at});
    int64_t bucket = at / 50'000'000;
    if (buckets.empty() || buckets.back().first != bucket) buckets.push_back({bucket, 0});
    buckets.back().second += got;
  }

  void print(const char* name, bool comma) const {
    std::printf("%s\"%s\":{\"messages\":%llu,\"bytes\":%llu,\"corrupt\":%llu,\"wrong_size\":%llu,"
                "\"late\":%llu,\"finished\":%s,\"error\":%d,\"first_at_ns\":%lld,\"first_bytes\":%llu,"
                "\"done_at_ns\":%lld,\"error_at_ns\":%lld,\"gaps\":[",
                comma ? "," : "", name, static_cast<unsigned long long>(done),
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(corrupt),
                static_cast<unsigned long long>(wrong_size), static_cast<unsigned long long>(late),
                finished && !error ? "true" : "false", error, static_cast<long long>(first_at),
                static_cast<unsigned long long>(first_bytes), static_cast<long long>(done_at),
                static_cast<long long>(error_at));
    for (size_t i = 0; i < gaps.size(); ++i) {
      std::printf("%s[%lld,%lld]", i ? "," : "", static_cast<long long>(gaps[i].first),
                  static_cast<long long>(gaps[i].second));
    }
    std::printf("],\"buckets\":[");
    for (size_t i = 0; i < buckets.size(); ++i) {
      std::printf("%s[%lld,%llu]", i ? "," : "", static_cast<long long>(buckets[i].first),
                  static_cast<unsigned long long>(buckets[i].second));
    }
    std::printf("]}");
  }
};

void write_handle(const std::string& path, const char* handle) {
  std::string fresh = path + ".new";
  std::ofstream(fresh, std::ios::binary).write(handle, 128);
  std::rename(fresh.c_str(), path.c_str());
}

bool read_handle(const std::string& path, char* handle) {
  std::ifstream file(path, std::ios::binary);
  return file && file.read(handle, 128);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string name = argv[i], value = argv[i + 1];
    if (name == "--lib") options.lib = value;
    else if (name == "--abi") options.abi = std::stoi(value);
    else if (name == "--listen") options.listen = value;
    else if (name == "--connect") options.connect = value;
    else if (name == "--stop") options.stop = value;
    else if (name == "--address") options.address = value;
    else if (name == "--verify") options.verify = std::stoi(value);
    else if (name == "--messages") options.messages = std::stoull(value);
    else if (name == "--size") options.sizes.fixed = value == "mix" ? 0 : std::stoull(value);
    else die("unknown option " + name);
  }
  return options;
}

void wait_for_end_of_input() {
  char buffer[64];
  while (read(0, buffer, sizeof buffer) > 0) {}
}

}  // namespace

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  Net* net = load(options.lib, options.abi, options.address);
  if (Result result = net->init()) die("init failed with " + std::to_string(result));
  Lane in(*net, options, false), out(*net, options, true);
  char handle[128] = {}, peer[128] = {};
  void* listener = nullptr;
  bool receives = !options.listen.empty(), sends = !options.connect.empty();
  if (receives) {
    if (Result result = net->listen(handle, &listener)) die("listen: " + std::to_string(result));
    write_handle(options.listen, handle);
  }
  bool known = false;
  while ((receives && !in.comm) || (sends && !out.comm)) {
    if (sends && !known) known = read_handle(options.connect, peer);
    if (sends && known && !out.comm) {
      if (Result result = net->connect(peer, &out.comm)) die("connect: " + std::to_string(result));
    }
    if (receives && !in.comm && (known || !sends)) {
      if (Result result = net->accept(listener, &in.comm)) die("accept: " + std::to_string(result));
    }
    usleep(500);
  }
  if (listener) net->close_listen(listener);  // NCCL does so right after accept
  std::puts("ready");
  std::fflush(stdout);
  int64_t begun = now_ns();
  in.finished = !receives;
  out.finished = !sends;
  while (!in.finished || !out.finished) {
    bool moved = false;
    if (receives && !in.finished) {
      while (in.post()) moved = true;
      moved |= in.test();
    }
    if (sends && !out.finished) {
      while (out.post()) moved = true;
      moved |= out.test();
    }
    if ((in.error && receives) || (out.error && sends)) break;
    if (!moved) sched_yield();
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  double cpu = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
               static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
  std::printf("{\"begun_ns\":%lld,\"cpu_s\":%.3f", static_cast<long long>(begun), cpu);
  if (receives) in.print("receive", true);
  if (sends) out.print("send", true);
  std::puts("}");
  std::fflush(stdout);
  wait_for_end_of_input();
  if (out.comm) net->close_send(out.comm);
  if (in.comm) net->close_recv(in.comm);
  usleep(50'000);  // the engine's last words
}
