#include "failover.h"

#include <algorithm>

namespace keepstep::net {

namespace {
// Stands in for payload that nobody will look at. Never written: const would put it into the file.
uint8_t g_zeros[kRunBytes];

size_t chunk_bits(uint64_t total) {
  return total ? static_cast<size_t>((total + kChunkBytes - 1) / kChunkBytes) : 1;
}
}  // namespace

// ---------------------------------------------------------------------------------------- Outbox

uint64_t Outbox::post(const uint8_t* data, uint64_t size) {
  ring_[next_ % kMessagesOpen] = {data, size};
  waiting_ += size;
  return next_++;
}

void Outbox::opened(int path, uint32_t epoch) {
  closed(path);
  Flight& flight = flights_[static_cast<size_t>(path)];
  flight.ring.resize(kFlightFrames);
  flight.live = true;
  flight.epoch = epoch;
}

void Outbox::closed(int path) {
  Flight& flight = flights_[static_cast<size_t>(path)];
  for (uint64_t n = flight.arrived; n < flight.given; ++n) {
    const Frame& frame = flight.ring[n % kFlightFrames];
    if (delivered(frame.message)) continue;
    uint64_t total = message(frame.message).size, end = frame.offset + frame.length;
    uint64_t at = frame.offset;
    do {  // one by one: several paths may share them
      uint64_t length = chunk_length(at, total);
      again_.push_back({frame.message, at, length});
      ++flight.counts.resent_chunks;
      at += length;
    } while (at < end);
    flight.counts.resent_bytes += frame.length;
  }
  std::sort(again_.begin(), again_.end(), [](const Run& a, const Run& b) {
    return a.message != b.message ? a.message < b.message : a.offset < b.offset;
  });
  flight.live = false;
  flight.arrived = flight.written = flight.given = flight.bytes = 0;
  flight.written_part = 0;
  flight.rate = 0;
  flight.counted = 0;
  flight.busy = 0;
}

bool Outbox::may_start(uint64_t id) const {
  if (id < allowed_) return true;
  uint64_t size = message(id).size;
  return size <= kEagerBytes && unasked_ + size <= kStashBytes;
}

// At most so many bytes, but at least a chunk.
bool Outbox::take(uint64_t most, Run* run) {
  while (!again_.empty()) {
    *run = again_.front();
    again_.pop_front();
    if (!delivered(run->message)) return true;
  }
  if (cursor_ == next_ || (cursor_offset_ == 0 && !may_start(cursor_))) return false;
  uint64_t size = message(cursor_).size;
  uint64_t whole = std::max(most / kChunkBytes, uint64_t{1}) * kChunkBytes;
  *run = {cursor_, cursor_offset_, std::min(size - cursor_offset_, whole)};
  waiting_ -= run->length;
  cursor_offset_ += run->length;
  if (cursor_offset_ == size) {
    if (cursor_ >= allowed_) unasked_ += size;
    ++cursor_;
    cursor_offset_ = 0;
  }
  return true;
}

// Would a chunk arrive over this path not much later than over the best other one?
bool Outbox::worth_it(int path, Nanos now) const {
  const Flight& mine = flights_[static_cast<size_t>(path)];
  auto known = [now](const Flight& flight) {
    return flight.rate > 0 && (flight.bytes > 0 || now - flight.progress < kRateForgotten);
  };
  double best = -1;
  for (int i = 0; i < paths_; ++i) {
    const Flight& other = flights_[static_cast<size_t>(i)];
    if (i == path || !other.live || !known(other)) continue;
    if (other.bytes > 0 && now - other.progress > kStuck) continue;
    double lasts = static_cast<double>(other.bytes + kChunkBytes) / other.rate;
    if (best < 0 || lasts < best) best = lasts;
  }
  if (best < 0) return true;
  if (!known(mine)) return mine.bytes < kUnknownBytes;
  double lasts = static_cast<double>(mine.bytes + kChunkBytes) / mine.rate;
  return lasts <= 2 * best + static_cast<double>(kUnevenness);
}

void Outbox::measure(Flight& flight, uint64_t bytes, Nanos now) {
  flight.progress = now;
  flight.counted += bytes;
  flight.busy += now - flight.measured;
  flight.measured = now;
  if (flight.busy < kMeasure) return;
  double rate = static_cast<double>(flight.counted) / static_cast<double>(flight.busy);
  flight.rate = flight.rate > 0 ? 0.7 * flight.rate + 0.3 * rate : rate;
  flight.busy = 0;
  flight.counted = 0;
}

// As much as the path carries in a moment, but leave the other paths their share, unless all of
// them have enough to do already.
uint64_t Outbox::batch_bytes(int path) const {
  if (paths_ == 1) return kRunBytes;
  const Flight& mine = flights_[static_cast<size_t>(path)];
  double carries = mine.rate * static_cast<double>(moment_);
  auto most = static_cast<uint64_t>(std::min(carries, static_cast<double>(kRunBytes)));
  uint64_t live = 0, all = waiting_;
  bool busy = true;
  for (const Flight& flight : flights_) {
    if (!flight.live) continue;
    ++live;
    all += flight.bytes;
    busy &= &flight == &mine || 2 * flight.bytes >= most;
  }
  uint64_t share = all / live > mine.bytes ? all / live - mine.bytes : 0;
  return std::max(busy ? most : std::min(most, share), kBatchBytes);
}

void Outbox::give(int path, const Run& run, Nanos now) {
  Flight& flight = flights_[static_cast<size_t>(path)];
  if (flight.bytes == 0) {
    flight.measured = flight.progress = now;  // idle time says nothing about the rate
    if (flight.counted < kRunBytes) flight.counted = 0;  // and little but how late an answer was
    if (!flight.counted) flight.busy = 0;
  }
  Frame& frame = flight.ring[flight.given++ % kFlightFrames];
  frame.message = run.message;
  frame.offset = run.offset;
  frame.length = static_cast<uint32_t>(run.length);
  flight.bytes += frame.length;
  encode({Type::Data, static_cast<uint8_t>(path), frame.length, run.message, run.offset,
          message(run.message).size},
         frame.header);
}

bool Outbox::fill(int path, Nanos now) {
  Flight& flight = flights_[static_cast<size_t>(path)];
  if (!flight.live) return false;
  if (flight.written < flight.given) return true;
  if (paths_ > 1 && !worth_it(path, now)) return false;
  uint64_t most = batch_bytes(path), batch = 0;
  for (int n = 0; n < kBatchFrames && batch < most; ++n) {
    if (flight.given - flight.arrived >= kFlightFrames || flight.bytes >= kFlightBytes) break;
    Run run;
    if (!take(most - batch, &run)) break;
    give(path, run, now);
    batch += run.length;
  }
  return flight.written < flight.given;
}

int Outbox::gather(int path, Slice* slices) const {
  const Flight& flight = flights_[static_cast<size_t>(path)];
  int count = 0;
  size_t skip = flight.written_part;
  for (uint64_t n = flight.written; n < flight.given && count + 2 <= kSlicesMax; ++n) {
    const Frame& frame = flight.ring[n % kFlightFrames];
    const uint8_t* data = delivered(frame.message) ? g_zeros
                                                   : message(frame.message).data + frame.offset;
    if (skip < kHeaderBytes) {
      slices[count++] = {frame.header + skip, kHeaderBytes - skip};
      if (frame.length) slices[count++] = {data, frame.length};
    } else {
      slices[count++] = {data + (skip - kHeaderBytes), frame.length - (skip - kHeaderBytes)};
    }
    skip = 0;
  }
  return count;
}

void Outbox::wrote(int path, size_t bytes) {
  Flight& flight = flights_[static_cast<size_t>(path)];
  flight.written_part += bytes;
  while (flight.written < flight.given) {
    size_t whole = kHeaderBytes + flight.ring[flight.written % kFlightFrames].length;
    if (flight.written_part < whole) return;
    flight.written_part -= whole;
    ++flight.written;
  }
}

bool Outbox::unsent() const {
  for (const Flight& flight : flights_) {
    if (flight.live && flight.written < flight.given) return true;
  }
  return !again_.empty() || (cursor_ < next_ && (cursor_offset_ || may_start(cursor_)));
}

Outbox::Answer Outbox::heard(const State& state, unsigned* dead, Nanos now) {
  *dead = 0;
  if (state.done > cursor_ || state.done > state.posted || state.paths != paths_) {
    return Answer::Impossible;
  }
  for (int i = 0; i < paths_; ++i) {
    const Flight& flight = flights_[static_cast<size_t>(i)];
    if (flight.live && state.path[i].epoch == flight.epoch &&
        state.path[i].frames > flight.written) {
      return Answer::Impossible;
    }
  }
  for (; allowed_ < state.posted; ++allowed_) {
    if (allowed_ >= cursor_) {
      allowed_ = state.posted;
      break;
    }
    unasked_ -= message(allowed_).size;
  }
  done_ = std::max(done_, state.done);
  for (int i = 0; i < paths_; ++i) {
    Flight& flight = flights_[static_cast<size_t>(i)];
    if (!flight.live) continue;
    if (state.path[i].buried >= flight.epoch) *dead |= 1u << i;
    if (state.path[i].epoch != flight.epoch || state.path[i].frames <= flight.arrived) continue;
    uint64_t arrived = 0;
    for (; flight.arrived < state.path[i].frames; ++flight.arrived) {
      arrived += flight.ring[flight.arrived % kFlightFrames].length;
    }
    flight.bytes -= arrived;
    flight.counts.bytes += arrived;
    measure(flight, arrived, now);
  }
  return Answer::Ok;
}

// ----------------------------------------------------------------------------------------- Inbox

Inbox::Slot& Inbox::slot(uint64_t id) {
  Slot& slot = slots_[id % kSlots];
  if (slot.id != id) {
    slot.id = id;
    slot.buffer = nullptr;
    slot.posted = slot.known = slot.complete = false;
    slot.total = slot.received = 0;
  }
  return slot;
}

bool Inbox::has(const Slot& slot, uint64_t offset) const {
  uint64_t bit = offset / kChunkBytes;
  return slot.have[bit / 64] >> (bit % 64) & 1;
}

Inbox::Verdict Inbox::post(uint8_t* buffer, uint64_t capacity, uint64_t* id) {
  Slot& slot = this->slot(posted_);
  if (slot.known && slot.total > capacity) return Verdict::TooLarge;
  slot.buffer = buffer;
  slot.capacity = capacity;
  slot.posted = true;
  *id = posted_++;
  if (slot.known) {
    stashed_ -= slot.total;
    if (slot.complete) {
      if (slot.total) std::memcpy(buffer, slot.stash.get(), slot.total);
      slot.stash.reset();
    }
  }
  settle();
  return Verdict::Ok;
}

bool Inbox::complete(uint64_t id) const {
  if (id < done_) return true;
  const Slot& slot = slots_[id % kSlots];
  return slot.id == id && slot.posted && slot.complete;
}

void Inbox::settle() {
  while (done_ < posted_ && slots_[done_ % kSlots].id == done_ && slots_[done_ % kSlots].complete) {
    ++done_;
  }
}

bool Inbox::opened(int path, uint32_t epoch) {
  Reading& reading = reading_[static_cast<size_t>(path)];
  if (epoch <= reading.seen) return false;
  closed(path);
  reading.epoch = reading.seen = epoch;
  return true;
}

void Inbox::closed(int path) {
  Reading& reading = reading_[static_cast<size_t>(path)];
  reading.epoch = 0;
  reading.frames = 0;
  reading.busy = false;
}

Inbox::Verdict Inbox::begin(int path, const Header& header) {
  Reading& reading = reading_[static_cast<size_t>(path)];
  if (reading.busy || reading.epoch == 0 || header.type != Type::Data) return Verdict::Impossible;
  if (header.message >= posted_ + kMessagesOpen) return Verdict::Impossible;
  if (header.message >= done_) {
    Slot& slot = this->slot(header.message);
    if (slot.known) {
      if (slot.total != header.total) return Verdict::Impossible;
    } else if (slot.posted) {
      if (header.total > slot.capacity) return Verdict::TooLarge;
    } else {
      if (header.total > kEagerBytes || stashed_ + header.total > kStashBytes) {
        return Verdict::Impossible;
      }
      slot.stash.reset(new uint8_t[header.total]);
      stashed_ += header.total;
    }
    if (!slot.known) {
      slot.known = true;
      slot.total = header.total;
      slot.have.assign((chunk_bits(header.total) + 63) / 64, 0);
    }
  }
  reading.busy = true;
  reading.message = header.message;
  reading.offset = header.offset;
  reading.length = header.length;
  reading.got = 0;
  return reading.length ? Verdict::Ok : advance(path, 0);
}

// The bytes at this place of the message are here already, or it is complete.
bool Inbox::lost_interest(const Reading& reading, uint64_t at) const {
  if (reading.message < done_) return true;
  const Slot& slot = slots_[reading.message % kSlots];
  return slot.id != reading.message || slot.complete || has(slot, at);
}

uint64_t Inbox::wanted(int path) const {
  const Reading& reading = reading_[static_cast<size_t>(path)];
  if (!reading.busy) return 0;
  uint64_t from = reading.offset + reading.got, end = reading.offset + reading.length;
  bool lost = lost_interest(reading, from);
  uint64_t to = from;
  while (to < end && lost_interest(reading, to) == lost) to += kChunkBytes - to % kChunkBytes;
  return std::min(to, end) - from;
}

uint8_t* Inbox::target(int path) {
  const Reading& reading = reading_[static_cast<size_t>(path)];
  uint64_t at = reading.offset + reading.got;
  if (!reading.busy || lost_interest(reading, at)) return nullptr;
  const Slot& slot = slots_[reading.message % kSlots];
  return (slot.stash ? slot.stash.get() : slot.buffer) + at;
}

// Every chunk that ends in (from, to] is here; for an empty message both are 0.
void Inbox::arrived(Slot& slot, uint64_t from, uint64_t to) {
  for (uint64_t at = from - from % kChunkBytes; !slot.complete; at += kChunkBytes) {
    uint64_t length = chunk_length(at, slot.total);
    if (at + length > to) return;
    if (!has(slot, at)) {
      uint64_t bit = at / kChunkBytes;
      slot.have[bit / 64] |= 1ull << (bit % 64);
      slot.received += length;
      slot.complete = slot.received == slot.total;
    }
    if (at + length == slot.total) return;
  }
}

Inbox::Verdict Inbox::advance(int path, uint64_t bytes) {
  Reading& reading = reading_[static_cast<size_t>(path)];
  if (!reading.busy || bytes > reading.length - reading.got) return Verdict::Impossible;
  uint64_t from = reading.offset + reading.got;
  reading.got += bytes;
  if (reading.got == reading.length) {
    reading.busy = false;
    ++reading.frames;
    reading.counts.bytes += reading.length;
  }
  if (reading.message < done_) return Verdict::Ok;
  Slot& slot = slots_[reading.message % kSlots];
  if (slot.id != reading.message || slot.complete) return Verdict::Ok;
  arrived(slot, from, from + bytes);
  if (!slot.complete) return Verdict::Ok;
  if (slot.posted && slot.stash) {
    if (slot.total > slot.capacity) return Verdict::TooLarge;
    if (slot.total) std::memcpy(slot.buffer, slot.stash.get(), slot.total);
    slot.stash.reset();
  }
  settle();
  return Verdict::Ok;
}

State Inbox::state() const {
  State state{};
  state.posted = posted_;
  state.done = done_;
  state.paths = paths_;
  for (int i = 0; i < paths_; ++i) {
    const Reading& reading = reading_[static_cast<size_t>(i)];
    uint32_t buried = reading.epoch ? reading.epoch - 1 : reading.seen;
    state.path[i] = {reading.epoch, buried, reading.frames};
  }
  return state;
}

// ----------------------------------------------------------------------------------------- Paths

Paths::Paths(int paths, const Limits& limits, uint64_t seed, Nanos now)
    : limits_(limits), random_(seed | 1), path_(static_cast<size_t>(paths)), ticked_(now) {}

Nanos Paths::jitter() {
  random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<Nanos>((random_ >> 33) % static_cast<uint64_t>(limits_.retry / 2 + 1));
}

int Paths::healthy() const {
  return static_cast<int>(std::count_if(path_.begin(), path_.end(), [](const Path& path) {
    return path.health == Health::Up;
  }));
}

bool Paths::should_open(int path, Nanos now) const {
  const Path& it = path_[static_cast<size_t>(path)];
  if (it.health == Health::Up || it.opening || now < it.next_try) return false;
  // Whoever has nothing else takes a flapping path too.
  return now >= it.hold_until || healthy() == 0;
}

void Paths::opening(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  it.opening = true;
  it.connected = false;
  it.opening_since = now;
}

void Paths::connected(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  it.connected = true;
  it.opening_since = now;
}

bool Paths::open_expired(int path, Nanos now) const {
  const Path& it = path_[static_cast<size_t>(path)];
  Nanos most = it.connected ? limits_.hello_timeout : limits_.connect_timeout;
  return it.opening && now - it.opening_since > most;
}

void Paths::open_failed(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  it.opening = false;
  it.refusals = std::min(it.refusals + 1, 2);
  // Many communicators try; whoever has other paths can wait a little longer.
  Nanos wait = healthy() > 0 ? limits_.retry << it.refusals : limits_.retry;
  it.next_try = now + wait + jitter();
}

void Paths::link_up(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  it.next_try = now;
  it.refusals = 0;
}

void Paths::up(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  it.health = Health::Up;
  it.opening = false;
  it.refusals = 0;
  it.since = now;
  ever_up_ = true;
}

void Paths::down(int path, Nanos now) {
  Path& it = path_[static_cast<size_t>(path)];
  if (it.health == Health::Down) return;
  Nanos calm = (now - it.since) / limits_.calm;
  it.level = it.level > calm ? it.level - static_cast<int>(calm) : 0;
  it.level = std::min(it.level + 1, 16);
  it.health = Health::Down;
  it.since = now;
  it.next_try = now + limits_.retry / 5;
  // The first two failures are forgiven: most faults never come back.
  Nanos hold = it.level <= 2 ? 0 : limits_.hold << (it.level - 3);
  it.hold_until = now + std::min(hold, limits_.hold_max);
}

Paths::Advice Paths::look(int path, const KernelView& view) {
  Path& it = path_[static_cast<size_t>(path)];
  if (it.health == Health::Down) return Advice::Keep;
  bool silent = view.unacknowledged > 0 && view.retransmits > 0 &&
                view.acknowledged_ago > limits_.stall;
  if (!silent) {
    if (it.health == Health::Up) return Advice::Keep;
    it.health = Health::Up;
    return Advice::Cleared;
  }
  int others = healthy() - (it.health == Health::Up ? 1 : 0);
  if (others > 0) return Advice::Kill;
  if (it.health == Health::Suspect) return Advice::Keep;
  it.health = Health::Suspect;
  it.next_try = 0;  // a second connection beside it
  return Advice::Suspect;
}

Paths::Tick Paths::tick(Nanos now, bool waited_for) {
  Tick tick{};
  // A process that was stopped for long finds its paths first, and looks at the clock later.
  Nanos passed = std::min(now - ticked_, 100 * kMillisecond);
  ticked_ = now;
  if (healthy() > 0) {
    tick.back = all_down_;
    tick.stalled = all_down_ ? now - unhealthy_since_ : 0;
    all_down_ = false;
    unhealthy_ = 0;
    return tick;
  }
  if (!all_down_ && ever_up_) {
    tick.all_down = all_down_ = true;
    unhealthy_since_ = now;
  }
  if (waited_for) unhealthy_ += passed;
  tick.deadline = unhealthy_ > limits_.deadline;
  return tick;
}

}  // namespace keepstep::net
