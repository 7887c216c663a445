// Host memory in which CUDA's driver keeps a snapshot, moved into files and back by its process.
//
// When the driver has taken a process off its GPU, what was there is in areas of the process's own
// memory: large, and with long stretches of zeros (more than half a gigabyte of them for an empty
// context). Whoever dumps the process would copy them with one thread, and again to restore it. So
// the process puts them into files first, with several threads and without the zeros, gives the
// memory back, and fetches it before the driver needs it.
//
// All of it is done by a thread of its own: the main one may wait for the driver, and have Python's
// lock. It hears and answers by files in one folder:
//
//     areas-stow     "start end" per line, in hexadecimal: move these         -> areas-stowed
//     areas-fetch    bring them back; perhaps in another place and much later -> areas-fetched
//
// The answer is "good", or what was wrong. What could not be stowed is where it was, unless the answer
// says that "it did not come back". The thread ends with its last answer, or when nobody has asked
// for anything for a while.

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPage = 4096;          // of zeros that are left out; the system's may be larger
constexpr size_t kPiece = 8 << 20;      // is written, and then given back
constexpr size_t kGap = 16 * kPage;     // fewer zeros than that are not worth a seam
constexpr long kLookNs = 2'000'000;
constexpr int kLooksMax = 300'000;      // ten minutes

struct Piece {
  uintptr_t at;
  size_t size;
  off_t offset;
};
using Span = std::pair<uintptr_t, uintptr_t>;

struct Share {
  std::vector<Span> spans;
  std::vector<Piece> written;
  std::string error;
};

struct Keeper {
  std::mutex lock;
  bool running = false;
  std::atomic<int> looks{0};  // since somebody said that there might be something to do
  std::string folder;
  std::vector<Share> shares;
  int first = 0;  // number of the first file

  std::string file(size_t share) const {
    return folder + "/part-" + std::to_string(first + static_cast<int>(share));
  }
};

Keeper& keeper() {
  static Keeper* const only = new Keeper;  // never destroyed: its thread may end later
  return *only;
}

bool zero(const char* page) {
  return *page == 0 && std::memcmp(page, page + 1, kPage - 1) == 0;
}

bool is(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// Both ways: a call may move less than it was asked to.
template <typename Call>
bool all_of(Call call, uintptr_t at, size_t size, off_t offset) {
  while (size > 0) {
    const ssize_t done = call(at, size, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = EIO;  // the file is too short
    if (done <= 0) return false;
    at += static_cast<size_t>(done);
    size -= static_cast<size_t>(done);
    offset += done;
  }
  return true;
}

// From `at` on: the end of what must be written in one go.
uintptr_t end_of_run(uintptr_t at, uintptr_t end) {
  end = std::min(end, at + kPiece);
  uintptr_t last = at;  // behind the last page that is not zero
  for (; at < end && at - last < kGap; at += kPage)
    if (!zero(reinterpret_cast<const char*>(at))) last = at + kPage;
  return last;
}

bool stow_span(const Span& span, int file, off_t& end, Share& share) {
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t kept = span.first;  // from here on it is still in memory
  for (uintptr_t at = span.first; at < span.second;) {
    const uintptr_t look = std::min(span.second, kept + kPiece);
    while (at < look && zero(reinterpret_cast<const char*>(at))) at += kPage;
    const uintptr_t to = end_of_run(at, span.second);
    if (to > at) {
      auto write = [file](uintptr_t from, size_t size, off_t offset) {
        return pwrite(file, reinterpret_cast<const void*>(from), size, offset);
      };
      if (!all_of(write, at, to - at, end)) return false;
      share.written.push_back({at, to - at, end});
      end += static_cast<off_t>(to - at);
    }
    at = to;
    const uintptr_t whole = at & ~(page - 1);
    if (whole - kept >= kPiece || at == span.second) {
      if (madvise(reinterpret_cast<void*>(kept), whole - kept, MADV_DONTNEED) != 0) return false;
      kept = whole;
    }
  }
  return true;
}

void stow_share(const std::string& path, Share& share) {
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  off_t end = 0;
  bool good = file >= 0;
  for (const Span& span : share.spans) good = good && stow_span(span, file, end, share);
  if (!good) share.error = path + ": " + strerror(errno);
  if (file >= 0) close(file);
}

// What has been read is given back at once: there may be no room for it twice.
void fetch_share(const std::string& path, Share& share) {
  share.error.clear();
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  bool good = file >= 0 || share.written.empty();
  for (const Piece& piece : share.written) {
    auto read = [file](uintptr_t to, size_t size, off_t offset) {
      return pread(file, reinterpret_cast<void*>(to), size, offset);
    };
    good = good && all_of(read, piece.at, piece.size, piece.offset);
    if (good)
      fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece.offset,
                static_cast<off_t>(piece.size));
  }
  if (!good) share.error = path + ": " + strerror(errno);
  if (file >= 0) close(file);
  if (good) unlink(path.c_str());
}

// Nothing may be thrown in a thread of a process that is not ours.
template <void (*move)(const std::string&, Share&)>
void one_share(const std::string& path, Share& share) noexcept {
  try {
    move(path, share);
  } catch (const std::exception& error) {
    share.error = error.what();
  }
}

template <void (*move)(const std::string&, Share&)>
std::string in_parallel(Keeper& it) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < it.shares.size(); ++i) {
    Share& share = it.shares[i];
    if (share.spans.empty()) continue;
    try {
      threads.emplace_back(one_share<move>, it.file(i), std::ref(share));
    } catch (const std::system_error&) {  // no more threads
      one_share<move>(it.file(i), share);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const Share& share : it.shares)
    if (!share.error.empty()) return share.error;
  return "";
}

// Neighbours in one file, and about as much in each.
bool divide(Keeper& it, size_t parts) {
  it.shares.clear();
  FILE* list = fopen((it.folder + "/areas-stow").c_str(), "re");
  if (list == nullptr) return false;
  std::vector<Span> areas;
  Span area;
  while (fscanf(list, "%" SCNxPTR " %" SCNxPTR, &area.first, &area.second) == 2)
    areas.push_back(area);
  fclose(list);
  size_t total = 0, seen = 0;
  for (const Span& one : areas) total += one.second - one.first;
  it.shares.assign(parts, {});
  for (const Span& one : areas)
    for (uintptr_t at = one.first; at < one.second;) {
      const uintptr_t to = std::min(one.second, at + kPiece);
      const size_t share = std::min(parts - 1, seen * parts / std::max<size_t>(1, total));
      std::vector<Span>& spans = it.shares[share].spans;
      if (!spans.empty() && spans.back().second == at) spans.back().second = to;
      else spans.push_back({at, to});
      seen += to - at;
      at = to;
    }
  return true;
}

// Appears as a whole, or not at all: whoever waits has a limit.
void answer(const Keeper& it, const char* name, const std::string& error) {
  const std::string path = it.folder + "/" + name, made = path + "~";
  FILE* file = fopen(made.c_str(), "we");
  if (file == nullptr) return;
  const bool written = fputs(error.empty() ? "good" : error.c_str(), file) >= 0;
  if (fclose(file) == 0 && written) rename(made.c_str(), path.c_str());
}

void pause() {
  const timespec time{0, kLookNs};
  nanosleep(&time, nullptr);
}

// Under the lock, so that nobody relies on a thread that is about to end.
bool tired(Keeper& it) {
  const std::lock_guard<std::mutex> held(it.lock);
  if (it.looks++ > kLooksMax) it.running = false;
  return !it.running;
}

void keep(Keeper& it, size_t parts) {
  while (!is(it.folder + "/areas-stow")) {
    if (tired(it)) return;
    pause();
  }
  const char* name = "areas-stowed";
  std::string error = divide(it, parts) ? in_parallel<stow_share>(it) : strerror(errno);
  if (error.empty()) {
    answer(it, name, "");
    while (!is(it.folder + "/areas-fetch")) pause();
    name = "areas-fetched";
    error = in_parallel<fetch_share>(it);
  } else if (const std::string worse = in_parallel<fetch_share>(it); !worse.empty()) {
    error += "; and it did not come back: " + worse;
  }
  const std::lock_guard<std::mutex> held(it.lock);
  it.running = false;
  answer(it, name, error);
}

void keep_quietly(size_t parts) noexcept {
  try {
    keep(keeper(), parts);
  } catch (const std::exception&) {  // no memory for a name: nobody is answered
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Somebody waits from now on for words in that folder. Files are part-<first> and so on.
EXPORT int keepstep_areas_watch(const char* folder, int first, int parts) {
  Keeper& it = keeper();
  const std::lock_guard<std::mutex> held(it.lock);
  it.looks = 0;
  if (it.running) return 0;
  it.folder = folder;
  it.first = first;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the script's
  try {
    std::thread(keep_quietly, static_cast<size_t>(parts)).detach();
    it.running = true;
  } catch (const std::exception&) {  // no more threads
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return it.running ? 0 : -1;
}
