#include "numbers.h"

#include <stdexcept>

namespace keepstep {
namespace {

// Optimized by itself: to do so with all the rest is not worth the time it takes to compile. So it
// calls nothing, not even std::min.
template <typename Word>
__attribute__((optimize("O3"))) std::tuple<int64_t, int64_t, int64_t> of(const Word* words,
                                                                         size_t count) {
  constexpr size_t kWays = 16;  // no word has to wait for the one before
  uint64_t sum[kWays] = {};
  Word low[kWays], high[kWays];
  for (size_t way = 0; way < kWays; ++way) low[way] = high[way] = count > 0 ? words[0] : 0;
  size_t at = 0;
  for (; at + kWays <= count; at += kWays) {
    for (size_t way = 0; way < kWays; ++way) {
      const Word word = words[at + way];
      sum[way] += static_cast<uint64_t>(static_cast<int64_t>(word));
      low[way] = word < low[way] ? word : low[way];
      high[way] = word > high[way] ? word : high[way];
    }
  }
  uint64_t total = 0;
  Word least = low[0], greatest = high[0];
  for (; at < count; ++at) {
    const Word word = words[at];
    total += static_cast<uint64_t>(static_cast<int64_t>(word));
    least = word < least ? word : least;
    greatest = word > greatest ? word : greatest;
  }
  for (size_t way = 0; way < kWays; ++way) {
    total += sum[way];
    least = low[way] < least ? low[way] : least;
    greatest = high[way] > greatest ? high[way] : greatest;
  }
  return {static_cast<int64_t>(total), least, greatest};
}

}  // namespace

std::tuple<int64_t, int64_t, int64_t> numbers(uintptr_t address, size_t count, int width) {
  const auto* at = reinterpret_cast<const void*>(address);
  switch (width) {
    case 8: return of(static_cast<const int64_t*>(at), count);
    case 4: return of(static_cast<const int32_t*>(at), count);
    case 2: return of(static_cast<const int16_t*>(at), count);
    case 1: return of(static_cast<const uint8_t*>(at), count);
  }
  throw std::invalid_argument("no words are that wide");
}

}  // namespace keepstep
