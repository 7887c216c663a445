#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "fingerprint.h"

namespace keepstep {

// A thread that copies and takes fingerprints, in the order in which it is told. It never needs the
// interpreter. Jobs are numbered from 1.
class Copier {
 public:
  using Copies = std::vector<std::tuple<uintptr_t, size_t, uintptr_t>>;  // from, size, to

  explicit Copier(size_t helpers) : helpers_(helpers), thread_([this] { run(); }) {}
  ~Copier() { close(); }

  uint64_t copy(Copies pieces);
  // Of copies: what they would be if each were multiplied by this.
  uint64_t multiply(std::vector<Pieces> groups, float by);

  uint64_t last() const;
  bool done(uint64_t number) const;
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
  void run();

  const size_t helpers_;
  mutable std::mutex mutex_;
  mutable std::condition_variable turn_;
  std::deque<Job> jobs_;
  std::map<uint64_t, std::vector<Fingerprint>> found_;
  uint64_t told_ = 0, done_ = 0;
  bool closed_ = false;
  std::thread thread_;  // last: it uses all the others
};

}  // namespace keepstep
