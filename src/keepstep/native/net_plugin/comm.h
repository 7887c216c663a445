// One communicator: a sequence of messages to or from one peer over up to eight connections.
//
// Threads. NCCL's progress thread calls isend, irecv and test; they try the lock and, if the engine
// has it or waits for it, say "not yet", which NCCL takes for granted. The engine's thread calls
// serve() now and then: it opens and judges connections, and moves bytes whenever nobody has called
// for a while (after its last receive NCCL never calls again, yet the peer may still need an
// answer). All state is under one mutex, which nobody holds while waiting for anything.
//
// NCCL's thread copies for all its communicators, in both directions. Where processors are idle a
// helper reads large messages in its place: it calls help(), and has the mutex for most of the time.
// So receives are posted, and seen to be done, without it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "failover.h"
#include "host.h"

namespace keepstep::net {

class Comm;

constexpr size_t kReadAhead = 64 * 1024;

struct Request {
  Comm* comm = nullptr;  // null: free
  uint64_t message = 0;
  uint64_t size = 0;
  bool copied = false;  // the user's buffer is free already
};

struct PathTotals {
  uint64_t sent_bytes = 0, received_bytes = 0, resent_chunks = 0, resent_bytes = 0;
  uint64_t downs = 0, suspects = 0;
  Nanos stalled = 0;
  int comms = 0, comms_up = 0;
  void add(const PathTotals& other);
};

// What a communicator asks of the process around it.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual const Config& config() const = 0;
  virtual void wake() = 0;
  virtual void report(const std::string& json) = 0;
  // The helper comes when there is something to be read. Sockets are taken back before they are
  // closed: a forked child may hold a copy.
  virtual bool watch(int socket, Comm* comm) = 0;
  virtual void unwatch(int socket) = 0;
};

class Comm {
 public:
  enum class Role { Send, Receive };

  Comm(Surroundings& around, Role role, const Handle& handle);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // From NCCL's threads.
  abi::Result isend(const void* data, uint64_t size, void** request);
  abi::Result irecv(void* data, uint64_t capacity, void** request);
  abi::Result test(Request* request, int* done, int* size);
  bool ready(abi::Result* error);  // it had a path at least once
  void close();

  // From the engine's thread.
  Nanos serve(Nanos now);  // and when to come again at the latest
  bool adopt(int socket, int path, uint32_t epoch, Nanos now);
  void link_changed(int path, bool up, Nanos now);
  void cut(int path, bool cut, Nanos now);  // a fault on request
  bool finished() const { return closed_; }  // and nothing is left to be said
  void totals(std::vector<PathTotals>* totals);

  // From the helper's thread.
  bool help();  // reads up to the end of a message; false: there was nothing
  void leave();

  Nanos due = 0;  // the engine's own note: when to serve next

  const Cookie& cookie() const { return handle_.cookie; }
  bool receives() const { return role_ == Role::Receive; }

 private:
  struct Path {
    bool paired = false;  // both ends have an address of the same family
    int socket = -1;
    bool watched = false;  // by the helper
    uint32_t epoch = 0;
    int opening = -1;  // the connection that may follow
    uint32_t opening_epoch = 0;
    bool hello_said = false;
    bool cut = false;
    std::unique_ptr<uint8_t[]> in;
    size_t in_begin = 0, in_end = 0;
    bool small_frames = true;  // read ahead: the next frames are likely in the same segment
    uint8_t state[kStateBytesMax];
    size_t state_size = 0, state_sent = 0;
    bool state_stale = false;
    Nanos state_at = 0;
    Nanos looked_at = 0;
    PathTotals totals;
  };
  enum class Io { Nothing, Blocked, Moved, Lost };

  using Lock = std::unique_lock<std::mutex>;
  Lock try_enter();  // NCCL's threads; not locked: later
  Lock enter();      // the engine's and the helper's

  // comm.cpp: life of the connections
  void open_paths(Nanos now);
  void open(int i, Nanos now);
  void promote(int i, Nanos now);
  void drop_opening(int i, Nanos now);
  void attach(int i, int socket, Nanos now);
  void watch(Path& path, bool wanted);
  void lose(int i, Nanos now, const char* reason);
  void judge(Nanos now);
  void clock(Nanos now);
  void report(const char* event, int i, const char* reason, Nanos stalled);
  bool waited_for() const;
  bool in_user_memory() const;
  Nanos next_visit(Nanos now) const;
  void fail(abi::Result result) { if (!error_) error_ = result; }
  void finish_closing(Nanos now);

  // transfer.cpp: bytes
  void progress(Nanos now, const Request* wanted);
  bool read_all(Nanos now, const Request* wanted);
  bool take_receives();  // false: there was none
  void consider_help(uint64_t size);
  void pump(Nanos now);
  void write_all(Nanos now);
  Io write_once(int i, Nanos now, size_t* bytes);
  Io hear_states(int i, Nanos now);
  Io read_data(int i, Nanos now, const Request* wanted);
  Io consume(int i, Nanos now);
  bool take_header(int i, Nanos now);
  void note_arrival(Nanos now);
  void say_states(Nanos now);
  bool send_state(int i, Nanos now);
  void send_small(Nanos now);
  uint8_t* copy(const void* data, uint64_t size);
  Request* free_request(uint64_t message);

  Surroundings& around_;
  const Role role_;
  const Handle handle_;
  const std::vector<LocalPath>& local_;

  std::mutex mutex_;
  std::atomic<int> waiting_{0};  // threads that sleep on it
  std::vector<Path> path_;
  Paths paths_;
  std::unique_ptr<Outbox> out_;
  std::unique_ptr<Inbox> in_;
  Request requests_[kReceivesOpen];  // only callers touch them, one at a time
  abi::Result error_ = abi::Success;
  Nanos polled_ = 0;
  bool peer_left_ = false;
  bool closing_ = false;  // the user has closed it; the peer may still need an answer
  std::atomic<bool> closed_{false};
  Nanos closing_since_ = 0;

  // Sender: copies of small messages, in a ring; freed in order.
  std::unique_ptr<uint8_t[]> copies_;
  uint64_t copies_begin_ = 0, copies_end_ = 0;
  struct Copied {
    uint64_t message, end;
  };
  std::deque<Copied> copied_;
  uint64_t uncopied_ = 0;  // 1 + the last message that lives in the user's memory
  uint64_t deferred_ = 0;  // bytes of small messages that nobody has tried to send yet
  bool left_ = false;  // a small message waits for a path, and its user has been told "done"
  int turn_ = 0;
  unsigned calls_ = 0;

  // Receiver: what callers and whoever has the mutex tell each other without it.
  struct Receive {
    uint8_t* data;
    uint64_t capacity;
  };
  Receive receives_[kReceivesOpen];
  std::atomic<uint64_t> asked_{0};    // receives that were posted by callers
  std::atomic<uint64_t> arrived_{0};  // all before it are complete

  int large_ = 0;  // > 0: messages are large, and the helper is welcome
  Nanos attended_ = 0;  // when the helper was here last; 0: it has left

  // Receiver: what the peer was told last, over any path.
  State told_{};
  bool changed_ = false;
  bool urgent_ = false;
  Nanos changed_at_ = 0;
  Nanos lazy_ = 0;  // so long it may wait for more
  Nanos look_at_ = 0;  // nothing is read or answered before
  bool quiet_ = false;  // between two frames, and nothing was there to be read
  int last_ = 0;  // path of the last arrival
};

}  // namespace keepstep::net
