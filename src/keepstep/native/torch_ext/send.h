#pragma once
#include <sys/uio.h>

#include <vector>

namespace keepstep {

// All bytes of all pieces, in this order. 0, or what kept it from going on (errno); the latter also
// when the peer takes nothing for so long.
int send_all(int socket, std::vector<iovec> pieces, double timeout_s);

}  // namespace keepstep
