// The life of a communicator's connections: opening, judging, losing and closing them.
#include "comm.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace keepstep::net {

namespace {
constexpr Nanos kLookEvery = 20 * kMillisecond;
constexpr Nanos kUnattended = 2 * kMillisecond;  // nobody called: the engine moves bytes
constexpr Nanos kBusyVisit = 10 * kMillisecond;
constexpr Nanos kIdleVisit = 50 * kMillisecond;
constexpr Nanos kDrain = kSecond;        // a closing sender waits so long for its last answers
constexpr Nanos kLinger = 3 * kSecond;   // a closed receiver answers for so long

uint64_t seed_of(const Cookie& cookie) {
  uint64_t seed;
  std::memcpy(&seed, cookie.data(), sizeof seed);
  return seed;
}
}  // namespace

void PathTotals::add(const PathTotals& other) {
  sent_bytes += other.sent_bytes;
  received_bytes += other.received_bytes;
  resent_chunks += other.resent_chunks;
  resent_bytes += other.resent_bytes;
  downs += other.downs;
  suspects += other.suspects;
  stalled += other.stalled;
  comms += other.comms;
  comms_up += other.comms_up;
}

Comm::Comm(Surroundings& around, Role role, const Handle& handle)
    : around_(around), role_(role), handle_(handle), local_(around.config().paths),
      path_(static_cast<size_t>(handle.count)),
      paths_(handle.count, around.config().limits, seed_of(handle.cookie), monotonic()) {
  for (size_t i = 0; i < path_.size(); ++i) {
    path_[i].paired = i < local_.size() && local_[i].address.v6 == handle.endpoint[i].v6;
  }
  if (role == Role::Send) {
    out_ = std::make_unique<Outbox>(handle.count);
  } else {
    in_ = std::make_unique<Inbox>(handle.count);
  }
}

Comm::~Comm() {
  for (Path& path : path_) {
    watch(path, false);
    if (path.socket >= 0) ::close(path.socket);
    if (path.opening >= 0) ::close(path.opening);
  }
}

Comm::Lock Comm::try_enter() {
  Lock lock(mutex_, std::defer_lock);
  if (waiting_ == 0) lock.try_lock();
  return lock;
}

// While bytes move, callers leave the mutex only to take it again, long before a thread that sleeps
// on it has woken up. So whoever sleeps on it says so, and they stay away.
Comm::Lock Comm::enter() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    ++waiting_;
    lock.lock();
    --waiting_;
  }
  return lock;
}

bool Comm::ready(abi::Result* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  *error = error_;
  return paths_.ever_up();
}

// ---------------------------------------------------------------------------------------- opening

void Comm::open_paths(Nanos now) {
  for (int i = 0; i < paths_.count(); ++i) {
    Path& path = path_[static_cast<size_t>(i)];
    if (path.opening >= 0) {
      promote(i, now);
    } else if (path.paired && !path.cut && paths_.should_open(i, now)) {
      open(i, now);
    }
  }
}

void Comm::open(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  auto at = static_cast<size_t>(i);
  paths_.opening(i, now);
  path.opening = start_connecting(local_[at], handle_.endpoint[i], handle_.port,
                                  path_.size() > 1);
  path.opening_epoch = std::max(path.epoch, path.opening_epoch) + 1;
  path.hello_said = false;
  if (path.opening < 0) paths_.open_failed(i, now);
}

// A connection counts when the peer has answered over it: then both directions work.
void Comm::promote(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  pollfd ready{path.opening, static_cast<short>(path.hello_said ? POLLIN : POLLOUT), 0};
  if (poll(&ready, 1, 0) == 0) {
    if (paths_.open_expired(i, now)) drop_opening(i, now);
    return;
  }
  if (!path.hello_said) {
    uint8_t hello[kHelloBytes];
    size_t size = encode_hello(i, path.opening_epoch, handle_.cookie, hello);
    ssize_t sent = send(path.opening, hello, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(size)) {
      drop_opening(i, now);
      return;
    }
    path.hello_said = true;
    paths_.connected(i, now);
    return;
  }
  uint8_t byte;
  if (recv(path.opening, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 1) {
    drop_opening(i, now);
    return;
  }
  int socket = path.opening;
  path.opening = -1;
  if (path.socket >= 0) lose(i, now, "replaced by a new connection");
  path.epoch = path.opening_epoch;
  out_->opened(i, path.epoch);
  attach(i, socket, now);
}

void Comm::drop_opening(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  reset_and_close(path.opening);
  path.opening = -1;
  paths_.open_failed(i, now);
}

bool Comm::adopt(int socket, int i, uint32_t epoch, Nanos now) {
  Lock lock = enter();
  if (closed_ || i >= paths_.count() || path_[static_cast<size_t>(i)].cut) return false;
  Path& path = path_[static_cast<size_t>(i)];
  if (epoch <= path.epoch) return false;
  if (path.socket >= 0) lose(i, now, "replaced by a new connection");
  if (!in_->opened(i, epoch)) return false;
  path.epoch = epoch;
  tune(socket, path_.size() > 1);
  attach(i, socket, now);
  send_state(i, now);
  return true;
}

void Comm::attach(int i, int socket, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  path.socket = socket;
  if (!path.in) path.in.reset(new uint8_t[kReadAhead]);
  path.in_begin = path.in_end = 0;
  path.state_size = path.state_sent = 0;
  path.state_stale = true;
  path.state_at = path.looked_at = now;
  watch(path, large_ > 0);
  paths_.up(i, now);
  report("path-up", i, "", 0);
}

void Comm::watch(Path& path, bool wanted) {
  if (path.socket < 0 || path.watched == wanted) return;
  if (wanted) {
    path.watched = around_.watch(path.socket, this);
  } else {
    around_.unwatch(path.socket);
    path.watched = false;
  }
}

// ----------------------------------------------------------------------------------------- losing

void Comm::lose(int i, Nanos now, const char* reason) {
  Path& path = path_[static_cast<size_t>(i)];
  if (path.socket < 0) return;
  watch(path, false);
  reset_and_close(path.socket);
  path.socket = -1;
  if (out_) out_->closed(i);
  if (in_) in_->closed(i);
  paths_.down(i, now);
  if (peer_left_ || closing_) return;
  ++path.totals.downs;
  report("path-down", i, reason, 0);
  if (in_) {
    note_arrival(now);
    urgent_ = true;  // the sender learns over the other paths that this one is gone
  }
}

void Comm::link_changed(int i, bool up, Nanos now) {
  Lock lock = enter();
  if (i >= paths_.count()) return;
  if (up) {
    // What was asked before the link came up was lost: ask again now, not after a timeout.
    Path& path = path_[static_cast<size_t>(i)];
    if (path.opening >= 0 && !path.hello_said) drop_opening(i, now);
    paths_.link_up(i, now);
    return;
  }
  lose(i, now, "link down");
  if (in_) say_states(now);
}

void Comm::cut(int i, bool cut, Nanos now) {
  Lock lock = enter();
  if (i >= paths_.count()) return;
  path_[static_cast<size_t>(i)].cut = cut;
  if (!cut) {
    paths_.link_up(i, now);
    return;
  }
  if (path_[static_cast<size_t>(i)].opening >= 0) drop_opening(i, now);
  lose(i, now, "cut on request");
}

// Asks the kernel about every connection, not the peer's process: that may be short of time.
void Comm::judge(Nanos now) {
  for (int i = 0; i < paths_.count(); ++i) {
    Path& path = path_[static_cast<size_t>(i)];
    if (path.socket < 0 || now - path.looked_at < kLookEvery) continue;
    path.looked_at = now;
    KernelView view;
    if (!kernel_view(path.socket, &view)) continue;
    switch (paths_.look(i, view)) {
      case Paths::Advice::Keep:
        break;
      case Paths::Advice::Suspect:
        ++path.totals.suspects;
        report("path-suspect", i, "no acknowledgement, and no other path", 0);
        break;
      case Paths::Advice::Cleared:
        report("path-up", i, "acknowledged again", 0);
        break;
      case Paths::Advice::Kill:
        lose(i, now, "no acknowledgement");
        break;
    }
  }
}

// ------------------------------------------------------------------------------- the engine's visit

bool Comm::waited_for() const { return out_ ? !out_->idle() : in_->done() < asked_; }

Nanos Comm::serve(Nanos now) {
  Lock lock = enter();
  if (closed_) return kIdleVisit;
  if (closing_) {
    finish_closing(now);
    return kUnattended;
  }
  if (role_ == Role::Send && !peer_left_ && !error_) open_paths(now);
  if (now - polled_ > kUnattended) progress(now, nullptr);
  judge(now);
  clock(now);
  return next_visit(now);
}

void Comm::clock(Nanos now) {
  if (peer_left_ && !waited_for()) return;
  // A receiver may wait for its first connection as long as it takes the peer to start.
  bool connecting = role_ == Role::Send && !paths_.ever_up();
  auto tick = paths_.tick(now, waited_for() || connecting);
  if (tick.all_down) {
    log(abi::LogWarn, "no path to the peer works; waiting for up to %lld s",
        static_cast<long long>(around_.config().limits.deadline / kSecond));
    report("all-down", -1, "", 0);
  }
  if (tick.back) {
    for (Path& path : path_) path.totals.stalled += tick.stalled;
    report("back", -1, "", tick.stalled);
  }
  if (tick.deadline && !error_) {
    log(abi::LogWarn, "no path to the peer worked for too long: giving up");
    report("gave-up", -1, "the deadline has passed", 0);
    fail(abi::RemoteError);
  }
}

Nanos Comm::next_visit(Nanos now) const {
  bool unattended = now - polled_ > kUnattended;
  for (const Path& path : path_) {
    if (path.opening >= 0) return kUnattended;
    // Whoever has a receive open calls again, and says it then.
    bool unsaid = in_ && path.socket >= 0 && path.state_stale;
    if (unsaid && (unattended || !waited_for())) return kUnattended;
  }
  if (out_ && (left_ || unattended) && out_->unsent()) return kUnattended;
  return waited_for() || paths_.healthy() < paths_.count() ? kBusyVisit : kIdleVisit;
}

void Comm::totals(std::vector<PathTotals>* totals) {
  Lock lock = enter();
  for (size_t i = 0; i < path_.size() && i < totals->size(); ++i) {
    PathTotals mine = path_[i].totals;
    int at = static_cast<int>(i);
    const PathCounts& counts = out_ ? out_->counts(at) : in_->counts(at);
    (out_ ? mine.sent_bytes : mine.received_bytes) = counts.bytes;
    mine.resent_chunks = counts.resent_chunks;
    mine.resent_bytes = counts.resent_bytes;
    mine.comms = closing_ || closed_ ? 0 : 1;
    mine.comms_up = mine.comms && paths_.health(at) == Paths::Health::Up;
    (*totals)[i].add(mine);
  }
}

void Comm::report(const char* event, int i, const char* reason, Nanos stalled) {
  char text[640];
  bool known = i >= 0 && static_cast<size_t>(i) < local_.size();
  const LocalPath* local = known ? &local_[static_cast<size_t>(i)] : nullptr;
  std::snprintf(text, sizeof text,
                "{\"event\":\"%s\",\"at_ns\":%lld,\"pid\":%d,\"comm\":\"%02x%02x%02x%02x\",\"role\":"
                "\"%s\",\"path\":%d,\"interface\":\"%s\",\"local\":\"%s\",\"remote\":\"%s\","
                "\"reason\":\"%s\",\"stalled_ms\":%lld}",
                event, static_cast<long long>(monotonic()), getpid(), handle_.cookie[0],
                handle_.cookie[1], handle_.cookie[2], handle_.cookie[3],
                role_ == Role::Send ? "send" : "receive", i, local ? local->interface.c_str() : "",
                local ? local->text.c_str() : "",
                i >= 0 && role_ == Role::Send ? peer_text(handle_.endpoint[i]).c_str() : "", reason,
                static_cast<long long>(stalled / kMillisecond));
  around_.report(text);
}

// ---------------------------------------------------------------------------------------- closing

bool Comm::in_user_memory() const { return out_ && out_->done() < uncopied_; }

void Comm::close() {
  Nanos begun = monotonic();
  for (;;) {
    Nanos now = monotonic();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (role_ == Role::Receive) {
        bool abandoned = waited_for();
        closing_ = true;
        closing_since_ = now;
        large_ = 0;
        attended_ = 0;
        for (Path& path : path_) watch(path, false);
        closed_ = abandoned || error_;  // the user's buffers are not ours any more
        for (int i = 0; i < paths_.count() && !closed_; ++i) {
          Path& path = path_[static_cast<size_t>(i)];
          path.state_stale = true;
          if (path.socket >= 0) send_state(i, now);
        }
        if (!closed_) break;
      }
      if (role_ == Role::Send) pump(now);
      bool drained = role_ == Role::Send && out_->idle();
      bool hopeless = error_ || peer_left_ || in_user_memory() || paths_.healthy() == 0;
      if (drained || hopeless || closed_ || now - begun > kDrain) {
        closing_ = closed_ = true;
        for (int i = 0; i < paths_.count(); ++i) {
          Path& path = path_[static_cast<size_t>(i)];
          if (path.opening >= 0) drop_opening(i, now);
          if (path.socket < 0) continue;
          if (drained) {
            uint8_t bye[kHeaderBytes];
            encode({Type::Bye, static_cast<uint8_t>(i), 0, 0, 0, 0}, bye);
            send(path.socket, bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT);
            shutdown(path.socket, SHUT_WR);
            ::close(path.socket);
            path.socket = -1;
          } else {
            lose(i, now, "closed");
          }
        }
        break;
      }
    }
    usleep(200);
  }
  around_.wake();
}

// A sender whose last answer was lost may come back for it.
void Comm::finish_closing(Nanos now) {
  progress(now, nullptr);
  bool open = false;
  for (const Path& path : path_) open |= path.socket >= 0;
  if ((open || !peer_left_) && now - closing_since_ < kLinger) return;
  closed_ = true;
  for (Path& path : path_) {
    if (path.socket < 0) continue;
    shutdown(path.socket, SHUT_RDWR);  // a forked child may hold a copy
    ::close(path.socket);
    path.socket = -1;
  }
}

}  // namespace keepstep::net
