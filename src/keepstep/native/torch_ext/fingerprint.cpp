#include "fingerprint.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
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

template <typename By>
struct State {
  Words way[kWays] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}};

  // Optimized by itself: to do so with all the rest is not worth the time it takes to compile.
  __attribute__((optimize("O3"))) void add(const unsigned char* at, size_t size) {
    Words now[kWays];
    for (size_t n = 0; n < kWays; ++n) now[n] = way[n];
    for (const auto* end = at + size / kBlock * kBlock; at != end; at += kBlock) {
      for (size_t n = 0; n < kWays; ++n) {
        Words words;
        __builtin_memcpy(&words, at + n * sizeof words, sizeof words);
        now[n] = By::mixed(now[n], words);
      }
    }
    for (size_t n = 0; n < kWays; ++n) way[n] = now[n];
    if (const size_t left = size % kBlock) {
      Words rest[kWays] = {};
      __builtin_memcpy(rest, at, left);
      for (size_t n = 0; n < kWays; ++n) way[n] = By::mixed(way[n], rest[n]);
    }
  }

  Fingerprint found(size_t size) const {
    Words found{size, size};
    for (size_t n = 0; n < kWays; ++n) {
      for (int round = 0; round < 4; ++round) found = By::mixed(found, round ? Words{} : way[n]);
    }
    return {found[0], found[1]};
  }
};

template <typename By>
Fingerprint looked_at(const unsigned char* at, size_t size) {
  State<By> state;
  state.add(at, size);
  return state.found(size);
}

// In one walk: to read what is near once more takes as long as to fetch what is far.
template <typename By>
__attribute__((optimize("O3"))) std::pair<Fingerprint, Fingerprint> multiplied(unsigned char* at,
                                                                               size_t size,
                                                                               float by) {
  State<By> before, after;
  Words was[kWays], is[kWays];
  for (size_t n = 0; n < kWays; ++n) was[n] = is[n] = before.way[n];
  const size_t left = size % kBlock;
  for (const auto* end = at + (size - left); at != end; at += kBlock) {
    for (size_t n = 0; n < kWays; ++n) {
      Words words;
      __builtin_memcpy(&words, at + n * sizeof words, sizeof words);
      was[n] = By::mixed(was[n], words);
      words = reinterpret_cast<Words>(reinterpret_cast<Floats>(words) * by);
      is[n] = By::mixed(is[n], words);
      __builtin_memcpy(at + n * sizeof words, &words, sizeof words);
    }
  }
  for (size_t n = 0; n < kWays; ++n) before.way[n] = was[n], after.way[n] = is[n];
  before.add(at, left);
  for (size_t done = 0; done < left; done += sizeof(float)) {
    float one;
    __builtin_memcpy(&one, at + done, sizeof one);
    one *= by;
    __builtin_memcpy(at + done, &one, sizeof one);
  }
  after.add(at, left);
  return {before.found(size), after.found(size)};
}

template <typename By>
Fingerprint copied(const unsigned char* from, size_t size, unsigned char* to) {
  State<By> state;
  for (size_t done = 0; done < size; done += kChunk) {
    const size_t count = std::min(size - done, kChunk);
    std::memcpy(to + done, from + done, count);
    state.add(to + done, count);
  }
  return state.found(size);
}

std::atomic<bool> cipher = ByCipher::available();

}  // namespace

bool use_cipher(bool wanted) { return cipher = wanted && ByCipher::available(); }

Fingerprint look(uintptr_t at, size_t size) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(at);
  return cipher ? looked_at<ByCipher>(bytes, size) : looked_at<ByShifts>(bytes, size);
}

bool plain_floats() {
  const volatile float tiny = 1e-40f, half = 0.5f;
  const volatile float less = tiny * half;
  return less != 0 && std::fegetround() == FE_TONEAREST;
}

std::pair<Fingerprint, Fingerprint> multiply(uintptr_t at, size_t size, float by) {
  auto* bytes = reinterpret_cast<unsigned char*>(at);
  return cipher ? multiplied<ByCipher>(bytes, size, by) : multiplied<ByShifts>(bytes, size, by);
}

Fingerprint copy(uintptr_t from, size_t size, uintptr_t to) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  auto* there = reinterpret_cast<unsigned char*>(to);
  return cipher ? copied<ByCipher>(bytes, size, there) : copied<ByShifts>(bytes, size, there);
}

Fingerprint joined(const std::vector<Fingerprint>& some) {
  return look(reinterpret_cast<uintptr_t>(some.data()), some.size() * sizeof(Fingerprint));
}

}  // namespace keepstep
