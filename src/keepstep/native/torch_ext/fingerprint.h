#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace keepstep {

using Fingerprint = std::pair<uint64_t, uint64_t>;

// Whatever is done to a single word of 8 bytes changes a fingerprint, and what is done to several
// does but for chance. It is no protection against malice.

Fingerprint look(uintptr_t at, size_t size);

// Whether this thread rounds to the nearest number, and takes tiny ones for what they are. Only then
// a product of torch's does not depend on which of its threads has made it.
bool plain_floats();

// Floats, each of which is multiplied by this. The fingerprints before and after.
std::pair<Fingerprint, Fingerprint> multiply(uintptr_t at, size_t size, float by);

// Gives the fingerprint of what has come there: `from` may be written to meanwhile.
Fingerprint copy(uintptr_t from, size_t size, uintptr_t to);

// One of many, in this order.
Fingerprint joined(const std::vector<Fingerprint>& some);

// Of two functions, the faster one that not every machine has, or the other. Whether it is used.
bool use_cipher(bool wanted);

}  // namespace keepstep
