#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

namespace keepstep {

// Of words of 8, 4, 2 (signed) or 1 (unsigned) bytes at an address: their sum modulo 2^64, the least
// and the greatest one. A GPU computes the same (keepstep.worker.vault.staging).
std::tuple<int64_t, int64_t, int64_t> numbers(uintptr_t address, size_t count, int width);

}  // namespace keepstep
