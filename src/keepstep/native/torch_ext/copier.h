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

// A thread that copies and takes fingerprints, in the order in which it is told. It never needs the
// interpreter. Jobs are numbered from 1.
class Copier : public OfProcess {
 public:
  explicit Copier(size_t helpers) : helpers_(helpers), thread_([this] { run(); }) {}
  ~Copier() { close(); }

  uint64_t copy(Copies pieces);
  // Of copies: the fingerprints if each were multiplied by this.
  uint64_t multiply(std::vector<Pieces> groups, float by);
  // One fingerprint of each group, by the caller. This thread and the helpers help if they can.
  std::vector<Fingerprint> look(std::vector<Pieces> groups);

  uint64_t last() const;
  bool done(uint64_t number) const;
  // When this job is done. False: it is.
  bool ring_after(uint64_t number, std::shared_ptr<Bell> bell);
  void wait(uint64_t number) const;
  // Of this job: one fingerprint of all that was copied, or one of each group.
  std::vector<Fingerprint> found(uint64_t number) const;
  // All is done, and nobody asks for what was found.
  void forget();
  // What it was told is done before.
  void close();

 private:
  using Job = std::function<std::vector<Fingerprint>()>;

  uint64_t put(Job job);
  std::vector<Fingerprint> helped(const std::shared_ptr<Fingerprints>& work) const;
  void run();

  const size_t helpers_;
  mutable std::mutex mutex_;
  std::condition_variable told_something_;
  mutable std::condition_variable done_something_;
  std::deque<Job> jobs_;
  std::vector<std::pair<uint64_t, std::shared_ptr<Bell>>> bells_;
  std::map<uint64_t, std::vector<Fingerprint>> found_;
  uint64_t told_ = 0, done_ = 0;
  bool closed_ = false;
  std::thread thread_;  // last: it uses all the others
};

}  // namespace keepstep
