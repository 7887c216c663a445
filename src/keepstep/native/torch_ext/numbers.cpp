#pragma GCC optimize("O2")  // the rest is not worth the time it takes to compile
#include "numbers.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace keepstep {
namespace {

template <typename Word>
std::tuple<int64_t, int64_t, int64_t> of(const Word* words, size_t count) {
  // Several of each, so that no word has to wait for the one before.
  constexpr size_t kWays = 4;
  uint64_t sum[kWays] = {};
  Word low[kWays], high[kWays];
  std::fill(low, low + kWays, std::numeric_limits<Word>::max());
  std::fill(high, high + kWays, std::numeric_limits<Word>::min());
  const auto take = [&](size_t way, Word word) {
    sum[way] += static_cast<uint64_t>(static_cast<int64_t>(word));
    low[way] = std::min(low[way], word);
    high[way] = std::max(high[way], word);
  };
  size_t at = 0;
  for (; at + kWays <= count; at += kWays) {
    for (size_t way = 0; way < kWays; ++way) take(way, words[at + way]);
  }
  for (; at < count; ++at) take(0, words[at]);
  uint64_t total = 0;
  for (uint64_t one : sum) total += one;
  return {static_cast<int64_t>(total), *std::min_element(low, low + kWays),
          *std::max_element(high, high + kWays)};
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
