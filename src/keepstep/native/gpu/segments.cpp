// Loaded before a rank's own libraries (LD_PRELOAD): large device allocations of the CUDA runtime
// become segments whose physical memory can be given back and taken again at the same addresses.
//
// The driver's snapshot of a process copies device memory slowly, through its own buffers. What
// torch has allocated need not go through it: `keepstep_segments_save` copies every segment into
// files, through pinned memory and by several threads, and gives the physical memory back; what
// stays is a range of addresses. `keepstep_segments_load` maps new physical memory there and fills
// it. Pointers in tensors, kernels' arguments and graphs stay what they are.
//
// torch links the runtime dynamically and calls cudaMalloc for whole segments, so that the caching
// allocator, its statistics and its numbers are untouched. Allocations of libraries that carry a
// runtime of their own (NCCL, cuBLAS) and all others are left to the driver's snapshot.
//
// No CUDA header is needed: the few types of the driver's interface are declared here.

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Result = int;  // of the driver and of the runtime: 0 is success
using Address = unsigned long long;
using Handle = unsigned long long;
using Pointer = void*;  // contexts and streams

constexpr Result kOutOfMemory = 2;
constexpr size_t kSegmentMin = 1 << 20;  // the runtime packs smaller ones together
constexpr size_t kPiece = 4 << 20;
constexpr int kBuffers = 2;  // one is filled while the other one is emptied

struct Location {
  int type, id;
};
constexpr int kOnDevice = 1, kReadWrite = 3, kPinned = 1;

struct Properties {
  int type, handle_types;
  Location location;
  void* windows;
  unsigned char flags[8];
};
struct Access {
  Location location;
  int flags;
};

struct Driver {
  Result (*granularity)(size_t*, const Properties*, int);
  Result (*reserve)(Address*, size_t, size_t, Address, unsigned long long);
  Result (*unreserve)(Address, size_t);
  Result (*create)(Handle*, size_t, const Properties*, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Address, size_t, size_t, Handle, unsigned long long);
  Result (*unmap)(Address, size_t);
  Result (*set_access)(Address, size_t, const Access*, size_t);
  Result (*context)(Pointer*);
  Result (*set_context)(Pointer);
  Result (*device)(int*);
  Result (*synchronize)();
  Result (*host_alloc)(void**, size_t);
  Result (*host_free)(void*);
  Result (*to_host)(void*, Address, size_t, Pointer);
  Result (*to_device)(Address, const void*, size_t, Pointer);
  Result (*stream)(Pointer*, unsigned);
  Result (*stream_synchronize)(Pointer);
  Result (*stream_destroy)(Pointer);
  Result (*error_name)(Result, const char**);
  bool there = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    there = find(library, granularity, "cuMemGetAllocationGranularity") &&
            find(library, reserve, "cuMemAddressReserve") &&
            find(library, unreserve, "cuMemAddressFree") && find(library, create, "cuMemCreate") &&
            find(library, release, "cuMemRelease") && find(library, map, "cuMemMap") &&
            find(library, unmap, "cuMemUnmap") && find(library, set_access, "cuMemSetAccess") &&
            find(library, context, "cuCtxGetCurrent") &&
            find(library, set_context, "cuCtxSetCurrent") &&
            find(library, device, "cuCtxGetDevice") &&
            find(library, synchronize, "cuCtxSynchronize") &&
            find(library, host_alloc, "cuMemAllocHost_v2") &&
            find(library, host_free, "cuMemFreeHost") &&
            find(library, to_host, "cuMemcpyDtoHAsync_v2") &&
            find(library, to_device, "cuMemcpyHtoDAsync_v2") &&
            find(library, stream, "cuStreamCreate") &&
            find(library, stream_synchronize, "cuStreamSynchronize") &&
            find(library, stream_destroy, "cuStreamDestroy_v2") &&
            find(library, error_name, "cuGetErrorName");
  }

  template <typename Function>
  static bool find(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

Driver& driver() {
  static Driver* const loaded = new Driver;  // never destroyed: others may end later
  return *loaded;
}

struct Segment {
  size_t size;
  Handle handle;
  Pointer context;
  int device;
  bool present;  // it has physical memory
  bool away;     // its content is in the files
};

// One copy, and where in its file the bytes are.
struct Piece {
  Address at;
  size_t size;
  off_t offset;
};
using Shares = std::vector<std::vector<Piece>>;

struct Table {
  std::mutex lock;
  std::map<Address, Segment> segments;
  Shares saved;  // what is in the files: segments may come and go meanwhile
};

Table& table() {
  static Table* const only = new Table;
  return *only;
}

std::atomic<int> managed{0}, shared{0};  // calls that make a process impossible to move

// The runtime may have been loaded for torch alone, where "the next one" is not looked for.
int open_runtime(dl_phdr_info* info, size_t, void* found) {
  if (strstr(info->dlpi_name, "/libcudart.so") == nullptr) return 0;
  *static_cast<void**>(found) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return 1;
}

template <typename Function>
Function real(const char* name) {
  void* symbol = dlsym(RTLD_NEXT, name);
  void* library = nullptr;
  if (symbol == nullptr && dl_iterate_phdr(open_runtime, &library) && library != nullptr)
    symbol = dlsym(library, name);
  if (symbol == nullptr) {
    fprintf(stderr, "keepstep: the CUDA runtime has no %s\n", name);
    abort();
  }
  return reinterpret_cast<Function>(symbol);
}

Properties properties(int device) {
  Properties wanted{};
  wanted.type = kPinned;
  wanted.location = {kOnDevice, device};
  return wanted;
}

// Physical memory behind addresses that are reserved.
Result back(Address at, Segment& segment) {
  Driver& cu = driver();
  const Properties wanted = properties(segment.device);
  if (Result error = cu.create(&segment.handle, segment.size, &wanted, 0)) return error;
  if (Result error = cu.map(at, segment.size, 0, segment.handle, 0)) {
    cu.release(segment.handle);
    return error;
  }
  const Access access{{kOnDevice, segment.device}, kReadWrite};
  if (Result error = cu.set_access(at, segment.size, &access, 1)) {
    cu.unmap(at, segment.size);
    cu.release(segment.handle);
    return error;
  }
  segment.present = true;
  return 0;
}

Result allocate(void** out, size_t size) {
  Driver& cu = driver();
  Segment segment{};
  if (Result error = cu.context(&segment.context)) return error;
  if (segment.context == nullptr) return -1;  // the runtime makes one
  if (Result error = cu.device(&segment.device)) return error;
  size_t unit = 0;
  const Properties wanted = properties(segment.device);
  if (Result error = cu.granularity(&unit, &wanted, 0)) return error;
  segment.size = (size + unit - 1) / unit * unit;
  Address at = 0;
  if (Result error = cu.reserve(&at, segment.size, 0, 0, 0)) return error;
  if (Result error = back(at, segment)) {
    cu.unreserve(at, segment.size);
    return error;
  }
  const std::lock_guard<std::mutex> held(table().lock);
  table().segments[at] = segment;
  *out = reinterpret_cast<void*>(at);
  return 0;
}

// ------------------------------------------------------------------------------ saving and loading

// Neighbours in one file.
Shares divide(int parts) {
  size_t total = 0, seen = 0;
  for (const auto& [at, segment] : table().segments) total += segment.size;
  Shares shares(parts);
  std::vector<off_t> ends(parts);
  for (const auto& [at, segment] : table().segments)
    for (size_t done = 0; done < segment.size; done += kPiece) {
      const size_t size = std::min(kPiece, segment.size - done);
      const size_t share = std::min<size_t>(parts - 1, seen * parts / std::max<size_t>(1, total));
      shares[share].push_back({at + done, size, ends[share]});
      ends[share] += size;
      seen += size;
    }
  return shares;
}

// Of what was saved, that which has still a place: a segment may have been freed since.
Shares wanted() {
  Shares shares(table().saved.size());
  for (size_t share = 0; share < shares.size(); ++share)
    for (const Piece& piece : table().saved[share]) {
      auto next = table().segments.upper_bound(piece.at);
      if (next == table().segments.begin()) continue;
      const auto& [at, segment] = *--next;
      if (segment.away && piece.at + piece.size <= at + segment.size)
        shares[share].push_back(piece);
    }
  return shares;
}

struct Trouble {
  std::mutex lock;
  std::string first;

  void say(const std::string& what) {
    const std::lock_guard<std::mutex> held(lock);
    if (first.empty()) first = what;
  }
  bool check(Result error, const char* what) {
    if (error == 0) return true;
    const char* name = nullptr;
    driver().error_name(error, &name);
    say(std::string(what) + ": " + (name ? name : "error " + std::to_string(error)));
    return false;
  }
  bool check_file(ssize_t done, size_t wanted, const char* what) {
    if (done == static_cast<ssize_t>(wanted)) return true;
    say(std::string(what) + ": " + (done < 0 ? strerror(errno) : "it is too short"));
    return false;
  }
};

// Buffers and a stream of one thread.
class Lane {
 public:
  Lane(Pointer context, Trouble& trouble) : trouble_(trouble) {
    Driver& cu = driver();
    good = trouble.check(cu.set_context(context), "cuCtxSetCurrent");
    for (void*& buffer : buffers)
      good = good && trouble.check(cu.host_alloc(&buffer, kPiece), "cuMemAllocHost");
    good = good && trouble.check(cu.stream(&stream, 1), "cuStreamCreate");
  }
  ~Lane() {
    if (stream != nullptr) driver().stream_destroy(stream);
    for (void* buffer : buffers)
      if (buffer != nullptr) driver().host_free(buffer);
  }
  bool fetch(const Piece& piece, int buffer) {
    return trouble_.check(driver().to_host(buffers[buffer], piece.at, piece.size, stream),
                          "cuMemcpyDtoHAsync");
  }
  bool put(const Piece& piece, int buffer) {
    return trouble_.check(driver().to_device(piece.at, buffers[buffer], piece.size, stream),
                          "cuMemcpyHtoDAsync");
  }
  bool wait() { return trouble_.check(driver().stream_synchronize(stream), "a copy"); }

  void* buffers[kBuffers] = {};
  Pointer stream = nullptr;
  bool good = false;

 private:
  Trouble& trouble_;
};

bool save_share(const std::vector<Piece>& pieces, int file, Lane& lane, Trouble& trouble) {
  if (!lane.fetch(pieces[0], 0)) return false;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!lane.wait()) return false;
    if (i + 1 < pieces.size() && !lane.fetch(pieces[i + 1], (i + 1) % kBuffers)) return false;
    const Piece& piece = pieces[i];
    const ssize_t done = pwrite(file, lane.buffers[i % kBuffers], piece.size, piece.offset);
    if (!trouble.check_file(done, piece.size, "writing device memory")) return false;
  }
  return true;
}

bool load_share(const std::vector<Piece>& pieces, int file, Lane& lane, Trouble& trouble) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const ssize_t done = pread(file, lane.buffers[i % kBuffers], piece.size, piece.offset);
    if (!trouble.check_file(done, piece.size, "reading device memory")) return false;
    // The copy before this one is over: the buffer that it used is the next to be filled.
    if (!lane.wait() || !lane.put(piece, i % kBuffers)) return false;
  }
  return lane.wait();
}

using Share = bool (*)(const std::vector<Piece>&, int, Lane&, Trouble&);

void one_share(const std::vector<Piece>& pieces, const std::string& path, int flags, Share move,
               Trouble& trouble) {
  const int file = open(path.c_str(), flags | O_CLOEXEC, 0600);
  if (file < 0) return trouble.say(path + ": " + strerror(errno));
  {
    Lane lane(table().segments.begin()->second.context, trouble);
    if (lane.good) move(pieces, file, lane, trouble);
  }
  close(file);
}

void in_parallel(const Shares& shares, const char* folder, int flags, Share move,
                 Trouble& trouble) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < shares.size(); ++i)
    if (!shares[i].empty())
      threads.emplace_back(one_share, std::cref(shares[i]),
                           std::string(folder) + "/part-" + std::to_string(i), flags, move,
                           std::ref(trouble));
  for (std::thread& thread : threads) thread.join();
}

void give_back(Trouble& trouble) {
  Driver& cu = driver();
  for (auto& [at, segment] : table().segments) {
    if (!segment.present) continue;
    if (!trouble.check(cu.unmap(at, segment.size), "cuMemUnmap")) return;
    segment.present = false;
    segment.away = true;
    if (!trouble.check(cu.release(segment.handle), "cuMemRelease")) return;
  }
}

int told(const Trouble& trouble, char* error, size_t room) {
  if (room > 0) snprintf(error, room, "%s", trouble.first.c_str());
  return trouble.first.empty() ? 0 : -1;
}

// One device is all that a rank has, and all that is moved this way.
void settle(Trouble& trouble) {
  for (const auto& [at, segment] : table().segments) {
    if (segment.context != table().segments.begin()->second.context)
      return trouble.say("there are tensors on more than one device");
    if (!segment.present) return trouble.say("device memory was given back already");
  }
  if (!table().segments.empty()) trouble.check(driver().synchronize(), "cuCtxSynchronize");
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// How many bytes of segments there are, and how many of them are in device memory now.
EXPORT void keepstep_segments_bytes(unsigned long long* all, unsigned long long* present) {
  const std::lock_guard<std::mutex> held(table().lock);
  *all = *present = 0;
  for (const auto& [at, segment] : table().segments) {
    *all += segment.size;
    if (segment.present) *present += segment.size;
  }
}

// How often the process has made managed memory, and handles for other processes.
EXPORT void keepstep_segments_calls(int* made_managed, int* made_shared) {
  *made_managed = managed;
  *made_shared = shared;
}

// Into FOLDER/part-0 .. part-<parts - 1>. Nothing is given back unless all of it is written.
EXPORT int keepstep_segments_save(const char* folder, int parts, char* error, size_t room) {
  const std::lock_guard<std::mutex> held(table().lock);
  Trouble trouble;
  settle(trouble);
  if (trouble.first.empty()) {
    table().saved = divide(parts);
    in_parallel(table().saved, folder, O_CREAT | O_EXCL | O_WRONLY, save_share, trouble);
  }
  if (trouble.first.empty()) give_back(trouble);
  return told(trouble, error, room);
}

// May be called again after a failure: the files are left as they are.
EXPORT int keepstep_segments_load(const char* folder, char* error, size_t room) {
  const std::lock_guard<std::mutex> held(table().lock);
  Trouble trouble;
  for (auto& [at, segment] : table().segments)
    if (!segment.present)
      trouble.check(back(at, segment), "device memory at the old address");
  if (trouble.first.empty()) in_parallel(wanted(), folder, O_RDONLY, load_share, trouble);
  if (trouble.first.empty())
    for (auto& [at, segment] : table().segments) segment.away = false;
  return told(trouble, error, room);
}

// --------------------------------------------------------------------- what the runtime is asked for

EXPORT Result cudaMalloc(void** out, size_t size) {
  static const auto plain = real<Result (*)(void**, size_t)>("cudaMalloc");
  if (size >= kSegmentMin && driver().there) {
    const Result error = allocate(out, size);
    if (error == 0 || error == kOutOfMemory) return error;
  }
  return plain(out, size);
}

EXPORT Result cudaFree(void* pointer) {
  static const auto plain = real<Result (*)(void*)>("cudaFree");
  const Address at = reinterpret_cast<Address>(pointer);
  const std::unique_lock<std::mutex> held(table().lock);
  const auto found = table().segments.find(at);
  if (pointer == nullptr || found == table().segments.end()) return plain(pointer);
  const Segment segment = found->second;
  table().segments.erase(found);
  if (segment.present) {
    driver().synchronize();  // as cudaFree does: queued work may still use it
    if (Result error = driver().unmap(at, segment.size)) return error;
    driver().release(segment.handle);
  }
  return driver().unreserve(at, segment.size);
}

// Segments are mapped on their own device only; torch then copies between devices another way.
EXPORT Result cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}

EXPORT Result cudaMallocManaged(void** out, size_t size, unsigned flags) {
  static const auto plain = real<Result (*)(void**, size_t, unsigned)>("cudaMallocManaged");
  ++managed;
  return plain(out, size, flags);
}

EXPORT Result cudaIpcGetMemHandle(void* handle, void* pointer) {
  static const auto plain = real<Result (*)(void*, void*)>("cudaIpcGetMemHandle");
  ++shared;
  return plain(handle, pointer);
}
