#include "engine.h"

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <thread>

namespace keepstep::net {

namespace {
constexpr size_t kStrangersMax = 128;
constexpr Nanos kHelloPatience = 2 * kSecond;
constexpr Nanos kNobodyThere = 100 * kMillisecond;
constexpr Nanos kStrangerVisit = 2 * kMillisecond;
constexpr Nanos kStatisticsEvery = kSecond;
constexpr Nanos kHelperStays = kMillisecond / 10;  // to wake up takes a good part of that
constexpr int kReadyMax = 16;
}  // namespace

Engine* Engine::get() {
  static std::mutex mutex;
  static Engine* engine = nullptr;  // never destroyed: its thread outlives main()
  std::lock_guard<std::mutex> lock(mutex);
  if (engine) return engine;
  auto fresh = std::make_unique<Engine>();
  std::string wrong;
  if (!fresh->start(&wrong)) {
    log(abi::LogWarn, "%s", wrong.c_str());
    return nullptr;
  }
  return engine = fresh.release();
}

bool Engine::start(std::string* wrong) {
  *wrong = load(&config_);
  if (!wrong->empty()) return false;
  Handle handle{};
  handle.count = static_cast<int>(config_.paths.size());
  for (int i = 0; i < handle.count; ++i) {
    handle.endpoint[i] = config_.paths[static_cast<size_t>(i)].address;
  }
  uint8_t bytes[kHandleBytes];
  if (!encode_handle(handle, bytes)) {
    *wrong = "so many IPv6 paths do not fit into a handle: 8 IPv4 or 6 IPv6 paths are possible";
    return false;
  }
  // One port for all addresses; another process may have it on one of them.
  for (int attempt = 0; attempt < 50 && listeners_.size() < config_.paths.size(); ++attempt) {
    for (int fd : listeners_) ::close(fd);
    listeners_.clear();
    port_ = 0;
    for (const LocalPath& path : config_.paths) {
      int fd = listen_on(path, &port_);
      if (fd < 0 && errno != EADDRINUSE) {
        *wrong = "cannot listen on " + path.text + ": " + strerror(errno);
        return false;
      }
      if (fd < 0) break;
      listeners_.push_back(fd);
    }
  }
  if (listeners_.size() < config_.paths.size()) {
    *wrong = "no port is free on all paths";
    return false;
  }
  if (config_.paths.size() == 1) {
    log(abi::LogWarn, "only one path (%s): nothing is left when it fails",
        config_.paths[0].interface.c_str());
  }
  reporter_ = std::make_unique<Reporter>(config_.agent);
  links_ = std::make_unique<LinkWatch>(config_.paths);
  if (!config_.control.empty()) control_ = bind_control(config_.control);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  gone_.resize(config_.paths.size());
  pid_ = getpid();
  if (config_.helper) watched_ = epoll_create1(EPOLL_CLOEXEC);
  // Signals are the user's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { run(); }).detach();
  try {
    if (watched_ >= 0) std::thread([this] { help(); }).detach();
  } catch (const std::system_error&) {  // one thread is enough
    ::close(watched_);
    watched_ = -1;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  for (const LocalPath& path : config_.paths) {
    log(abi::LogInfo, "path over %s, %s", path.interface.c_str(), path.text.c_str());
  }
  if (watched_ >= 0) log(abi::LogInfo, "a thread of its own reads large messages");
  return true;
}

int Engine::speed_mbps() const {
  int speed = 0;
  for (const LocalPath& path : config_.paths) speed += path.speed_mbps;
  return speed;
}

void Engine::wake() {
  uint64_t one = 1;
  ssize_t ignored = write(wake_, &one, sizeof one);
  static_cast<void>(ignored);  // a full counter is awake already
}

void Engine::keep(std::shared_ptr<Comm> comm) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    comms_.push_back(std::move(comm));
  }
  wake();
}

std::shared_ptr<Comm> Engine::listen(uint8_t* bytes) {
  Handle handle{};
  if (getrandom(handle.cookie.data(), handle.cookie.size(), 0) != sizeof handle.cookie) {
    return nullptr;
  }
  handle.port = port_;
  handle.count = static_cast<int>(config_.paths.size());
  for (int i = 0; i < handle.count; ++i) {
    handle.endpoint[i] = config_.paths[static_cast<size_t>(i)].address;
  }
  if (!encode_handle(handle, bytes)) return nullptr;
  auto comm = std::make_shared<Comm>(*this, Comm::Role::Receive, handle);
  keep(comm);
  return comm;
}

std::shared_ptr<Comm> Engine::connect(uint8_t* bytes) {
  uint64_t number;
  std::memcpy(&number, bytes + kHandleNotes, sizeof number);
  if (number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = connecting_.find(number);
    return found == connecting_.end() ? nullptr : found->second;
  }
  auto handle = parse_handle(bytes);
  if (!handle) {
    log(abi::LogWarn, "a handle that is not from this plugin: both ends need NCCL_NET=Keepstep");
    return nullptr;
  }
  int pairs = 0;
  for (int i = 0; i < handle->count; ++i) {
    auto at = static_cast<size_t>(i);
    pairs += at < config_.paths.size() && config_.paths[at].address.v6 == handle->endpoint[i].v6;
  }
  if (pairs < handle->count || pairs < static_cast<int>(config_.paths.size())) {
    log(abi::LogWarn, "%d paths here, %d at the peer, %d of which match in order and family",
        static_cast<int>(config_.paths.size()), handle->count, pairs);
  }
  if (!pairs) return nullptr;
  auto comm = std::make_shared<Comm>(*this, Comm::Role::Send, *handle);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = next_number_++;
    connecting_[number] = comm;
  }
  std::memcpy(bytes + kHandleNotes, &number, sizeof number);
  keep(comm);
  return comm;
}

std::vector<std::shared_ptr<Comm>> Engine::snapshot() {
  std::vector<std::shared_ptr<Comm>> comms;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    comms = comms_;
  }
  std::vector<std::shared_ptr<Comm>> finished;
  for (auto& comm : comms) {
    if (comm->finished()) finished.push_back(comm);
  }
  if (finished.empty()) return comms;
  std::vector<PathTotals> gone(gone_.size());
  for (auto& comm : finished) comm->totals(&gone);
  auto is_finished = [&](const std::shared_ptr<Comm>& comm) {
    return std::find(finished.begin(), finished.end(), comm) != finished.end();
  };
  std::lock_guard<std::mutex> lock(mutex_);
  comms_.erase(std::remove_if(comms_.begin(), comms_.end(), is_finished), comms_.end());
  for (auto it = connecting_.begin(); it != connecting_.end();) {
    it = is_finished(it->second) ? connecting_.erase(it) : std::next(it);
  }
  for (size_t i = 0; i < gone_.size(); ++i) gone_[i].add(gone[i]);
  return comms_;
}

// --------------------------------------------------------------------------------------- the thread

void Engine::run() {
  pthread_setname_np(pthread_self(), "keepstep-net");
  Nanos rest = kNobodyThere;
  for (;;) {
    try {
      rest = turn(rest);
    } catch (...) {  // memory ran out: the user's process is not ours to end
      rest = kNobodyThere;
    }
  }
}

// Waits for so long, or for a word; returns how long to wait next.
Nanos Engine::turn(Nanos rest) {
  pollfd waits[3 + kPathsMax] = {
      {wake_, POLLIN, 0}, {links_->socket(), POLLIN, 0}, {control_, POLLIN, 0}};
  nfds_t count = 3;
  for (int fd : listeners_) waits[count++] = {fd, POLLIN, 0};
  if (!strangers_.empty()) rest = std::min(rest, kStrangerVisit);
  timespec timeout{rest / kSecond, rest % kSecond};
  bool told = ppoll(waits, count, &timeout, nullptr) > 0;
  if (waits[0].revents) {
    uint64_t wakes;
    ssize_t ignored = read(wake_, &wakes, sizeof wakes);
    static_cast<void>(ignored);
  }
  Nanos now = monotonic();
  if (waits[1].revents) links(now);
  if (waits[2].revents) control(now);
  for (nfds_t i = 3; i < count; ++i) {
    if (waits[i].revents) accept_all(waits[i].fd, now);
  }
  hear_strangers(now);
  rest = kNobodyThere;
  for (auto& comm : snapshot()) {
    now = monotonic();
    if (told || now >= comm->due) comm->due = now + comm->serve(now);
    rest = std::min(rest, std::max<Nanos>(comm->due - now, 0));
  }
  statistics(now);
  return reporter_->flush() ? rest : std::min(rest, kStrangerVisit);
}

// --------------------------------------------------------------------------------------- the helper

bool Engine::watch(int socket, Comm* comm) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = comm;
  return watched_ >= 0 && epoll_ctl(watched_, EPOLL_CTL_ADD, socket, &event) == 0;
}

void Engine::unwatch(int socket) { epoll_ctl(watched_, EPOLL_CTL_DEL, socket, nullptr); }

// Null: it has ended since its socket was seen to be ready.
std::shared_ptr<Comm> Engine::find(const Comm* comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& one : comms_) {
    if (one.get() == comm) return one;
  }
  return nullptr;
}

// Sleeps until a communicator with large messages has something to be read, and stays with it until
// nothing has come for a moment. Whatever is in a socket may be read: large messages are sent only
// where a receive is open, and there is room for small ones.
void Engine::help() {
  pthread_setname_np(pthread_self(), "keepstep-read");
  std::vector<Charge> charges;
  charges.reserve(kReadyMax);
  for (;;) {
    try {
      if (!help_once(&charges)) return;
    } catch (...) {  // memory ran out: those that are left come again by epoll
      charges.clear();
    }
  }
}

bool Engine::help_once(std::vector<Charge>* charges) {
  epoll_event ready[kReadyMax];
  int count = epoll_wait(watched_, ready, kReadyMax, charges->empty() ? -1 : 0);
  if (count < 0 && errno != EINTR) return false;
  Nanos now = monotonic();
  for (int i = 0; i < count && charges->size() < kReadyMax; ++i) {
    auto* comm = static_cast<const Comm*>(ready[i].data.ptr);
    bool known = std::any_of(charges->begin(), charges->end(),
                             [&](const Charge& one) { return one.comm.get() == comm; });
    if (known) continue;
    if (auto found = find(comm)) charges->push_back({std::move(found), now});
  }
  bool any = false;
  for (size_t i = 0; i < charges->size();) {
    Charge& one = (*charges)[i];
    bool moved = one.comm->help();
    now = monotonic();
    any |= moved;
    if (moved) one.moved = now;
    if (now - one.moved <= kHelperStays) {
      ++i;
      continue;
    }
    one.comm->leave();
    charges->erase(charges->begin() + static_cast<long>(i));
  }
  if (!any) std::this_thread::yield();
  return true;
}

// ---------------------------------------------------------------------------------------- the rest

void Engine::accept_all(int listener, Nanos now) {
  for (;;) {
    int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    if (strangers_.size() >= kStrangersMax) {
      ::close(strangers_.front().socket);
      strangers_.erase(strangers_.begin());
      refuse("too many connections that say nothing");
    }
    strangers_.push_back({fd, now, 0, {}});
  }
}

void Engine::refuse(const char* why) {
  if (refused_++ == 0) log(abi::LogWarn, "a connection was refused (%s); said once", why);
}

void Engine::hear_strangers(Nanos now) {
  for (size_t i = 0; i < strangers_.size();) {
    Stranger& stranger = strangers_[i];
    ssize_t got = recv(stranger.socket, stranger.hello + stranger.got,
                       kHelloBytes - stranger.got, MSG_DONTWAIT);
    if (got > 0) stranger.got += static_cast<size_t>(got);
    bool gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    bool late = now - stranger.since > kHelloPatience;
    if (stranger.got < kHelloBytes && !gone && !late) {
      ++i;
      continue;
    }
    if (stranger.got < kHelloBytes || !introduce(stranger, now)) {
      reset_and_close(stranger.socket);
      refuse(stranger.got < kHelloBytes ? "no greeting" : "an unknown greeting");
    }
    strangers_.erase(strangers_.begin() + static_cast<long>(i));
  }
}

bool Engine::introduce(Stranger& stranger, Nanos now) {
  auto header = parse_header(stranger.hello);
  if (!header || header->type != Type::Hello) return false;
  std::shared_ptr<Comm> comm;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : comms_) {
      bool same = std::memcmp(one->cookie().data(), stranger.hello + kHeaderBytes, sizeof(Cookie)) == 0;
      if (same && one->receives()) comm = one;
    }
  }
  return comm && comm->adopt(stranger.socket, header->path, static_cast<uint32_t>(header->message),
                             now);
}

void Engine::links(Nanos now) {
  for (auto& change : links_->read()) {
    const LocalPath& path = config_.paths[static_cast<size_t>(change.path)];
    log(abi::LogInfo, "link %s of path %d is %s", path.interface.c_str(), change.path,
        change.up ? "up" : "down");
    char text[256];
    std::snprintf(text, sizeof text,
                  "{\"event\":\"link-%s\",\"at_ns\":%lld,\"pid\":%d,\"path\":%d,\"interface\":"
                  "\"%s\",\"local\":\"%s\"}",
                  change.up ? "up" : "down", static_cast<long long>(now), pid_, change.path,
                  path.interface.c_str(), path.text.c_str());
    report(text);
    for (auto& comm : snapshot()) comm->link_changed(change.path, change.up, now);
  }
}

// "cut 1" and "heal 1": for tests on machines where links cannot be touched.
void Engine::control(Nanos now) {
  char text[64] = {};
  while (recv(control_, text, sizeof text - 1, MSG_DONTWAIT) > 0) {
    int path = -1;
    bool cut = std::sscanf(text, "cut %d", &path) == 1;
    if (!cut && std::sscanf(text, "heal %d", &path) != 1) continue;
    if (path < 0) continue;
    for (auto& comm : snapshot()) comm->cut(path, cut, now);
  }
}

void Engine::statistics(Nanos now) {
  if (!reporter_->listened() || now - statistics_at_ < kStatisticsEvery) return;
  statistics_at_ = now;
  std::vector<PathTotals> totals;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    totals = gone_;
  }
  for (auto& comm : snapshot()) comm->totals(&totals);
  for (size_t i = 0; i < totals.size(); ++i) {
    const PathTotals& it = totals[i];
    char text[640];
    std::snprintf(
        text, sizeof text,
        "{\"event\":\"stats\",\"at_ns\":%lld,\"pid\":%d,\"path\":%zu,\"interface\":\"%s\",\"local\":"
        "\"%s\",\"comms\":%d,\"comms_up\":%d,\"sent_bytes\":%llu,\"received_bytes\":%llu,"
        "\"resent_chunks\":%llu,\"resent_bytes\":%llu,\"downs\":%llu,\"suspects\":%llu,"
        "\"stalled_ms\":%lld}",
        static_cast<long long>(now), pid_, i, config_.paths[i].interface.c_str(),
        config_.paths[i].text.c_str(), it.comms, it.comms_up,
        static_cast<unsigned long long>(it.sent_bytes),
        static_cast<unsigned long long>(it.received_bytes),
        static_cast<unsigned long long>(it.resent_chunks),
        static_cast<unsigned long long>(it.resent_bytes), static_cast<unsigned long long>(it.downs),
        static_cast<unsigned long long>(it.suspects),
        static_cast<long long>(it.stalled / kMillisecond));
    report(text);
  }
}

}  // namespace keepstep::net
