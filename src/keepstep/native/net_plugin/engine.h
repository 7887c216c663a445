// The process around all communicators: one thread (and a helper that reads large messages where
// processors are idle), one acceptor for all of them, link events and words to the agent. It lives
// as long as the process: NCCL may unload and load the plugin again.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm.h"

namespace keepstep::net {

class Engine final : public Surroundings {
 public:
  // The one engine of this process; null if the configuration is wrong, which is logged.
  static Engine* get();

  const Config& config() const override { return config_; }
  void wake() override;
  void report(const std::string& json) override { reporter_->send(json); }
  bool watch(int socket, Comm* comm) override;
  void unwatch(int socket) override;

  // A fresh cookie, this process's addresses, and the communicator that waits for its peer.
  std::shared_ptr<Comm> listen(uint8_t* handle);
  // The communicator for a handle, begun now or earlier by the same buffer; null: a bad handle.
  std::shared_ptr<Comm> connect(uint8_t* handle);
  int speed_mbps() const;

 private:
  struct Stranger {
    int socket;
    Nanos since;
    size_t got;
    uint8_t hello[kHelloBytes];
  };

  bool start(std::string* wrong);
  void run();
  struct Charge {
    std::shared_ptr<Comm> comm;
    Nanos moved;
  };
  void help();
  bool help_once(std::vector<Charge>* charges);
  std::shared_ptr<Comm> find(const Comm* comm);
  Nanos turn(Nanos rest);
  void accept_all(int listener, Nanos now);
  void hear_strangers(Nanos now);
  bool introduce(Stranger& stranger, Nanos now);
  void refuse(const char* why);
  void links(Nanos now);
  void control(Nanos now);
  void statistics(Nanos now);
  std::vector<std::shared_ptr<Comm>> snapshot();
  void keep(std::shared_ptr<Comm> comm);

  Config config_;
  std::unique_ptr<Reporter> reporter_;
  std::unique_ptr<LinkWatch> links_;
  std::vector<int> listeners_;
  uint16_t port_ = 0;
  int wake_ = -1, control_ = -1;
  int watched_ = -1;  // epoll, of the helper; -1: there is none
  std::vector<Stranger> strangers_;
  uint64_t refused_ = 0;
  Nanos statistics_at_ = 0;
  pid_t pid_ = 0;

  std::mutex mutex_;  // of what follows; never held while a communicator's is taken
  std::vector<std::shared_ptr<Comm>> comms_;
  std::map<uint64_t, std::shared_ptr<Comm>> connecting_;
  uint64_t next_number_ = 1;
  std::vector<PathTotals> gone_;  // of communicators that are closed
};

}  // namespace keepstep::net
