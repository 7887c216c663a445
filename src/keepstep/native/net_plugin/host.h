// What the transport needs of the machine: configuration, addresses, sockets, link state, and words
// to NCCL's log and to the agent. Nothing here blocks.
#pragma once

#include <sys/un.h>

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "failover.h"

namespace keepstep::net {

Nanos monotonic();

// One local way to the network. Path i of a communicator uses the i-th of both ends.
struct LocalPath {
  std::string interface;
  unsigned index;  // of the interface
  Endpoint address;
  std::string text;  // of the address
  int speed_mbps;
};

struct Config {
  std::vector<LocalPath> paths;
  Limits limits;
  bool helper = false;  // a second thread reads large messages
  std::string agent;    // unix datagram socket that takes events; empty: nobody listens
  std::string control;  // unix datagram socket on which tests ask for faults; empty: none
};

// Reads KEEPSTEP_NET_*. What is wrong, or an empty string.
std::string load(Config* config);

// Sockets do not block and are closed on exec. -1: errno says why.
int listen_on(const LocalPath& path, uint16_t* port);  // port 0: any, and which
int start_connecting(const LocalPath& path, const Endpoint& to, uint16_t port, bool one_of_many);
void tune(int socket, bool one_of_many);
bool kernel_view(int socket, KernelView* view);
// A reset, even if a forked child still holds a copy of the socket.
void reset_and_close(int socket);
std::string peer_text(const Endpoint& endpoint);

// Carrier and administrative state of the interfaces of all paths.
class LinkWatch {
 public:
  explicit LinkWatch(const std::vector<LocalPath>& paths);
  int socket() const { return socket_; }
  struct Change {
    int path;
    bool up;
  };
  // Transitions since the last call, in order.
  std::vector<Change> read();

 private:
  void note(unsigned index, bool up, std::vector<Change>* changes);
  void resync(std::vector<Change>* changes);
  const std::vector<LocalPath>& paths_;
  std::vector<bool> up_;
  int socket_ = -1;
};

// One JSON object per datagram. The kernel queues only a few; the rest waits here for flush(), up to
// a bound. Whatever is beyond it, or finds no agent, is dropped.
class Reporter {
 public:
  explicit Reporter(const std::string& socket_path);
  bool listened() const { return socket_ >= 0; }
  void send(const std::string& json);
  bool flush();  // false: something still waits

 private:
  bool deliver(const std::string& json);

  std::mutex mutex_;
  std::deque<std::string> waiting_;
  sockaddr_un to_;
  int socket_ = -1;
};

int bind_control(const std::string& path);

void set_log(abi::Log log);
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void log(int level, const char* format, ...);

}  // namespace keepstep::net
