// How bytes move: the half of Comm that runs for every message. See comm.h for threads and
// failover.h for what may go where.
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "comm.h"

namespace keepstep::net {

namespace {
constexpr uint64_t kSmallFrame = 8 * 1024;
constexpr size_t kTurnBytes = 4 << 20;  // per call, so that a fast peer cannot keep us here
// An answer costs as much as a small message. Small ones were copied, so nobody waits for theirs;
// of large ones every second is answered at once, or a quarter of those that may be open if that
// is more, and the last one that is expected. If nothing comes after one, its sender may wait.
constexpr Nanos kStateLazy = kMillisecond;
constexpr Nanos kStateLazyLarge = 3 * kMillisecond / 10;
constexpr Nanos kStateQuiet = kMillisecond / 100;  // a busy sender has begun the next one by then
constexpr Nanos kStateElsewhere = 5 * kMillisecond;  // a second copy, over the other paths
constexpr uint64_t kStateMessages = kMessagesOpen / 4;
constexpr uint64_t kStateLarge = 2;
constexpr uint64_t kCopiedMax = 16 * 1024;  // to copy more takes longer than an answer does
constexpr uint64_t kCopyBytes = kStashBytes;
constexpr uint64_t kGather = 32 * 1024;
constexpr uint64_t kHelpBytes = 256 * 1024;  // smaller messages would wait for the helper to wake up
constexpr int kHelpSmaller = 4;  // so many of them in a row, and it is sent away
constexpr Nanos kAttended = 3 * kMillisecond / 10;  // a helper that is away for longer is no help
// Whoever looks again and again whether a large message goes on keeps the socket locked: the kernel
// then leaves to the reader what it would have done on the sender's processor.
constexpr Nanos kLookAgain = 3 * kMillisecond / 200;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }
}  // namespace

// ------------------------------------------------------------------------------------ NCCL's calls

Request* Comm::free_request(uint64_t message) {
  Request& request = requests_[message % kReceivesOpen];
  return request.comm ? nullptr : &request;
}

// Room for a copy, or null: the peer has to take some first.
uint8_t* Comm::copy(const void* data, uint64_t size) {
  while (!copied_.empty() && out_->delivered(copied_.front().message)) {
    copies_begin_ = copied_.front().end;
    copied_.pop_front();
  }
  if (copied_.empty()) copies_begin_ = copies_end_ = 0;  // few pages are ever touched
  if (!copies_) copies_.reset(new uint8_t[kCopyBytes]);
  uint64_t at = copies_end_;
  if (at % kCopyBytes + size > kCopyBytes) at += kCopyBytes - at % kCopyBytes;  // never around the edge
  if (at + size - copies_begin_ > kCopyBytes) return nullptr;
  uint8_t* place = copies_.get() + at % kCopyBytes;
  if (size) std::memcpy(place, data, size);
  copies_end_ = at + size;
  return place;
}

abi::Result Comm::isend(const void* data, uint64_t size, void** result) {
  *result = nullptr;
  Lock lock = try_enter();
  if (!lock) return abi::Success;
  if (error_) return error_;
  if (size > kMessageBytesMax) return abi::InvalidUsage;
  Nanos now = monotonic();
  polled_ = now;
  Request* request = free_request(out_->posted());
  bool small = size <= kCopiedMax;
  const auto* from = static_cast<const uint8_t*>(data);
  if (request && out_->room() && small) from = copy(data, size);
  if (!request || !out_->room() || (small && !from)) {
    pump(now);
    return error_;
  }
  uint64_t id = out_->post(from, size);
  if (small) {
    copied_.push_back({id, copies_end_});
  } else {
    uncopied_ = id + 1;
  }
  *request = {this, id, size, small};
  *result = request;
  if (!small) {
    write_all(now);
    if (out_->unsent()) pump(now);  // answers are heard by test(), unless they hold this one up
    return error_;
  }
  // While enough is under way to keep the path busy, small ones gather for one system call; test()
  // of the last one sends them.
  deferred_ += kHeaderBytes + size;
  if (deferred_ < kGather && out_->under_way(turn_) >= kBatchBytes) return error_;
  send_small(now);
  return error_;
}

void Comm::send_small(Nanos now) {
  deferred_ = 0;
  size_t bytes;
  while (write_once(turn_, now, &bytes) == Io::Moved) {}
  // Answers matter to small messages only when the rings fill up.
  if (out_->unsent() || ++calls_ % 16 == 0) pump(now);
  bool waits = out_->unsent();
  if (waits && !left_) around_.wake();  // it counts as done: nobody may ever call again
  left_ = waits;
}

abi::Result Comm::irecv(void* data, uint64_t capacity, void** result) {
  *result = nullptr;
  Lock lock = try_enter();
  if (lock && error_) return error_;
  uint64_t id = asked_.load(std::memory_order_relaxed);
  Request* request = free_request(id);
  if (request) {
    receives_[id % kReceivesOpen] = {static_cast<uint8_t*>(data), capacity};
    asked_.store(id + 1, std::memory_order_release);
    *request = {this, id, capacity, false};
    *result = request;
  }
  if (!lock) return abi::Success;  // whoever has it next takes the receive along
  Nanos now = monotonic();
  polled_ = now;
  if (!request) {
    progress(now, nullptr);
    return error_;
  }
  take_receives();
  note_arrival(now);
  say_states(now);
  return error_;
}

bool Comm::take_receives() {
  bool any = false;
  uint64_t asked = asked_.load(std::memory_order_acquire);
  while (in_->posted() < asked && !error_) {
    const Receive& next = receives_[in_->posted() % kReceivesOpen];
    uint64_t id;
    if (in_->post(next.data, next.capacity, &id) == Inbox::Verdict::TooLarge) {
      log(abi::LogWarn, "a message is larger than the receive that was posted for it");
      fail(abi::InvalidUsage);
      return any;
    }
    any = true;
    // A sender of large messages may be waiting for exactly this one.
    if (next.capacity > kEagerBytes && told_.posted < in_->done() + 3) urgent_ = true;
  }
  arrived_.store(in_->done(), std::memory_order_release);
  return any;
}

abi::Result Comm::test(Request* request, int* done, int* size) {
  *done = 0;
  bool sends = role_ == Role::Send;
  if (!sends && request->message < arrived_.load(std::memory_order_acquire)) {
    *done = 1;
    if (size) *size = static_cast<int>(in_->size(request->message));
    request->comm = nullptr;
    return abi::Success;
  }
  Lock lock = try_enter();
  if (!lock) return abi::Success;
  bool took = !sends && take_receives();
  auto complete = [&] {
    return sends ? request->copied || out_->delivered(request->message)
                 : in_->complete(request->message);
  };
  if (!complete()) {
    if (error_) return error_;
    Nanos now = monotonic();
    polled_ = now;
    progress(now, request);
  } else if (took) {  // it had come before, and its sender waits for an answer
    Nanos now = monotonic();
    note_arrival(now);
    say_states(now);
  } else if (deferred_ && request->message + 1 == out_->posted()) {
    send_small(monotonic());
  }
  if (!complete()) return error_;
  *done = 1;
  if (size) *size = static_cast<int>(sends ? request->size : in_->size(request->message));
  request->comm = nullptr;
  return abi::Success;
}

void Comm::progress(Nanos now, const Request* wanted) {
  if (role_ == Role::Send) {
    pump(now);
    return;
  }
  if (now < look_at_) return;
  take_receives();
  if (now - attended_ > kAttended) {
    bool any = read_all(now, wanted);
    look_at_ = any || !large_ ? 0 : now + kLookAgain;
  }
  note_arrival(now);
  say_states(now);
}

bool Comm::read_all(Nanos now, const Request* wanted) {
  int count = static_cast<int>(path_.size());
  int first = last_;
  // The path that brought the last bytes likely brings the next; the others are not forgotten.
  bool all = ++calls_ % 8 == 0;
  bool any = false, busy = false;
  for (int k = 0; k < count; ++k) {
    int i = (first + k) % count;
    if (path_[static_cast<size_t>(i)].socket < 0) continue;
    bool moved = read_data(i, now, wanted) == Io::Moved;
    if (moved) last_ = i;
    any |= moved;
    busy |= moved || in_->in_frame(i);
    if (!all && wanted && in_->complete(wanted->message)) break;
  }
  quiet_ = !busy;
  return any;
}

// ------------------------------------------------------------------------------------- the helper

// Small messages are read by whoever waits for them.
void Comm::consider_help(uint64_t size) {
  bool welcome = large_ > 0;
  large_ = size >= kHelpBytes ? kHelpSmaller : std::max(large_ - 1, 0);
  if (closing_) large_ = 0;
  if (welcome == (large_ > 0)) return;
  if (welcome) attended_ = 0;
  for (Path& path : path_) watch(path, large_ > 0);
}

// After each message whoever waits for the mutex has its chance, and the peer its answer.
bool Comm::help() {
  Lock lock = try_enter();
  if (!lock || !large_) return false;
  take_receives();
  Request next{this, in_->done(), 0, false};
  bool moved = read_all(monotonic(), &next);
  Nanos now = monotonic();
  attended_ = large_ ? now : 0;
  note_arrival(now);
  say_states(now);
  return moved;
}

void Comm::leave() {
  Lock lock = enter();
  attended_ = 0;
}

// ---------------------------------------------------------------------------------------- sending

void Comm::pump(Nanos now) {
  for (int i = 0; i < static_cast<int>(path_.size()); ++i) {
    if (path_[static_cast<size_t>(i)].socket >= 0) hear_states(i, now);
  }
  write_all(now);
}

void Comm::write_all(Nanos now) {
  deferred_ = 0;
  int count = static_cast<int>(path_.size());
  size_t total = 0;
  for (int idle = 0; idle < count && total < kTurnBytes;) {
    size_t bytes = 0;
    Io io = write_once(turn_, now, &bytes);
    total += bytes;
    idle = io == Io::Moved ? 0 : idle + 1;
    // Small messages stay on one path, where one system call carries many; large ones alternate.
    if (io != Io::Moved || bytes >= kBatchBytes) turn_ = (turn_ + 1) % count;
  }
}

Comm::Io Comm::write_once(int i, Nanos now, size_t* bytes) {
  Path& path = path_[static_cast<size_t>(i)];
  *bytes = 0;
  if (path.socket < 0 || !out_->fill(i, now)) return Io::Nothing;
  Slice slices[kSlicesMax];
  iovec vectors[kSlicesMax];
  int count = out_->gather(i, slices);
  for (int k = 0; k < count; ++k) {
    vectors[k] = {const_cast<uint8_t*>(slices[k].data), slices[k].length};
  }
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = static_cast<size_t>(count);
  ssize_t wrote = sendmsg(path.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (wrote < 0) {
    if (would_block()) return Io::Blocked;
    if (errno == EFAULT) fail(abi::InvalidUsage);  // the user's buffer is gone
    lose(i, now, strerror(errno));
    return Io::Lost;
  }
  *bytes = static_cast<size_t>(wrote);
  out_->wrote(i, *bytes);
  return Io::Moved;
}

Comm::Io Comm::hear_states(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  Io result = Io::Nothing;
  for (;;) {
    ssize_t got = recv(path.socket, path.in.get() + path.in_end, kReadAhead - path.in_end,
                       MSG_DONTWAIT);
    if (got == 0 || (got < 0 && !would_block())) {
      lose(i, now, got == 0 ? "closed by the peer" : strerror(errno));
      return Io::Lost;
    }
    if (got < 0) return result;
    result = Io::Moved;
    bool whole = path.in_end + static_cast<size_t>(got) < kReadAhead;
    path.in_end += static_cast<size_t>(got);
    while (path.in_end - path.in_begin >= kHeaderBytes) {
      const uint8_t* at = path.in.get() + path.in_begin;
      auto header = parse_header(at);
      if (!header || header->type != Type::State) {
        lose(i, now, "not a frame of this protocol");
        return Io::Lost;
      }
      if (path.in_end - path.in_begin < kHeaderBytes + header->length) break;
      path.in_begin += kHeaderBytes + header->length;
      State state = parse_state(*header, at + kHeaderBytes);
      unsigned dead = 0;
      if (out_->heard(state, &dead, now) == Outbox::Answer::Impossible) {
        lose(i, now, "an answer that cannot be true");
        return Io::Lost;
      }
      peer_left_ |= state.leaving;
      for (int k = 0; k < static_cast<int>(path_.size()); ++k) {
        if (dead >> k & 1) lose(k, now, "lost by the peer");
      }
      if (path.socket < 0) return Io::Lost;
    }
    std::memmove(path.in.get(), path.in.get() + path.in_begin, path.in_end - path.in_begin);
    path.in_end -= path.in_begin;
    path.in_begin = 0;
    if (whole) return result;  // a short read: the kernel has no more
  }
}

// -------------------------------------------------------------------------------------- receiving

bool Comm::take_header(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  auto header = parse_header(path.in.get() + path.in_begin);
  path.in_begin += kHeaderBytes;
  if (header && header->type == Type::Bye) {
    peer_left_ = true;
    return true;
  }
  auto verdict = header ? in_->begin(i, *header) : Inbox::Verdict::Impossible;
  if (verdict == Inbox::Verdict::Ok) {
    path.small_frames = header->length <= kSmallFrame;
    if (large_ || header->total >= kHelpBytes) consider_help(header->total);
    return true;
  }
  if (verdict == Inbox::Verdict::TooLarge) {
    log(abi::LogWarn, "a message of %llu bytes is larger than the receive posted for it",
        static_cast<unsigned long long>(header->total));
    fail(abi::InvalidUsage);
  }
  lose(i, now, "not a frame of this protocol");
  return false;
}

// Uses up what was read ahead.
Comm::Io Comm::consume(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  for (;;) {
    size_t have = path.in_end - path.in_begin;
    if (in_->in_frame(i)) {
      if (have == 0) break;
      size_t n = std::min<size_t>(have, in_->wanted(i));
      if (uint8_t* target = in_->target(i)) {
        std::memcpy(target, path.in.get() + path.in_begin, n);
      }
      path.in_begin += n;
      in_->advance(i, n);
    } else {
      if (have < kHeaderBytes) break;
      if (!take_header(i, now)) return Io::Lost;
    }
  }
  size_t rest = path.in_end - path.in_begin;
  if (rest) std::memmove(path.in.get(), path.in.get() + path.in_begin, rest);
  path.in_begin = 0;
  path.in_end = rest;
  return Io::Moved;
}

// Until the kernel has no more, or the wanted message is whole: its user waits, and while we read
// on nobody would tell the peer that it may send.
Comm::Io Comm::read_data(int i, Nanos now, const Request* wanted) {
  Path& path = path_[static_cast<size_t>(i)];
  Io result = Io::Nothing;
  for (size_t total = 0; total < kTurnBytes;) {
    // Payload goes straight to its place; behind it the next header, or many small frames.
    uint64_t rest = in_->wanted(i);
    uint8_t* target = rest ? in_->target(i) : nullptr;
    iovec vectors[2];
    int count = 0;
    size_t direct = 0;
    if (target) {
      direct = rest;
      vectors[count++] = {target, direct};
    }
    size_t ahead = path.small_frames || (rest && !target) ? kReadAhead : kHeaderBytes;
    ahead = std::max(ahead, path.in_end) - path.in_end;
    vectors[count++] = {path.in.get() + path.in_end, ahead};
    ssize_t got = readv(path.socket, vectors, count);
    if (got == 0 || (got < 0 && !would_block())) {
      lose(i, now, got == 0 ? "closed by the peer" : strerror(errno));
      return Io::Lost;
    }
    if (got < 0) return result;
    result = Io::Moved;
    auto n = static_cast<size_t>(got);
    total += n;
    if (direct) in_->advance(i, std::min(n, direct));
    if (n > direct) path.in_end += n - direct;
    if (consume(i, now) == Io::Lost) return Io::Lost;
    arrived_.store(in_->done(), std::memory_order_release);
    if (n < direct + ahead) return result;  // a short read: the kernel has no more
    if (wanted && in_->complete(wanted->message)) return result;
  }
  return result;
}

// ------------------------------------------------------------------------------------------ State

void Comm::note_arrival(Nanos now) {
  State fresh = in_->state();
  bool differs = fresh.posted != told_.posted || fresh.done != told_.done;
  uint64_t large = 0, bytes = 0;  // the sender holds a buffer of its user for each large one
  for (uint64_t id = told_.done; id < fresh.done; ++id) {
    large += in_->size(id) > kCopiedMax;
    bytes += in_->size(id);
  }
  for (int i = 0; i < fresh.paths && !differs; ++i) {
    differs = std::memcmp(&fresh.path[i], &told_.path[i], sizeof told_.path[i]) != 0;
  }
  if (!differs) return;
  if (!changed_) {
    changed_ = true;
    changed_at_ = now;
  }
  for (Path& path : path_) path.state_stale = true;
  lazy_ = !large ? kStateLazy : quiet_ ? kStateQuiet : kStateLazyLarge;
  bool many = large >= kStateLarge && 4 * large >= fresh.posted - told_.done;
  urgent_ |= many || (large && fresh.done == fresh.posted) ||
             bytes >= kStashBytes / 4 || fresh.done - told_.done >= kStateMessages;
}

void Comm::say_states(Nanos now) {
  int count = static_cast<int>(path_.size());
  bool due = changed_ && (urgent_ || now - changed_at_ >= lazy_);
  if (due && path_[static_cast<size_t>(last_)].socket < 0) {
    for (int i = 0; i < count; ++i) {
      if (path_[static_cast<size_t>(i)].socket >= 0) last_ = i;
    }
  }
  for (int i = 0; i < count; ++i) {
    Path& path = path_[static_cast<size_t>(i)];
    if (path.socket < 0) continue;
    bool turn = (due && i == last_) || now - path.state_at >= kStateElsewhere;
    if (path.state_sent < path.state_size || (path.state_stale && turn)) send_state(i, now);
  }
}

// At most one State waits in a path; a newer one replaces what was never begun.
bool Comm::send_state(int i, Nanos now) {
  Path& path = path_[static_cast<size_t>(i)];
  if (path.state_sent == path.state_size || path.state_sent == 0) {
    State state = in_->state();
    state.leaving = closing_;
    path.state_size = encode_state(i, state, path.state);
    path.state_sent = 0;
    path.state_stale = false;
    path.state_at = now;
    told_ = state;
    changed_ = urgent_ = false;
  }
  ssize_t sent = send(path.socket, path.state + path.state_sent, path.state_size - path.state_sent,
                      MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (!would_block()) lose(i, now, strerror(errno));
    return false;
  }
  path.state_sent += static_cast<size_t>(sent);
  return path.state_sent == path.state_size;
}

}  // namespace keepstep::net
