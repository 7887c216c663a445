// keepstep-store: one c10d TCPStore server in a process of its own.
//
//     keepstep-store [HOST]     prints the port, serves until stdin ends
//
// The store of a generation must not live in a rank (it would die with it) nor in the agent (the
// control plane never loads torch). Ending the process ends every rendezvous that waits in it.
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <netdb.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

// Bound here and not by the store: TCPStore listens on all interfaces.
int listen_on(const char* host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host, "0", &hints, &found); rc != 0) {
    std::fprintf(stderr, "keepstep-store: %s: %s\n", host, gai_strerror(rc));
    return -1;
  }
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool bound = fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      listen(fd, SOMAXCONN) == 0;
  freeaddrinfo(found);
  if (!bound) {
    std::fprintf(stderr, "keepstep-store: cannot listen on %s: %s\n", host, std::strerror(errno));
    return -1;
  }
  return fd;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return -1;
  }
  return ntohs(
      address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                    : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

}  // namespace

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGINT, SIG_IGN);  // a Ctrl-C at the terminal is the launcher's to handle
  const char* host = argc > 1 ? argv[1] : "127.0.0.1";
  const int fd = listen_on(host);
  if (fd < 0) {
    return 1;
  }
  const int port = port_of(fd);
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.isServer = true;
    options.waitWorkers = false;
    options.masterListenFd = fd;
    const auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    std::printf("%d\n", port);
    std::fflush(stdout);
    char sink[256];
    ssize_t got = 0;
    do {
      got = read(STDIN_FILENO, sink, sizeof(sink));
    } while (got > 0 || (got < 0 && errno == EINTR));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "keepstep-store: %s\n", error.what());
    return 1;
  }
  _exit(0);  // connected clients must not delay the end
}
