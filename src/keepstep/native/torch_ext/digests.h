#pragma once
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <vector>

namespace keepstep {

// Whether the machine has libxxhash.
bool can_digest();

// XXH3 of 128 bits of each piece, as Python's xxhash writes it.
std::vector<std::array<char, 16>> digests(const std::vector<iovec>& pieces);

}  // namespace keepstep
