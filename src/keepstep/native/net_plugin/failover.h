// What may be sent where, what has arrived, and which path is to be believed. No sockets, no clock.
//
// Theory of operation
//
// A communicator is a sequence of messages, numbered from 0 by both ends alike. A message is cut
// into chunks; each chunk is given to one path, whichever takes it first. Chunks that follow each
// other travel as one frame, as many as a path carries in a moment: fewer system calls on a fast
// path, and little to repeat on a slow one. `Outbox` remembers the frames of each path in the order
// in which they were given. The receiver answers with cumulative counts (wire.h, State) over every
// path that works, so a lost answer is repaired by the next one.
//
// A path takes as much as it can carry: what is under way on it, divided by the rate at which it
// delivered lately, must not last much longer than on the best other path. Otherwise a slow path
// would hold the few messages that may be open at a time, and all others would idle.
//
// A path that fails is never resumed: its connection is gone, all chunks on it that are not known
// to have arrived go back into the queue and are given to others, and the path comes back as a new
// connection under a larger epoch. Counts of an older epoch mean nothing.
//
// Two things would be silent corruption, and both are decided here, not by whoever holds a socket:
//   * A sender's buffer belongs to the user again once the message is delivered. `gather` reads
//     zeros instead from then on: the receiver throws those bytes away.
//   * A receiver's buffer belongs to the user again once the message is complete. `target` is
//     asked before every single read and says "nowhere" from then on, even in mid-chunk.
//
// Small messages (up to kEagerBytes) are sent before a receive is posted, as long as the
// receiver's stash can hold all of them. Larger ones wait for a posted receive.
//
// `Paths` says when a path is dead, suspect or worth another try. A timer alone never takes the
// last path: it stays suspect, and is given up when another path works, or by the deadline.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "wire.h"

namespace keepstep::net {

using Nanos = int64_t;
constexpr Nanos kMillisecond = 1'000'000;
constexpr Nanos kSecond = 1'000'000'000;

constexpr uint64_t kEagerBytes = 64 * 1024;
constexpr uint64_t kStashBytes = 4 << 20;
constexpr uint64_t kMessagesOpen = 1024;      // posted by the sender and not delivered
constexpr uint64_t kReceivesOpen = 64;        // posted by the receiver and not complete
constexpr uint64_t kFlightFrames = 1024;      // given to a path and not known to have arrived
constexpr uint64_t kFlightBytes = 8 << 20;
constexpr uint64_t kBatchBytes = 64 * 1024;   // small frames that are written together
constexpr int kBatchFrames = 16;
constexpr int kSlicesMax = 2 * kBatchFrames;
constexpr Nanos kMoment = kMillisecond / 2;   // what a path carries in it is written together too
constexpr Nanos kMeasure = 5 * kMillisecond;         // shorter ones would measure the scheduler
constexpr Nanos kUnevenness = 5 * kMillisecond;      // by which a path may be behind the best one
constexpr Nanos kRateForgotten = 500 * kMillisecond;  // an unused path may have become better
constexpr Nanos kStuck = 100 * kMillisecond;         // a path without progress is no measure
constexpr uint64_t kUnknownBytes = 2 * kChunkBytes;  // under way on a path of unknown rate

struct Slice {
  const uint8_t* data;
  size_t length;
};

struct PathCounts {
  uint64_t bytes = 0;  // payload that arrived (receiver) or is known to have (sender)
  uint64_t resent_chunks = 0;
  uint64_t resent_bytes = 0;
};

class Outbox {
 public:
  explicit Outbox(int paths, Nanos moment = kMoment)
      : paths_(paths), moment_(moment), flights_(static_cast<size_t>(paths)) {}

  bool room() const { return next_ - done_ < kMessagesOpen; }
  // `data` stays valid until delivered(message).
  uint64_t post(const uint8_t* data, uint64_t size);
  bool delivered(uint64_t message) const { return message < done_; }
  uint64_t posted() const { return next_; }
  uint64_t done() const { return done_; }
  bool idle() const { return done_ == next_; }

  void opened(int path, uint32_t epoch);
  void closed(int path);

  // Gives the path what it should write next, if there is anything. True: gather() has bytes.
  bool fill(int path, Nanos now);
  int gather(int path, Slice* slices) const;
  void wrote(int path, size_t bytes);
  // Bytes are waiting although no path has taken them.
  bool unsent() const;
  uint64_t under_way(int path) const { return flights_[static_cast<size_t>(path)].bytes; }

  enum class Answer { Ok, Impossible };
  // `dead` gets a bit for each path whose live connection the receiver has buried.
  Answer heard(const State& state, unsigned* dead, Nanos now);

  const PathCounts& counts(int path) const { return flights_[static_cast<size_t>(path)].counts; }

 private:
  struct Message {
    const uint8_t* data;
    uint64_t size;
  };
  struct Frame {
    uint64_t message;
    uint64_t offset;
    uint32_t length;
    uint8_t header[kHeaderBytes];
  };
  struct Flight {
    bool live = false;
    uint32_t epoch = 0;
    // Frame n of this epoch is ring[n % kFlightFrames]; arrived <= written <= given.
    uint64_t arrived = 0, written = 0, given = 0;
    uint64_t bytes = 0;      // of frames in [arrived, given)
    size_t written_part = 0;  // bytes of frame `written` that are written
    double rate = 0;          // bytes per nanosecond, lately; 0: not known
    Nanos measured = 0;       // when time was counted last, or something was given to an idle path
    Nanos progress = 0;       // when something arrived last, or was given to an idle path
    Nanos busy = 0;           // time with something under way: a measurement spans short bursts
    uint64_t counted = 0;     // bytes that arrived in it
    std::vector<Frame> ring;
    PathCounts counts;
  };
  struct Run {
    uint64_t message, offset, length;
  };

  const Message& message(uint64_t id) const { return ring_[id % kMessagesOpen]; }
  bool take(uint64_t most, Run* run);
  bool may_start(uint64_t id) const;
  bool worth_it(int path, Nanos now) const;
  uint64_t batch_bytes(int path) const;
  void give(int path, const Run& run, Nanos now);
  void measure(Flight& flight, uint64_t bytes, Nanos now);

  int paths_;
  Nanos moment_;
  Message ring_[kMessagesOpen] = {};
  uint64_t next_ = 0;         // id of the next message
  uint64_t done_ = 0;         // all before it are delivered
  uint64_t allowed_ = 0;      // receives posted by the peer
  uint64_t cursor_ = 0;       // message with the next chunk that was never given away
  uint64_t cursor_offset_ = 0;
  uint64_t waiting_ = 0;      // bytes that were never given away
  uint64_t unasked_ = 0;      // bytes of started messages in [allowed_, cursor_]
  std::deque<Run> again_;     // chunks to be sent once more, oldest first
  std::vector<Flight> flights_;
};

class Inbox {
 public:
  explicit Inbox(int paths) : paths_(paths), reading_(static_cast<size_t>(paths)), slots_(kSlots) {}

  enum class Verdict { Ok, Impossible, TooLarge };

  bool room() const { return posted_ - done_ < kReceivesOpen; }
  // TooLarge: a message that has arrived already does not fit.
  Verdict post(uint8_t* buffer, uint64_t capacity, uint64_t* id);
  bool complete(uint64_t id) const;  // and in the buffer that was posted for it
  uint64_t size(uint64_t id) const { return slots_[id % kSlots].total; }
  uint64_t posted() const { return posted_; }
  uint64_t done() const { return done_; }
  uint64_t stashed_bytes() const { return stashed_; }

  // False: this epoch has been seen, or a later one.
  bool opened(int path, uint32_t epoch);
  void closed(int path);

  // A Data header came in over this path; its payload follows.
  Verdict begin(int path, const Header& header);
  bool in_frame(int path) const { return reading_[static_cast<size_t>(path)].busy; }
  // So many bytes come next that have the same target.
  uint64_t wanted(int path) const;
  // Where the next bytes of the frame belong; null: read them and throw them away.
  uint8_t* target(int path);
  // `bytes`, at most wanted(), were read, to where target() said. Chunks may end here.
  Verdict advance(int path, uint64_t bytes);

  State state() const;
  const PathCounts& counts(int path) const { return reading_[static_cast<size_t>(path)].counts; }

 private:
  // Receives that are open, and small messages that came before theirs.
  static constexpr uint64_t kSlots = 2048;
  static_assert(kSlots >= kReceivesOpen + kMessagesOpen, "a message would meet another one");

  struct Slot {
    uint64_t id = UINT64_MAX;
    uint8_t* buffer = nullptr;
    uint64_t capacity = 0;
    bool posted = false;
    bool known = false;  // a header said how large it is
    bool complete = false;
    uint64_t total = 0;
    uint64_t received = 0;
    std::vector<uint64_t> have;  // one bit per chunk
    std::unique_ptr<uint8_t[]> stash;
  };
  struct Reading {
    uint32_t epoch = 0;
    uint32_t seen = 0;  // the largest epoch ever
    uint64_t frames = 0;
    bool busy = false;
    uint64_t message = 0, offset = 0, length = 0, got = 0;
    PathCounts counts;
  };

  Slot& slot(uint64_t id);
  bool has(const Slot& slot, uint64_t offset) const;
  bool lost_interest(const Reading& reading, uint64_t at) const;
  void arrived(Slot& slot, uint64_t from, uint64_t to);
  void settle();

  int paths_;
  uint64_t posted_ = 0;
  uint64_t done_ = 0;
  uint64_t stashed_ = 0;
  std::vector<Reading> reading_;
  std::vector<Slot> slots_;
};

struct Limits {
  Nanos stall = 250 * kMillisecond;     // no acknowledgement by the kernel while it retransmits
  Nanos connect_timeout = 300 * kMillisecond;
  Nanos hello_timeout = 5 * kSecond;    // a connected peer may be short of processor time
  Nanos retry = 100 * kMillisecond;
  Nanos hold = kSecond;                 // a flapping path stays away: doubles up to hold_max
  Nanos hold_max = 60 * kSecond;
  Nanos calm = 10 * kSecond;            // of good conduct halve that again
  Nanos deadline = 30 * kSecond;        // without any healthy path, while somebody waits
};

// What the kernel says about the connection of a path.
struct KernelView {
  uint32_t unacknowledged;
  uint32_t retransmits;  // timeouts in a row
  Nanos acknowledged_ago;
};

class Paths {
 public:
  enum class Health : uint8_t { Down, Up, Suspect };
  enum class Advice { Keep, Suspect, Cleared, Kill };
  struct Tick {
    bool all_down;     // since this tick
    bool back;         // a healthy path again, since this tick
    bool deadline;     // has passed: give up
    Nanos stalled;     // how long no path was healthy, when `back`
  };

  Paths(int paths, const Limits& limits, uint64_t seed, Nanos now);

  int count() const { return static_cast<int>(path_.size()); }
  Health health(int path) const { return path_[static_cast<size_t>(path)].health; }
  int healthy() const;
  bool ever_up() const { return ever_up_; }
  int flaps(int path) const { return path_[static_cast<size_t>(path)].level; }

  // The opening side: a connection should be tried now. One attempt at a time.
  bool should_open(int path, Nanos now) const;
  void opening(int path, Nanos now);
  void connected(int path, Nanos now);
  bool open_expired(int path, Nanos now) const;
  void open_failed(int path, Nanos now);
  void link_up(int path, Nanos now);

  void up(int path, Nanos now);
  void down(int path, Nanos now);
  Advice look(int path, const KernelView& view);
  // `waited_for`: somebody has a request open. Time during which this process did not run, and so
  // could not have seen a path heal, does not count towards the deadline.
  Tick tick(Nanos now, bool waited_for);

 private:
  struct Path {
    Health health = Health::Down;
    bool opening = false, connected = false;
    Nanos since = 0;       // of health
    Nanos opening_since = 0;
    Nanos next_try = 0;
    Nanos hold_until = 0;
    int level = 0;         // failures lately
    int refusals = 0;      // attempts in a row that came to nothing
  };
  Nanos jitter();

  Limits limits_;
  uint64_t random_;
  std::vector<Path> path_;
  bool ever_up_ = false;
  bool all_down_ = false;
  Nanos unhealthy_ = 0;  // so far
  Nanos unhealthy_since_ = 0;
  Nanos ticked_;
};

}  // namespace keepstep::net
