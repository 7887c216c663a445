#include "digests.h"

#include <dlfcn.h>

namespace keepstep {
namespace {

struct Hash {  // XXH128_hash_t
  uint64_t low, high;
};
using Function = Hash (*)(const void*, size_t);

constexpr unsigned kSettled = 800;  // before 0.8.0 it was another function under the same name

Function function() {
  static const auto found = [] {
    void* library = dlopen("libxxhash.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return Function();
    const auto version = reinterpret_cast<unsigned (*)()>(dlsym(library, "XXH_versionNumber"));
    if (version == nullptr || version() < kSettled) return Function();
    return reinterpret_cast<Function>(dlsym(library, "XXH3_128bits"));
  }();
  return found;
}

}  // namespace

bool can_digest() { return function() != nullptr; }

std::vector<std::array<char, 16>> digests(const std::vector<iovec>& pieces) {
  std::vector<std::array<char, 16>> found;
  found.reserve(pieces.size());
  for (const auto& piece : pieces) {
    const Hash hash = function()(piece.iov_base, piece.iov_len);
    auto& written = found.emplace_back();
    for (int n = 0; n < 8; ++n) {
      written[n] = static_cast<char>(hash.high >> (56 - 8 * n));
      written[8 + n] = static_cast<char>(hash.low >> (56 - 8 * n));
    }
  }
  return found;
}

}  // namespace keepstep
