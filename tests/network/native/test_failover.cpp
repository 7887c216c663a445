// Tests of the failover logic and the wire format: named stories, two machines joined by a fake
// network that loses, delays and cuts at random, and a fuzzer. All of it is a function of a seed.
//
//   test_failover [WORLDS [FIRST_SEED]]
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>

#include "failover.h"

using namespace keepstep::net;

namespace {

uint64_t g_seed = 0;

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: seed %" PRIu64 ": %s\n", __FILE__, __LINE__, g_seed, \
                   #condition);                                                            \
      std::abort();                                                                        \
    }                                                                                      \
  } while (0)

struct Draw {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 2685821657736338717ull;
  }
  uint64_t below(uint64_t n) { return (next() >> 11) % n; }
  bool chance(uint64_t percent) { return below(100) < percent; }
};

uint8_t pattern(uint64_t message, uint64_t at) {
  return static_cast<uint8_t>((message * 131 + at * 7 + (at >> 9)) ^ (at >> 17));
}

// ------------------------------------------------------------------------------------- a world

struct Wire {
  bool sender_live = false, receiver_live = false;
  bool silent = false;  // bytes vanish; nobody has noticed
  uint32_t epoch = 0;
  std::deque<uint8_t> data;
  std::deque<State> states;
  uint8_t header[kHeaderBytes];
  size_t header_got = 0;
};

struct World {
  Draw draw;
  int paths;
  uint64_t messages;
  Outbox out;
  Inbox in;
  std::vector<Wire> wires;
  std::vector<std::vector<uint8_t>> sent, received;
  std::vector<uint64_t> sizes, ids;
  uint64_t handed = 0, taken = 0;  // deliveries seen by the sender's and the receiver's user
  uint64_t cuts = 0, resent = 0, known = 0;
  Nanos clock = 0;
  uint64_t runs = 0;  // frames of several chunks

  World(uint64_t seed, int n, uint64_t count)
      : draw{seed * 2654435761u + 88172645463325252ull}, paths(n), messages(count),
        out(n, seed % 2 ? kSecond : kMoment),  // where much is carried in a moment, runs are long
        in(n), wires(static_cast<size_t>(n)), sent(count), received(count) {
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t kind = draw.below(seed % 2 ? 11 : 9);
      uint64_t most = kind < 2 ? 1 : kind < 6 ? 2000 : kind < 8 ? kEagerBytes + 1
                      : kind < 9 ? 3 * kChunkBytes : 2 * kRunBytes;
      sizes.push_back(draw.below(most));
    }
  }

  Wire& wire(int path) { return wires[static_cast<size_t>(path)]; }

  void sender_lost(int path) {
    Wire& w = wire(path);
    if (!w.sender_live) return;
    w.sender_live = false;
    out.closed(path);
    ++cuts;
  }

  void receiver_lost(int path) {
    Wire& w = wire(path);
    if (!w.receiver_live) return;
    w.receiver_live = false;
    in.closed(path);
  }

  void reopen(int path) {
    Wire& w = wire(path);
    sender_lost(path);
    uint32_t epoch = w.epoch + 1;
    // The receiver learns of it by Hello: its old connection is replaced.
    if (w.receiver_live) receiver_lost(path);
    w = Wire{};
    w.epoch = epoch;
    w.sender_live = w.receiver_live = true;
    CHECK(in.opened(path, epoch));
    CHECK(!in.opened(path, epoch));
    out.opened(path, epoch);
  }

  void post() {
    if (out.posted() < messages && out.room() && draw.chance(60)) {
      uint64_t id = out.posted();
      sent[id].resize(sizes[id]);
      for (uint64_t i = 0; i < sizes[id]; ++i) sent[id][i] = pattern(id, i);
      CHECK(out.post(sent[id].data(), sizes[id]) == id);
    }
    if (in.posted() < messages && in.room() && in.posted() < taken + 8 && draw.chance(60)) {
      uint64_t id = in.posted(), got;
      received[id].assign(sizes[id] + draw.below(100), 0xAA);
      CHECK(in.post(received[id].data(), received[id].size(), &got) == Inbox::Verdict::Ok);
      CHECK(got == id);
    }
  }

  void write(int path) {
    Wire& w = wire(path);
    if (!w.sender_live || !out.fill(path, clock)) return;
    Slice slices[kSlicesMax];
    int count = out.gather(path, slices);
    CHECK(count > 0 && count <= kSlicesMax);
    uint64_t budget = draw.chance(30) ? draw.below(100) + 1 : draw.below(2 * kChunkBytes) + 1;
    uint64_t wrote = 0;
    for (int i = 0; i < count && wrote < budget; ++i) {
      size_t n = std::min<uint64_t>(slices[i].length, budget - wrote);
      if (!w.silent) w.data.insert(w.data.end(), slices[i].data, slices[i].data + n);
      wrote += n;
    }
    out.wrote(path, wrote);
  }

  void read(int path) {
    Wire& w = wire(path);
    uint64_t budget = draw.chance(30) ? draw.below(100) : draw.below(2 * kChunkBytes);
    while (w.receiver_live && budget && !w.data.empty()) {
      if (!in.in_frame(path)) {
        w.header[w.header_got++] = w.data.front();
        w.data.pop_front();
        --budget;
        if (w.header_got < kHeaderBytes) continue;
        w.header_got = 0;
        auto header = parse_header(w.header);
        CHECK(header && header->type == Type::Data && header->path == path);
        CHECK(in.begin(path, *header) == Inbox::Verdict::Ok);
        runs += header->length > kChunkBytes;
        continue;
      }
      uint64_t n = std::min<uint64_t>({budget, w.data.size(), in.wanted(path)});
      uint8_t* target = in.target(path);
      auto end = w.data.begin() + static_cast<long>(n);
      if (target) std::copy(w.data.begin(), end, target);
      w.data.erase(w.data.begin(), end);
      CHECK(in.advance(path, n) == Inbox::Verdict::Ok);
      budget -= n;
    }
    if (w.receiver_live && !w.silent && draw.chance(50)) w.states.push_back(in.state());
  }

  void hear(int path) {
    Wire& w = wire(path);
    if (!w.sender_live || w.states.empty()) return;
    uint8_t frame[kStateBytesMax];
    encode_state(path, w.states.front(), frame);
    w.states.pop_front();
    auto header = parse_header(frame);
    CHECK(header && header->type == Type::State);
    unsigned dead;
    CHECK(out.heard(parse_state(*header, frame + kHeaderBytes), &dead, clock) ==
          Outbox::Answer::Ok);
    for (int i = 0; i < paths; ++i) {
      if (dead >> i & 1) sender_lost(i);
    }
  }

  void users() {
    while (handed < out.posted() && out.delivered(handed)) {
      sent[handed].assign(sent[handed].size(), 0xEE);  // the slot is refilled at once
      ++handed;
    }
    while (taken < in.posted() && in.complete(taken)) {
      CHECK(in.size(taken) == sizes[taken]);
      auto& buffer = received[taken];
      for (uint64_t i = 0; i < sizes[taken]; ++i) CHECK(buffer[i] == pattern(taken, i));
      for (uint64_t i = sizes[taken]; i < buffer.size(); ++i) CHECK(buffer[i] == 0xAA);
      buffer.assign(buffer.size(), 0xDD);
      ++taken;
    }
    CHECK(handed <= in.done());  // never done before the receiver has it
    CHECK(out.done() >= known);  // an old State takes nothing back
    known = out.done();
  }

  void fault(int path) {
    switch (draw.below(4)) {
      case 0: sender_lost(path); break;
      case 1: receiver_lost(path); break;
      case 2: wire(path).silent = true; break;
      default: reopen(path);
    }
  }

  void run(uint64_t fault_percent) {
    for (int i = 0; i < paths; ++i) reopen(i);
    for (int round = 0; taken < messages || handed < messages; ++round) {
      CHECK(round < 200000);
      clock += static_cast<Nanos>(draw.below(kMillisecond));
      int path = static_cast<int>(draw.below(static_cast<uint64_t>(paths)));
      post();
      write(path);
      read(static_cast<int>(draw.below(static_cast<uint64_t>(paths))));
      hear(static_cast<int>(draw.below(static_cast<uint64_t>(paths))));
      users();
      // After a while all faults heal for good: then everything has to arrive.
      if (round < 4000 && draw.below(1000) < fault_percent) fault(path);
      Wire& w = wire(path);
      bool broken = !w.sender_live || !w.receiver_live || w.silent;
      if (broken && draw.chance(round < 4000 ? 5 : 50)) reopen(path);
    }
    for (uint64_t i = 0; i < messages; ++i) {
      for (uint8_t byte : received[i]) CHECK(byte == 0xDD);  // nothing came late
    }
    CHECK(in.stashed_bytes() == 0);
    CHECK(out.idle());
    for (int i = 0; i < paths; ++i) resent += out.counts(i).resent_chunks;
  }
};

void worlds(uint64_t count, uint64_t first) {
  uint64_t cuts = 0, resent = 0, runs = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    g_seed = seed;
    Draw draw{seed + 77};
    draw.next();
    World world(seed, 1 + static_cast<int>(draw.below(4)), 20 + draw.below(60));
    world.run(draw.below(150));
    cuts += world.cuts;
    resent += world.resent;
    if (world.paths > 1) runs += world.runs;
  }
  CHECK(cuts > 3 * count && resent > 3 * count);  // the faults fired
  CHECK(runs > count / 2);
  std::printf("%" PRIu64 " worlds, %" PRIu64 " cuts, %" PRIu64 " chunks sent again, %" PRIu64
              " runs over one of several paths\n",
              count, cuts, resent, runs);
}

// ------------------------------------------------------------------------------------ stories

void a_large_message_waits_for_its_receive() {
  Outbox out(1);
  std::vector<uint8_t> large(kEagerBytes + 1), small(10);
  out.opened(0, 1);
  out.post(large.data(), large.size());
  out.post(small.data(), small.size());
  CHECK(!out.fill(0, 0));
  unsigned dead;
  State state{false, 1, 0, 1, {{1, 0, 0}}};
  CHECK(out.heard(state, &dead, 0) == Outbox::Answer::Ok && dead == 0);
  CHECK(out.fill(0, 0));
}

void small_messages_stop_when_the_stash_is_full() {
  Outbox out(1);
  Inbox in(1);
  std::vector<uint8_t> data(kEagerBytes);
  out.opened(0, 1);
  CHECK(in.opened(0, 1));
  int sent = 0;
  for (int i = 0; i < 100; ++i) out.post(data.data(), data.size());
  while (out.fill(0, 0)) {
    Slice slices[kSlicesMax];
    int count = out.gather(0, slices);
    for (int k = 0; k < count; k += 2, ++sent) {
      auto header = parse_header(slices[k].data);
      CHECK(header && slices[k + 1].length == header->length);
      CHECK(in.begin(0, *header) == Inbox::Verdict::Ok);
      CHECK(in.advance(0, header->length) == Inbox::Verdict::Ok);
      out.wrote(0, slices[k].length + slices[k + 1].length);
    }
  }
  CHECK(sent == static_cast<int>(kStashBytes / kEagerBytes));
  Header more{Type::Data, 0, 10, 90, 0, 10};
  CHECK(in.begin(0, more) == Inbox::Verdict::Impossible);
}

void a_message_larger_than_its_receive_is_refused() {
  Inbox in(2);
  std::vector<uint8_t> buffer(100);
  uint64_t id;
  CHECK(in.opened(0, 1));
  CHECK(in.post(buffer.data(), 100, &id) == Inbox::Verdict::Ok);
  CHECK(in.begin(0, {Type::Data, 0, 101, 0, 0, 101}) == Inbox::Verdict::TooLarge);
}

void a_message_without_a_receive_is_not_complete() {
  Inbox in(1);
  uint8_t bytes[10] = {};
  uint64_t id;
  CHECK(in.opened(0, 1));
  CHECK(in.begin(0, {Type::Data, 0, 10, 0, 0, 10}) == Inbox::Verdict::Ok);
  std::memset(in.target(0), 7, 10);
  CHECK(in.advance(0, 10) == Inbox::Verdict::Ok);
  CHECK(!in.complete(0));
  CHECK(in.post(bytes, 10, &id) == Inbox::Verdict::Ok && in.complete(0) && bytes[9] == 7);
}

// Half of a run is here when another path brings two of its chunks.
void a_run_that_is_needed_in_part_writes_no_more_than_that() {
  Inbox in(2);
  std::vector<uint8_t> buffer(kRunBytes + 10);
  uint64_t id, half = kChunkBytes / 2;
  CHECK(in.opened(0, 1) && in.opened(1, 1));
  CHECK(in.post(buffer.data(), buffer.size(), &id) == Inbox::Verdict::Ok);
  auto data = [](int path, uint64_t length, uint64_t offset) {
    return Header{Type::Data, static_cast<uint8_t>(path), static_cast<uint32_t>(length), 0, offset,
                  kRunBytes + 10};
  };
  CHECK(in.begin(0, data(0, kRunBytes, 0)) == Inbox::Verdict::Ok);
  CHECK(in.target(0) == buffer.data() && in.wanted(0) == kRunBytes);
  CHECK(in.advance(0, kChunkBytes + half) == Inbox::Verdict::Ok);
  for (uint64_t chunk : {1, 2}) {
    CHECK(in.begin(1, data(1, kChunkBytes, chunk * kChunkBytes)) == Inbox::Verdict::Ok);
    CHECK(in.target(1) == buffer.data() + chunk * kChunkBytes);
    CHECK(in.advance(1, kChunkBytes) == Inbox::Verdict::Ok);
  }
  CHECK(in.target(0) == nullptr && in.wanted(0) == kChunkBytes + half);
  CHECK(in.advance(0, kChunkBytes + half) == Inbox::Verdict::Ok);
  CHECK(in.target(0) == buffer.data() + 3 * kChunkBytes && in.wanted(0) == kChunkBytes);
  CHECK(in.begin(1, data(1, 10, kRunBytes)) == Inbox::Verdict::Ok);
  CHECK(in.advance(1, 10) == Inbox::Verdict::Ok && !in.complete(0));
  CHECK(in.advance(0, kChunkBytes) == Inbox::Verdict::Ok && in.complete(0));
  CHECK(in.state().path[0].frames == 1 && in.state().path[1].frames == 3);
  CHECK(in.begin(1, data(1, kRunBytes, 0)) == Inbox::Verdict::Ok);  // all of it once more
  CHECK(in.target(1) == nullptr && in.wanted(1) == kRunBytes);
}

// Two paths, one ten times slower, with few messages open at a time as NCCL has them.
void a_slow_path_gets_its_share_and_no_more() {
  Outbox out(2);
  std::vector<uint8_t> data(4 * kChunkBytes);
  const double rate[2] = {0.025, 0.0025};  // bytes per nanosecond
  double room[2] = {0, 0};
  uint64_t written[2] = {0, 0}, arrived[2] = {0, 0}, chunk_bytes[2] = {0, 0};
  for (int path = 0; path < 2; ++path) out.opened(path, 1);
  State state{false, 1000, 0, 2, {{1, 0, 0}, {1, 0, 0}}};
  uint64_t total = 0;
  for (Nanos now = 0; now < 4 * kSecond; now += kMillisecond) {
    while (out.posted() < out.done() + 8) out.post(data.data(), data.size());
    for (int path = 0; path < 2; ++path) {
      // The socket takes what is written at once; the link drains it at its rate.
      while (written[path] < arrived[path] + 512 * 1024 && out.fill(path, now)) {
        Slice slices[kSlicesMax];
        int count = out.gather(path, slices);
        size_t bytes = 0;
        for (int i = 0; i < count; ++i) bytes += slices[i].length;
        out.wrote(path, bytes);
        written[path] += bytes;
      }
      room[path] += rate[path] * kMillisecond;
      uint64_t frame = kHeaderBytes + kChunkBytes;
      while (room[path] >= static_cast<double>(frame) && written[path] >= arrived[path] + frame) {
        room[path] -= static_cast<double>(frame);
        arrived[path] += frame;
        chunk_bytes[path] += kChunkBytes;
        ++state.path[path].frames;
      }
      if (written[path] == arrived[path]) room[path] = 0;
    }
    // Messages are complete in order once all their chunks are: near enough for this story.
    total = chunk_bytes[0] + chunk_bytes[1];
    state.done = std::min(out.posted() - 1, total / data.size());
    unsigned dead;
    CHECK(out.heard(state, &dead, now) == Outbox::Answer::Ok);
  }
  double ideal = (rate[0] + rate[1]) * 4 * kSecond;
  CHECK(static_cast<double>(total) > 0.85 * ideal);
  CHECK(chunk_bytes[1] > 0 && chunk_bytes[0] > 5 * chunk_bytes[1]);
}

// Bursts that are shorter than a measurement, as between steps: where a path carries much in a
// moment, frames grow to whole runs once the others are busy, and a few bytes say nothing.
void short_bursts_are_measured_together() {
  Outbox out(2);
  std::vector<uint8_t> data(kRunBytes);
  for (int path = 0; path < 2; ++path) out.opened(path, 1);
  State state{false, 100000, 0, 2, {{1, 0, 0}, {1, 0, 0}}};
  unsigned dead;
  Nanos now = 0;
  size_t longest = 0, frames = 0;
  auto burst = [&](uint64_t size, int messages) {
    CHECK(out.heard(state, &dead, now) == Outbox::Answer::Ok);  // as many receives as needed
    longest = frames = 0;
    for (int i = 0; i < messages; ++i) {
      out.post(data.data(), size);
      for (int path = i % 2, idle = 0; idle < 2; path = 1 - path) {
        if (!out.fill(path, now)) {
          ++idle;
          continue;
        }
        idle = 0;
        Slice slices[kSlicesMax];
        int count = out.gather(path, slices);
        for (int k = 0; k < count; ++k) {
          out.wrote(path, slices[k].length);
          longest = std::max(longest, slices[k].length);
        }
        state.path[path].frames += static_cast<uint64_t>(count / 2);
        frames += static_cast<size_t>(count / 2);
      }
    }
    now += kMillisecond;
    state.done = out.posted();
    CHECK(out.heard(state, &dead, now) == Outbox::Answer::Ok && out.idle());
    now += 100 * kMillisecond;
  };
  burst(kRunBytes, 8);
  CHECK(longest == kChunkBytes && frames == 32);  // a path may be slow until it has shown its rate
  for (int i = 0; i < 10; ++i) burst(kRunBytes, 8);
  CHECK(longest == kRunBytes && frames < 16);
  for (int i = 0; i < 1000; ++i) burst(100, 1);
  burst(kRunBytes, 8);
  CHECK(longest == kRunBytes && frames < 16);
  burst(kRunBytes, 1);
  CHECK(longest == kRunBytes / 2);  // both take part in a single one
}

void a_buried_path_is_reported_dead() {
  Outbox out(2);
  out.opened(0, 4);
  out.opened(1, 2);
  unsigned dead;
  State state{false, 0, 0, 2, {{0, 4, 0}, {2, 1, 0}}};
  CHECK(out.heard(state, &dead, 0) == Outbox::Answer::Ok && dead == 1u);
  out.closed(0);
  out.opened(0, 5);  // an old word about epoch 4 does not hit epoch 5
  CHECK(out.heard(state, &dead, 0) == Outbox::Answer::Ok && dead == 0u);
  Inbox in(1);
  CHECK(in.opened(0, 3));
  CHECK(in.state().path[0].epoch == 3 && in.state().path[0].buried == 2);
  in.closed(0);
  CHECK(in.state().path[0].epoch == 0 && in.state().path[0].buried == 3);
}

const KernelView kSilent{3, 2, 300 * kMillisecond};
const KernelView kFine{3, 0, 300 * kMillisecond};

void a_timer_never_takes_the_last_path() {
  Paths paths(2, Limits{}, 1, 0);
  paths.up(0, 0);
  paths.up(1, 0);
  CHECK(paths.look(0, kFine) == Paths::Advice::Keep);  // a descheduled peer still acknowledges
  CHECK(paths.look(0, kSilent) == Paths::Advice::Kill);
  paths.down(0, kSecond);
  CHECK(paths.look(1, kSilent) == Paths::Advice::Suspect);
  CHECK(paths.look(1, kSilent) == Paths::Advice::Keep);
  CHECK(paths.should_open(1, kSecond));  // a second connection beside the suspect one
  CHECK(paths.look(1, kFine) == Paths::Advice::Cleared);
  CHECK(paths.look(1, kSilent) == Paths::Advice::Suspect);
  paths.up(0, 2 * kSecond);
  CHECK(paths.look(1, kSilent) == Paths::Advice::Kill);
}

void the_deadline_counts_only_time_in_which_somebody_waits() {
  Limits limits;
  limits.deadline = 2 * kSecond;
  Paths paths(1, limits, 1, 0);
  paths.up(0, 0);
  paths.down(0, kSecond);
  Nanos now = kSecond;
  auto tick = paths.tick(now, true);
  CHECK(tick.all_down && !tick.deadline);
  for (int i = 0; i < 100; ++i) CHECK(!paths.tick(now += 100 * kMillisecond, false).deadline);
  CHECK(!paths.tick(now += 60 * kSecond, true).deadline);  // it was stopped
  int waited = 0;
  while (!paths.tick(now += 100 * kMillisecond, true).deadline) ++waited;
  CHECK(waited == 18 || waited == 19);
  paths.up(0, now);
  tick = paths.tick(now, true);
  CHECK(tick.back && tick.stalled > 60 * kSecond);
  CHECK(!paths.tick(now + kMillisecond, true).back);
}

void a_flapping_path_stays_away_longer_each_time_and_is_forgiven() {
  Limits limits;
  Paths paths(2, limits, 1, 0);
  paths.up(1, 0);
  Nanos now = 0, last = 0;
  for (int flap = 1; flap <= 12; ++flap) {
    paths.up(0, now);
    paths.down(0, now += 10 * kMillisecond);
    Nanos from = now;
    while (!paths.should_open(0, now)) now += 10 * kMillisecond;
    CHECK(flap <= 2 ? now - from < 200 * kMillisecond : now - from >= last);
    CHECK(now - from <= limits.hold_max + 10 * kMillisecond);
    last = now - from;
  }
  CHECK(last >= limits.hold_max);
  paths.down(1, now);
  CHECK(paths.should_open(0, now));  // nothing else is left
  paths.up(0, now);
  now += 16 * limits.calm;
  paths.up(1, now);
  paths.down(0, now);
  CHECK(paths.should_open(0, now + limits.retry));
}

void handles_of_every_shape_survive() {
  for (int v4 = 0; v4 <= kPathsMax; ++v4) {
    for (int v6 = 0; v4 + v6 <= kPathsMax; ++v6) {
      if (v4 + v6 == 0) continue;
      Handle handle{};
      handle.port = 4242;
      handle.count = v4 + v6;
      for (int i = 0; i < handle.count; ++i) {
        handle.endpoint[i].v6 = i >= v4;
        std::memset(handle.endpoint[i].address, i + 1, handle.endpoint[i].v6 ? 16 : 4);
      }
      uint8_t bytes[kHandleBytes];
      bool fits = encode_handle(handle, bytes);
      CHECK(fits == (4 * v4 + 16 * v6 <= 96));
      if (!fits) continue;
      auto back = parse_handle(bytes);
      CHECK(back && back->count == handle.count && back->port == handle.port);
      CHECK(std::memcmp(back->endpoint, handle.endpoint, sizeof handle.endpoint) == 0);
    }
  }
}

// ------------------------------------------------------------------------------------ fuzzing

// Headers that are nearly right reach further than noise.
Header nearly_right(Draw& draw) {
  uint64_t totals[] = {0, 1, 100, kChunkBytes, kChunkBytes + 1, 5 * kChunkBytes, kMessageBytesMax};
  uint64_t total = totals[draw.below(7)];
  uint64_t offset = total ? draw.below(total / kChunkBytes + 2) * kChunkBytes : draw.below(2);
  uint64_t run = draw.below(6) * kChunkBytes;
  if (draw.chance(50)) run = kChunkBytes;
  auto length = static_cast<uint32_t>(offset <= total ? std::min(total - offset, run) : 7);
  if (draw.chance(10)) length += static_cast<uint32_t>(draw.below(3));
  auto type = static_cast<Type>(draw.chance(80) ? 3 : draw.below(6));
  return {type, static_cast<uint8_t>(draw.below(10)), length, draw.below(draw.chance(90) ? 9 : 4000), offset, total};
}

void fuzz(uint64_t rounds) {
  Draw draw{g_seed + 4711};
  uint64_t accepted = 0, refused = 0;
  for (uint64_t round = 0; round < rounds; ++round) {
    Inbox in(2);
    Outbox out(2);
    std::vector<uint8_t> buffer(6 * kChunkBytes);
    uint32_t epoch = 1;
    for (int path = 0; path < 2; ++path) {
      CHECK(in.opened(path, epoch));
      out.opened(path, epoch);
    }
    for (int i = 0; i < 8; ++i) {
      uint64_t id;
      if (draw.chance(50)) in.post(buffer.data(), draw.below(buffer.size()), &id);
      if (draw.chance(50)) out.post(buffer.data(), draw.below(buffer.size()));
    }
    for (int step = 0; step < 50; ++step) {
      int path = static_cast<int>(draw.below(2));
      uint8_t bytes[kStateBytesMax];
      encode(nearly_right(draw), bytes);
      if (draw.chance(20)) bytes[draw.below(kHeaderBytes)] ^= static_cast<uint8_t>(draw.next());
      auto header = parse_header(bytes);
      if (!header) {
        ++refused;
        continue;
      }
      CHECK(header->length <= kRunBytes && header->path < kPathsMax);
      if (header->type == Type::Data) {
        auto verdict = in.begin(path, *header);
        if (verdict != Inbox::Verdict::Ok) {
          ++refused;
          in.closed(path);
          CHECK(in.opened(path, ++epoch));
          continue;
        }
        ++accepted;
        while (in.wanted(path)) {
          uint64_t n = draw.below(in.wanted(path)) + 1;
          uint8_t* target = in.target(path);
          if (target) std::memset(target, 1, n);  // a sanitizer sees a step outside
          CHECK(in.advance(path, n) == Inbox::Verdict::Ok);
          if (draw.chance(5)) break;
        }
        if (in.wanted(path)) {
          in.closed(path);
          CHECK(in.opened(path, ++epoch));
        }
      }
      CHECK(in.stashed_bytes() <= kStashBytes && in.done() <= in.posted());
      if (out.fill(path, step)) {
        Slice slices[kSlicesMax];
        int count = out.gather(path, slices);
        out.wrote(path, draw.below(slices[0].length + (count > 1 ? slices[1].length : 0)) + 1);
      }
      State state{draw.chance(2), draw.below(12), draw.below(8) / 6, 2, {}};
      for (auto& one : state.path) {
        one = {static_cast<uint32_t>(draw.below(3)), static_cast<uint32_t>(draw.below(2)),
               draw.chance(5) ? draw.next() : draw.below(20) / 18};
      }
      unsigned dead;
      if (out.heard(state, &dead, 0) == Outbox::Answer::Ok) ++accepted;
      CHECK(out.done() <= out.posted());
    }
    uint8_t noise[kHandleBytes];
    for (auto& byte : noise) byte = static_cast<uint8_t>(draw.next());
    if (draw.chance(50)) std::memcpy(noise, "KSN1", 4);
    if (auto handle = parse_handle(noise)) CHECK(handle->count <= kPathsMax);
  }
  CHECK(accepted > rounds && refused > rounds);
  std::printf("%" PRIu64 " rounds of fuzzing: %" PRIu64 " inputs taken, %" PRIu64 " refused\n", rounds,
              accepted, refused);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
  uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  a_large_message_waits_for_its_receive();
  small_messages_stop_when_the_stash_is_full();
  a_message_larger_than_its_receive_is_refused();
  a_message_without_a_receive_is_not_complete();
  a_run_that_is_needed_in_part_writes_no_more_than_that();
  a_slow_path_gets_its_share_and_no_more();
  short_bursts_are_measured_together();
  a_buried_path_is_reported_dead();
  a_timer_never_takes_the_last_path();
  the_deadline_counts_only_time_in_which_somebody_waits();
  a_flapping_path_stays_away_longer_each_time_and_is_forgiven();
  handles_of_every_shape_survive();
  worlds(count, first);
  fuzz(20 * count);
}
