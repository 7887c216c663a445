#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace keepstep {

using Pieces = std::vector<std::pair<uintptr_t, size_t>>;  // address, bytes
using Copies = std::vector<std::tuple<uintptr_t, size_t, uintptr_t>>;  // from, size, to
using Fingerprint = std::pair<uint64_t, uint64_t>;

// Whatever is done to a single word of 8 bytes changes a fingerprint, and what is done to several
// does but for chance. It is no protection against malice.

// One of each group, by whoever helps.
class Fingerprints {
 public:
  // `by`: the groups are floats, and it is what they would be if each were multiplied by this.
  explicit Fingerprints(std::vector<Pieces> groups, std::optional<float> by = {});

  size_t bytes() const { return bytes_; }
  // Returns when nothing is left to begin with.
  void help();
  // Returns when nobody reads any more.
  std::vector<Fingerprint> take();

 private:
  const std::vector<Pieces> groups_;
  const std::optional<float> by_;
  size_t bytes_ = 0;
  std::vector<Fingerprint> found_;
  std::atomic<size_t> next_ = 0, done_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

// Gives the fingerprint of what has come there: `from` may be written to meanwhile.
Fingerprint copy(const Copies& pieces);

// Of two functions, the faster one that not every machine has, or the other. Whether it is used.
bool use_cipher(bool wanted);

}  // namespace keepstep
