#include "fingerprint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace keepstep {
namespace {

typedef uint64_t Words __attribute__((vector_size(16)));  // every machine has such registers
typedef float Floats __attribute__((vector_size(16)));

constexpr size_t kWays = 4;  // none has to wait for the others
constexpr size_t kBlock = sizeof(Words) * kWays;
constexpr size_t kHelped = 2 << 20;  // bytes that are worth a thread
constexpr size_t kChunk = 16 << 10;  // stays in the nearest cache while it is read again

// Each of its three parts can be undone, so different states stay different with equal words, and
// different words make equal states different. Without products: not all machines have fast ones.
template <typename Word>
inline __attribute__((always_inline)) Word mixed(Word state, Word word) {
  state ^= word;
  state += state << 21;
  return state ^ (state >> 29);
}

struct AsTheyAre {
  Words operator()(Words words) const { return words; }
};

struct Multiplied {
  float by;
  Words operator()(Words words) const {
    return reinterpret_cast<Words>(reinterpret_cast<Floats>(words) * by);
  }
};

struct State {
  Words way[kWays] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}};

  // Optimized by itself: to do so with all the rest is not worth the time it takes to compile.
  template <typename Made>
  __attribute__((optimize("O3"))) void add(const unsigned char* at, size_t size, Made made) {
    Words now[kWays];
    for (size_t n = 0; n < kWays; ++n) now[n] = way[n];
    for (const auto* end = at + size / kBlock * kBlock; at != end; at += kBlock) {
      for (size_t n = 0; n < kWays; ++n) {
        Words words;
        __builtin_memcpy(&words, at + n * sizeof words, sizeof words);
        now[n] = mixed(now[n], made(words));
      }
    }
    for (size_t n = 0; n < kWays; ++n) way[n] = now[n];
    if (const size_t left = size % kBlock) {
      Words rest[kWays] = {};
      __builtin_memcpy(rest, at, left);
      for (size_t n = 0; n < kWays; ++n) rest[n] = made(rest[n]);
      __builtin_memset(reinterpret_cast<unsigned char*>(rest) + left, 0, kBlock - left);
      for (size_t n = 0; n < kWays; ++n) way[n] = mixed(way[n], rest[n]);
    }
  }

  void end_piece(size_t size) { way[0] = mixed(way[0], Words{size, size}); }

  Fingerprint found() const {
    Words found{};
    for (size_t n = 0; n < kWays; ++n) {
      for (int round = 0; round < 4; ++round) found = mixed(found, round ? Words{} : way[n]);
    }
    return {found[0], found[1]};
  }
};

}  // namespace

namespace {

template <typename Made>
Fingerprint of(const Pieces& pieces, Made made) {
  State state;
  for (const auto& [from, size] : pieces) {
    state.add(reinterpret_cast<const unsigned char*>(from), size, made);
    state.end_piece(size);
  }
  return state.found();
}

template <typename Made>
std::vector<Fingerprint> of(const std::vector<Pieces>& groups, size_t helpers, Made made) {
  std::vector<Fingerprint> found(groups.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t at; (at = next++) < groups.size();) found[at] = of(groups[at], made);
  };
  size_t bytes = 0;
  for (const auto& pieces : groups) {
    for (const auto& piece : pieces) bytes += piece.second;
  }
  std::vector<std::thread> others;
  for (size_t n = std::min({helpers, groups.size(), bytes / kHelped}); n > 0; --n) {
    others.emplace_back(work);
  }
  work();
  for (auto& other : others) other.join();
  return found;
}

}  // namespace

std::vector<Fingerprint> fingerprints(const std::vector<Pieces>& groups, size_t helpers) {
  return of(groups, helpers, AsTheyAre());
}

std::vector<Fingerprint> fingerprints_multiplied(const std::vector<Pieces>& groups, float by,
                                                 size_t helpers) {
  return of(groups, helpers, Multiplied{by});
}

Fingerprint copy(const std::vector<std::tuple<uintptr_t, size_t, uintptr_t>>& pieces) {
  State state;
  for (const auto& [from, size, to] : pieces) {
    for (size_t done = 0; done < size; done += kChunk) {
      const size_t count = size - done < kChunk ? size - done : kChunk;
      auto* there = reinterpret_cast<unsigned char*>(to + done);
      std::memcpy(there, reinterpret_cast<const void*>(from + done), count);
      state.add(there, count, AsTheyAre());
    }
    state.end_piece(size);
  }
  return state.found();
}

}  // namespace keepstep
