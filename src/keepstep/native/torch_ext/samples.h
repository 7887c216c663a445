#pragma once
#include <Python.h>

#include <cstdint>
#include <vector>

namespace keepstep {

struct Sample {
  uint64_t version;  // its version counter, which writing in place moves
  uint64_t place;
  uint64_t elements;  // a hash of some, spread over its memory; of a device's memory none are read
};

// Of each tensor, a list of Python's. `parts` is a list as long: what is here of each. Without
// `places`, it may lie elsewhere in host memory, as long as its elements are the same.
std::vector<Sample> sampled(PyObject* tensors, PyObject* parts, size_t count, bool places);

}  // namespace keepstep
