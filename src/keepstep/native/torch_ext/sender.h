#pragma once
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace keepstep {

// A thread that hashes memory and sends it, in the order in which it is told. It never needs the
// interpreter, unless it has to send `instead`. It runs under SCHED_BATCH, so it never takes a core
// from a thread that computes in the moment in which there is something to send.
class Sender {
 public:
  struct Item {
    std::string header;  // its last bytes are the digests of all pieces, each behind kMark
    std::vector<iovec> pieces;
    size_t size = 0;
    uint64_t ticket = 0;
  };
  // Whether all was sent.
  using Instead = std::function<bool(const std::vector<Item>&)>;

  static constexpr size_t kDigest = 16;
  static constexpr char kMark[] = {'\xc4', kDigest};  // so begins what msgpack knows as bytes

  // Tickets are numbered from `last` on.
  Sender(int socket, double silence_s, size_t batch_bytes, uint64_t last, Instead instead);
  ~Sender() { close(); }

  // Its ticket. The memory is not written to, and stays, until it was read.
  uint64_t put(Item item);
  void wait_read(uint64_t ticket) const;
  uint64_t read() const;  // the last ticket that was
  bool failed() const { return failed_; }
  int error() const { return error_; }  // if it failed; 0: `instead` did
  // All tickets count as read, and nothing is looked at any more. Whoever waits for the socket must
  // be freed by its owner.
  void close();
  // A forked process does not have the thread: there it can be neither ended nor deleted.
  bool ours() const { return getpid() == process_; }

 private:
  void run();
  std::vector<Item> next();
  bool send(std::vector<Item>& batch);

  const pid_t process_ = getpid();
  const int socket_;
  const double silence_s_;
  const size_t batch_bytes_;
  const Instead instead_;
  mutable std::mutex mutex_;
  std::condition_variable told_something_;
  std::deque<Item> queue_;
  uint64_t last_, read_;
  bool closed_ = false;
  mutable std::condition_variable read_something_;
  std::atomic<bool> failed_ = false;
  std::atomic<int> error_ = 0;
  std::thread thread_;  // last: it uses all the others
};

}  // namespace keepstep
