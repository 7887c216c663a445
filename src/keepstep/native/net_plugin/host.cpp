#include "host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/if.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

extern "C" unsigned if_nametoindex(const char*);  // <net/if.h> and <linux/if.h> exclude each other

namespace keepstep::net {

namespace {

constexpr int kDefaultSpeedMbps = 10000;
// With several paths, more than this unsent in one socket would wait there while another is free.
constexpr int kUnsentBytes = 512 * 1024;
constexpr size_t kEventsWaiting = 1024;
constexpr long kProcessorsEach = 4;

std::atomic<abi::Log> g_log{nullptr};

struct Address {
  sockaddr_storage storage;
  socklen_t size;
};

Address address(const Endpoint& endpoint, uint16_t port) {
  Address result{};
  if (endpoint.v6) {
    auto* in6 = reinterpret_cast<sockaddr_in6*>(&result.storage);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(port);
    std::memcpy(&in6->sin6_addr, endpoint.address, 16);
    result.size = sizeof *in6;
  } else {
    auto* in4 = reinterpret_cast<sockaddr_in*>(&result.storage);
    in4->sin_family = AF_INET;
    in4->sin_port = htons(port);
    std::memcpy(&in4->sin_addr, endpoint.address, 4);
    result.size = sizeof *in4;
  }
  return result;
}

bool endpoint_of(const sockaddr* from, Endpoint* endpoint) {
  *endpoint = {};
  if (from->sa_family == AF_INET) {
    std::memcpy(endpoint->address, &reinterpret_cast<const sockaddr_in*>(from)->sin_addr, 4);
    return true;
  }
  if (from->sa_family != AF_INET6) return false;
  const in6_addr& in6 = reinterpret_cast<const sockaddr_in6*>(from)->sin6_addr;
  if (IN6_IS_ADDR_LINKLOCAL(&in6)) return false;  // would need a scope that the peer cannot know
  endpoint->v6 = true;
  std::memcpy(endpoint->address, &in6, 16);
  return true;
}

int speed_of(const std::string& interface) {
  int speed = 0;
  std::ifstream("/sys/class/net/" + interface + "/speed") >> speed;
  return speed > 0 ? speed : kDefaultSpeedMbps;
}

struct Candidate {
  LocalPath path;
  bool running, loopback, hidden;
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> found;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return found;
  for (ifaddrs* it = first; it; it = it->ifa_next) {
    Candidate one{};
    if (!it->ifa_addr || !endpoint_of(it->ifa_addr, &one.path.address)) continue;
    one.path.interface = it->ifa_name;
    one.path.index = if_nametoindex(it->ifa_name);
    one.path.text = peer_text(one.path.address);
    one.path.speed_mbps = speed_of(one.path.interface);
    one.running = (it->ifa_flags & IFF_UP) && (it->ifa_flags & IFF_RUNNING);
    one.loopback = it->ifa_flags & IFF_LOOPBACK;
    one.hidden = one.path.interface.rfind("docker", 0) == 0 ||
                 one.path.interface.rfind("virbr", 0) == 0 ||
                 one.path.interface.rfind("veth", 0) == 0;
    found.push_back(one);
  }
  freeifaddrs(first);
  return found;
}

// An interface is named by itself or by one of its addresses; IPv4 comes first.
std::string find(const std::vector<Candidate>& all, const std::string& name, LocalPath* path) {
  Endpoint wanted{};
  bool is_address = inet_pton(AF_INET, name.c_str(), wanted.address) == 1;
  if (!is_address && inet_pton(AF_INET6, name.c_str(), wanted.address) == 1) {
    is_address = wanted.v6 = true;
  }
  const Candidate* best = nullptr;
  for (const Candidate& one : all) {
    bool same = is_address ? std::memcmp(&one.path.address, &wanted, sizeof wanted) == 0
                           : one.path.interface == name;
    // All of 127/8 is loopback's, though only 127.0.0.1 is listed.
    if (is_address && !wanted.v6 && wanted.address[0] == 127 && one.loopback) same = true;
    if (same && (!best || (best->path.address.v6 && !one.path.address.v6))) best = &one;
  }
  if (!best) return "KEEPSTEP_NET_PATHS: there is no interface or address " + name + " here";
  *path = best->path;
  if (is_address) {
    path->address = wanted;
    path->text = name;
  }
  return "";
}

std::string parse_paths(const char* list, std::vector<LocalPath>* paths) {
  auto all = candidates();
  if (!list || !*list) {
    for (const Candidate& one : all) {
      bool seen = false;
      for (const LocalPath& other : *paths) seen |= other.index == one.path.index;
      bool wanted = one.running && !one.loopback && !one.hidden && !seen;
      if (wanted && paths->size() < kPathsMax) paths->push_back(one.path);
    }
    return paths->empty() ? "no interface is up: name the paths in KEEPSTEP_NET_PATHS" : "";
  }
  std::string words = list;
  for (size_t from = 0; from <= words.size();) {
    size_t comma = std::min(words.find(',', from), words.size());
    std::string name = words.substr(from, comma - from);
    from = comma + 1;
    if (name.empty()) return "KEEPSTEP_NET_PATHS=" + words + ": an entry is empty";
    LocalPath path;
    if (auto wrong = find(all, name, &path); !wrong.empty()) return wrong;
    for (const LocalPath& other : *paths) {
      if (other.text == path.text) return "KEEPSTEP_NET_PATHS names " + name + " twice";
    }
    paths->push_back(path);
  }
  if (paths->size() > kPathsMax) {
    return "KEEPSTEP_NET_PATHS names " + std::to_string(paths->size()) + " paths; 8 are possible";
  }
  return "";
}

std::string number(const char* name, Nanos unit, Nanos* value) {
  const char* text = std::getenv(name);
  if (!text) return "";
  char* end = nullptr;
  errno = 0;
  double given = std::strtod(text, &end);
  if (end == text || *end || errno || !(given > 0 && given <= 1e6)) {
    return std::string(name) + "=" + text + " is not a number between 0 and 1000000";
  }
  *value = static_cast<Nanos>(given * static_cast<double>(unit));
  return "";
}

// NCCL's thread of each process on this machine needs a processor, and so do its user's.
bool processors_to_spare() {
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return false;
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  long processes = ranks ? std::strtol(ranks, nullptr, 10) : 1;
  return processes > 0 && CPU_COUNT(&mine) / processes >= kProcessorsEach;
}

std::string helper(bool* wanted) {
  const char* text = std::getenv("KEEPSTEP_NET_HELPERS");
  std::string said = text ? text : "auto";
  if (said != "0" && said != "1" && said != "auto") {
    return "KEEPSTEP_NET_HELPERS=" + said + " is not 0, 1 or auto";
  }
  *wanted = said == "auto" ? processors_to_spare() : said == "1";
  return "";
}

void set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof value);
}

int unix_socket(const std::string& path, sockaddr_un* to) {
  *to = {};
  to->sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof to->sun_path) return -1;
  std::memcpy(to->sun_path, path.c_str(), path.size());
  return ::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

}  // namespace

Nanos monotonic() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

std::string load(Config* config) {
  auto wrong = parse_paths(std::getenv("KEEPSTEP_NET_PATHS"), &config->paths);
  Limits& limits = config->limits;
  if (wrong.empty()) wrong = number("KEEPSTEP_NET_DEADLINE_S", kSecond, &limits.deadline);
  if (wrong.empty()) wrong = number("KEEPSTEP_NET_STALL_MS", kMillisecond, &limits.stall);
  if (wrong.empty()) wrong = number("KEEPSTEP_NET_HOLD_MS", kMillisecond, &limits.hold);
  if (wrong.empty()) wrong = helper(&config->helper);
  limits.hold_max = 60 * limits.hold;
  if (const char* path = std::getenv("KEEPSTEP_NET_AGENT")) config->agent = path;
  if (const char* path = std::getenv("KEEPSTEP_NET_CONTROL")) config->control = path;
  return wrong;
}

int listen_on(const LocalPath& path, uint16_t* port) {
  int family = path.address.v6 ? AF_INET6 : AF_INET;
  int fd = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (path.address.v6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  Address at = address(path.address, *port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&at.storage), at.size) != 0 || listen(fd, 256) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&at.storage), &at.size) != 0) {
    int kept = errno;
    close(fd);
    errno = kept;
    return -1;
  }
  *port = ntohs(path.address.v6 ? reinterpret_cast<sockaddr_in6*>(&at.storage)->sin6_port
                                : reinterpret_cast<sockaddr_in*>(&at.storage)->sin_port);
  return fd;
}

int start_connecting(const LocalPath& path, const Endpoint& to, uint16_t port,
                     bool one_of_many) {
  int family = to.v6 ? AF_INET6 : AF_INET;
  int fd = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  // Bound to address and interface: the routing table must not send two paths over one link.
  setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, path.interface.c_str(),
             static_cast<socklen_t>(path.interface.size()));
  tune(fd, one_of_many);
  Address from = address(path.address, 0), peer = address(to, port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&from.storage), from.size) != 0 ||
      (connect(fd, reinterpret_cast<sockaddr*>(&peer.storage), peer.size) != 0 &&
       errno != EINPROGRESS)) {
    int kept = errno;
    close(fd);
    errno = kept;
    return -1;
  }
  return fd;
}

void tune(int socket, bool one_of_many) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (one_of_many) set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
  // An idle connection whose peer is gone ends by keepalive. A busy one is judged by TCP_INFO, not
  // by TCP_USER_TIMEOUT: the kernel applies that to a full window too, and would end the
  // connections to a peer that is merely stopped.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 5);
}

bool kernel_view(int socket, KernelView* view) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  *view = {info.tcpi_unacked, info.tcpi_retransmits,
           static_cast<Nanos>(info.tcpi_last_ack_recv) * kMillisecond};
  return true;
}

void reset_and_close(int socket) {
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  connect(socket, &nowhere, sizeof nowhere);
  close(socket);
}

std::string peer_text(const Endpoint& endpoint) {
  char text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(endpoint.v6 ? AF_INET6 : AF_INET, endpoint.address, text, sizeof text);
  return text;
}

// ------------------------------------------------------------------------------------- LinkWatch

LinkWatch::LinkWatch(const std::vector<LocalPath>& paths) : paths_(paths), up_(paths.size(), true) {
  socket_ = ::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE);
  sockaddr_nl local{};
  local.nl_family = AF_NETLINK;
  local.nl_groups = RTMGRP_LINK;
  if (socket_ >= 0 && bind(socket_, reinterpret_cast<sockaddr*>(&local), sizeof local) != 0) {
    close(socket_);
    socket_ = -1;
  }
  if (socket_ < 0) log(abi::LogWarn, "no link events (%s): faults show later", strerror(errno));
  std::vector<Change> ignored;
  resync(&ignored);
}

void LinkWatch::note(unsigned index, bool up, std::vector<Change>* changes) {
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (paths_[i].index != index || up_[i] == up) continue;
    up_[i] = up;
    changes->push_back({static_cast<int>(i), up});
  }
}

void LinkWatch::resync(std::vector<Change>* changes) {
  int any = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (any < 0) return;
  for (const LocalPath& path : paths_) {
    ifreq request{};
    std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", path.interface.c_str());
    bool known = ioctl(any, SIOCGIFFLAGS, &request) == 0;
    if (known) note(path.index, request.ifr_flags & IFF_UP && request.ifr_flags & IFF_RUNNING, changes);
  }
  close(any);
}

std::vector<LinkWatch::Change> LinkWatch::read() {
  std::vector<Change> changes;
  alignas(nlmsghdr) char buffer[16384];
  for (;;) {
    ssize_t got = recv(socket_, buffer, sizeof buffer, 0);
    if (got < 0 && errno == ENOBUFS) {
      resync(&changes);  // words were lost
      continue;
    }
    if (got <= 0) return changes;
    auto left = static_cast<size_t>(got);
    for (auto* it = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(it, left);
         it = NLMSG_NEXT(it, left)) {
      auto* info = static_cast<ifinfomsg*>(NLMSG_DATA(it));
      auto index = static_cast<unsigned>(info->ifi_index);
      if (it->nlmsg_type == RTM_DELLINK) note(index, false, &changes);
      if (it->nlmsg_type != RTM_NEWLINK) continue;
      note(index, info->ifi_flags & IFF_UP && info->ifi_flags & IFF_LOWER_UP, &changes);
    }
  }
}

// -------------------------------------------------------------------------------------- Reporter

Reporter::Reporter(const std::string& socket_path) { socket_ = unix_socket(socket_path, &to_); }

bool Reporter::deliver(const std::string& json) {
  ssize_t sent = sendto(socket_, json.data(), json.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                        reinterpret_cast<sockaddr*>(&to_), sizeof to_);
  return sent >= 0 || (errno != EAGAIN && errno != ENOBUFS);
}

void Reporter::send(const std::string& json) {
  if (socket_ < 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_.empty() && deliver(json)) return;
  if (waiting_.size() < kEventsWaiting) waiting_.push_back(json);
}

bool Reporter::flush() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!waiting_.empty() && deliver(waiting_.front())) waiting_.pop_front();
  return waiting_.empty();
}

int bind_control(const std::string& path) {
  sockaddr_un at;
  int fd = unix_socket(path, &at);
  if (fd < 0) return -1;
  unlink(path.c_str());
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0) return fd;
  close(fd);
  return -1;
}

void set_log(abi::Log log) { g_log.store(log); }

void log(int level, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (abi::Log log = g_log.load()) {
    log(level, abi::kLogInit | abi::kLogNet, "keepstep", 0, "NET/Keepstep : %s", text);
  } else if (level <= abi::LogWarn) {
    std::fprintf(stderr, "NET/Keepstep : %s\n", text);
  }
}

}  // namespace keepstep::net
