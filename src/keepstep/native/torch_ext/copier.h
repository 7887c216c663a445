#pragma once
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "fingerprint.h"

namespace keepstep {

// The calling thread gets a name, and drives nobody from a core when it has something to do: whoever
// computes there would wait for it.
void stay_behind(const char* name);

// What a thread sleeps at that others have something for.
struct Bell {
  std::mutex mutex;
  std::condition_variable turn;
};

// Has a thread, which a process that was forked has not: there it can be neither ended nor deleted.
class OfProcess {
 public:
  bool ours() const { return getpid() == process_; }

 private:
  const pid_t process_ = getpid();
};

struct DeleteOurs {
  template <typename T>
  void operator()(T* one) const {
    if (one->ours()) delete one;
  }
};

using Pieces = std::vector<std::pair<uintptr_t, size_t>>;  // address, bytes
using Copies = std::vector<std::tuple<uintptr_t, size_t, uintptr_t>>;  // from, size, to

// A thread that copies and takes fingerprints, in the order in which it is told. It never needs the
// interpreter. Jobs are numbered from 1.
class Copier : public OfProcess {
 public:
  explicit Copier(size_t helpers) : helpers_(helpers), thread_([this] { run(); }) {}
  ~Copier() { close(); }

  uint64_t copy(Copies pieces);

  // By the caller; this thread and the helpers help if they can. One fingerprint of each group; or
  // those before and after those pieces that are `chosen` are multiplied.
  std::vector<Fingerprint> look(const std::vector<Pieces>& groups);
  std::pair<std::vector<Fingerprint>, std::vector<Fingerprint>> multiply(
      const std::vector<Pieces>& groups, const std::vector<std::vector<bool>>& chosen, float by);

  uint64_t last() const;
  bool done(uint64_t number) const;
  // When this job is done. False: it is.
  bool ring_after(uint64_t number, std::shared_ptr<Bell> bell);
  void wait(uint64_t number) const;
  // Of this job: the fingerprint of all that was copied.
  Fingerprint found(uint64_t number) const;
  // All is done, and nobody asks for what was found.
  void forget();
  // What it was told is done before.
  void close();

 private:
  using Job = std::function<Fingerprint()>;

  uint64_t put(Job job);
  void share(size_t bytes, size_t parts, std::function<void(size_t)> one);
  void run();

  const size_t helpers_;
  mutable std::mutex mutex_;
  std::condition_variable told_something_;
  mutable std::condition_variable done_something_;
  std::deque<Job> jobs_;
  std::vector<std::pair<uint64_t, std::shared_ptr<Bell>>> bells_;
  std::map<uint64_t, Fingerprint> found_;
  uint64_t told_ = 0, done_ = 0;
  bool closed_ = false;
  std::thread thread_;  // last: it uses all the others
};

}  // namespace keepstep
