#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace keepstep {

using Pieces = std::vector<std::pair<uintptr_t, size_t>>;  // address, bytes
using Fingerprint = std::pair<uint64_t, uint64_t>;

// One of each group, with so many threads that help. Whatever is done to a single word of 8 bytes
// changes it, and what is done to several does but for chance. It is no protection against malice.
std::vector<Fingerprint> fingerprints(const std::vector<Pieces>& groups, size_t helpers);

// Of floats, what they would be if each were multiplied by this.
std::vector<Fingerprint> fingerprints_multiplied(const std::vector<Pieces>& groups, float by,
                                                 size_t helpers);

// Copies pieces (from, size, to), and gives the fingerprint of what has come there: `from` may be
// written to meanwhile.
Fingerprint copy(const std::vector<std::tuple<uintptr_t, size_t, uintptr_t>>& pieces);

}  // namespace keepstep
