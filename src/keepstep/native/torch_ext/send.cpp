#include "send.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace keepstep {
namespace {

constexpr size_t kPieces = 512;  // in one call; the kernel takes twice as many

int wait_until_writable(int socket, double timeout_s) {
  pollfd one{socket, POLLOUT, 0};
  const int ready = poll(&one, 1, static_cast<int>(timeout_s * 1000));
  if (ready > 0 || (ready < 0 && errno == EINTR)) return 0;
  return ready == 0 ? ETIMEDOUT : errno;
}

}  // namespace

int send_all(int socket, std::vector<iovec> pieces, double timeout_s) {
  for (size_t at = 0; at < pieces.size();) {
    if (pieces[at].iov_len == 0) {
      ++at;
      continue;
    }
    msghdr message{};
    message.msg_iov = &pieces[at];
    message.msg_iovlen = std::min(pieces.size() - at, kPieces);
    ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      int error = errno;
      if (error == EAGAIN || error == EWOULDBLOCK) error = wait_until_writable(socket, timeout_s);
      if (error != 0 && error != EINTR) return error;
      continue;
    }
    while (sent > 0) {
      iovec& piece = pieces[at];
      const size_t part = std::min(static_cast<size_t>(sent), piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + part;
      piece.iov_len -= part;
      sent -= static_cast<ssize_t>(part);
      if (piece.iov_len == 0) ++at;
    }
  }
  return 0;
}

}  // namespace keepstep
