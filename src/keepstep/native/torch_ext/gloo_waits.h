#pragma once

#include <cstddef>

namespace keepstep {

// From now on whoever waits for a message of gloo is known. False: this build of torch has no
// symbols by which gloo's methods could be found.
bool note_waits();

// Those who wait get an exception; says how many. From any thread.
size_t end_waits();

}  // namespace keepstep
