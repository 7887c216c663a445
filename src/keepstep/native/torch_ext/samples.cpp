#include "samples.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

namespace keepstep {
namespace {

uint64_t elements(const at::Tensor& tensor, size_t count) {
  if (!tensor.device().is_cpu() || !tensor.is_non_overlapping_and_dense()) return 0;
  const auto* at = static_cast<const char*>(tensor.const_data_ptr());
  const size_t size = tensor.nbytes();
  constexpr size_t kWord = sizeof(uint64_t);
  uint64_t hash = size;
  for (size_t n = 0; n < count && size > 0; ++n) {
    const size_t start = size / count * n / kWord * kWord;
    uint64_t word = 0;
    std::memcpy(&word, at + start, std::min(kWord, size - start));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

std::vector<Sample> sampled(PyObject* tensors, PyObject* parts, size_t count, bool places) {
  std::vector<Sample> found;
  const auto size = PyList_GET_SIZE(tensors);
  found.reserve(size);
  for (Py_ssize_t n = 0; n < size; ++n) {
    const at::Tensor& whole = THPVariable_Unpack(PyList_GET_ITEM(tensors, n));
    const at::Tensor& part = THPVariable_Unpack(PyList_GET_ITEM(parts, n));
    const uint64_t version = whole.is_inference() ? 0 : whole._version();
    const bool placed = places || !part.device().is_cpu();
    const auto place = placed ? reinterpret_cast<uintptr_t>(part.const_data_ptr()) : 0;
    found.push_back({version, place, elements(part, count)});
  }
  return found;
}

}  // namespace keepstep
