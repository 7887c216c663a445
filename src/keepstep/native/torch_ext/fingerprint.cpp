#include "fingerprint.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>

namespace keepstep {
namespace {

typedef uint64_t Words __attribute__((vector_size(16)));  // every machine has such registers
typedef float Floats __attribute__((vector_size(16)));

constexpr size_t kWays = 4;  // none has to wait for the others
constexpr size_t kBlock = sizeof(Words) * kWays;
constexpr size_t kChunk = 16 << 10;  // stays in the nearest cache while it is read again

// How a state takes up a word. With equal words different states stay different, and different
// words make equal states different.

// One round of AES: its parts can all be undone, and every bit of a byte depends on all others.
struct ByCipher {
  static bool available() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("aes");
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_AES) != 0;
#else
    return false;
#endif
  }

  static inline __attribute__((always_inline)) Words mixed(Words state, Words word) {
#if defined(__x86_64__)
    asm("aesenc %1, %0" : "+x"(state) : "x"(word));
#elif defined(__aarch64__)
    asm(".arch_extension crypto\n\taese %0.16b, %1.16b\n\taesmc %0.16b, %0.16b"
        : "+w"(state)
        : "w"(word));
#endif
    return state;
  }
};

// On machines without it. Each of the three parts can be undone. Without products: where this is
// needed they may be slow.
struct ByShifts {
  static inline __attribute__((always_inline)) Words mixed(Words state, Words word) {
    state ^= word;
    state += state << 21;
    return state ^ (state >> 29);
  }
};

struct AsTheyAre {
  Words operator()(Words words) const { return words; }
};

struct Multiplied {
  float by;
  Words operator()(Words words) const {
    return reinterpret_cast<Words>(reinterpret_cast<Floats>(words) * by);
  }
};

template <typename By>
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
        now[n] = By::mixed(now[n], made(words));
      }
    }
    for (size_t n = 0; n < kWays; ++n) way[n] = now[n];
    if (const size_t left = size % kBlock) {
      Words rest[kWays] = {};
      __builtin_memcpy(rest, at, left);
      for (size_t n = 0; n < kWays; ++n) rest[n] = made(rest[n]);
      __builtin_memset(reinterpret_cast<unsigned char*>(rest) + left, 0, kBlock - left);
      for (size_t n = 0; n < kWays; ++n) way[n] = By::mixed(way[n], rest[n]);
    }
  }

  void end_piece(size_t size) { way[0] = By::mixed(way[0], Words{size, size}); }

  Fingerprint found() const {
    Words found{};
    for (size_t n = 0; n < kWays; ++n) {
      for (int round = 0; round < 4; ++round) found = By::mixed(found, round ? Words{} : way[n]);
    }
    return {found[0], found[1]};
  }
};

template <typename By, typename Made>
Fingerprint of(const Pieces& pieces, Made made) {
  State<By> state;
  for (const auto& [from, size] : pieces) {
    state.add(reinterpret_cast<const unsigned char*>(from), size, made);
    state.end_piece(size);
  }
  return state.found();
}

template <typename By>
Fingerprint copied(const Copies& pieces) {
  State<By> state;
  for (const auto& [from, size, to] : pieces) {
    for (size_t done = 0; done < size; done += kChunk) {
      const size_t count = std::min(size - done, kChunk);
      auto* there = reinterpret_cast<unsigned char*>(to + done);
      std::memcpy(there, reinterpret_cast<const void*>(from + done), count);
      state.add(there, count, AsTheyAre());
    }
    state.end_piece(size);
  }
  return state.found();
}

std::atomic<bool> cipher = ByCipher::available();

template <typename Made>
Fingerprint of(const Pieces& pieces, Made made) {
  return cipher ? of<ByCipher>(pieces, made) : of<ByShifts>(pieces, made);
}

}  // namespace

bool use_cipher(bool wanted) { return cipher = wanted && ByCipher::available(); }

Fingerprints::Fingerprints(std::vector<Pieces> groups, std::optional<float> by)
    : groups_(std::move(groups)), by_(by), found_(groups_.size()) {
  for (const auto& pieces : groups_) {
    for (const auto& piece : pieces) bytes_ += piece.second;
  }
}

void Fingerprints::help() {
  for (size_t at; (at = next_++) < groups_.size();) {
    found_[at] = by_ ? of(groups_[at], Multiplied{*by_}) : of(groups_[at], AsTheyAre());
    if (++done_ == groups_.size()) {
      const std::lock_guard lock(mutex_);
      all_.notify_all();
    }
  }
}

std::vector<Fingerprint> Fingerprints::take() {
  help();
  std::unique_lock lock(mutex_);
  all_.wait(lock, [&] { return done_ == groups_.size(); });
  return found_;
}

Fingerprint copy(const Copies& pieces) {
  return cipher ? copied<ByCipher>(pieces) : copied<ByShifts>(pieces);
}

}  // namespace keepstep
