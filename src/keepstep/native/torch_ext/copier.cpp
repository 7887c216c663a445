#include "copier.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <utility>

namespace keepstep {
namespace {

constexpr size_t kHelped = 2 << 20;  // bytes that are worth a thread
constexpr size_t kPart = 1 << 20;  // bytes that are worth to be taken by whoever is free

// Work in parts, by whoever helps, all of which compute as the one who needs it does.
class Together {
 public:
  Together(size_t parts, std::function<void(size_t)> one) : parts_(parts), one_(std::move(one)) {
    std::fegetenv(&floats_);
  }

  // Returns when nothing is left to begin with. After that `one` is not called any more.
  void help() {
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&floats_);
    for (size_t at; (at = next_++) < parts_;) {
      one_(at);
      if (++done_ == parts_) {
        const std::lock_guard lock(mutex_);
        all_.notify_all();
      }
    }
    std::fesetenv(&own);
  }

  // Returns when all is done.
  void finish() {
    help();
    std::unique_lock lock(mutex_);
    all_.wait(lock, [&] { return done_ == parts_; });
  }

 private:
  const size_t parts_;
  const std::function<void(size_t)> one_;
  std::fenv_t floats_;  // for one: whether numbers too small to be normal count as nothing
  std::atomic<size_t> next_ = 0, done_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

template <typename Do>
void in_parts(size_t size, Do one) {
  for (size_t done = 0; done < size; done += kPart) one(done, std::min(size - done, kPart));
}

// Pieces of all groups, in parts.
struct Parts {
  struct Part {
    uintptr_t at;
    size_t size;
    bool chosen;
  };
  std::vector<Part> all;
  std::vector<size_t> ends;  // of groups
  size_t bytes = 0;

  template <typename Chosen>
  Parts(const std::vector<Pieces>& groups, Chosen chosen) {
    for (size_t group = 0; group < groups.size(); ++group) {
      for (size_t n = 0; n < groups[group].size(); ++n) {
        const auto [begin, size] = groups[group][n];
        const bool yes = chosen(group, n);
        in_parts(size, [&, begin = begin](size_t at, size_t count) {
          all.push_back({begin + at, count, yes});
        });
        bytes += size;
      }
      ends.push_back(all.size());
    }
  }

  std::vector<Fingerprint> joined(const std::vector<Fingerprint>& found) const {
    std::vector<Fingerprint> result;
    auto begin = found.begin();
    for (const size_t end : ends) {
      result.push_back(keepstep::joined({begin, found.begin() + end}));
      begin = found.begin() + end;
    }
    return result;
  }
};

}  // namespace

void stay_behind(const char* name) {
  pthread_setname_np(pthread_self(), name);
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);  // if not: it is as good, only slower
}

uint64_t Copier::copy(Copies pieces) {
  return put([pieces = std::move(pieces)] {
    std::vector<Fingerprint> found;
    for (const auto& [from, size, to] : pieces) {
      in_parts(size, [&, from = from, to = to](size_t at, size_t count) {
        found.push_back(keepstep::copy(from + at, count, to + at));
      });
    }
    return joined(found);
  });
}

std::vector<Fingerprint> Copier::look(const std::vector<Pieces>& groups) {
  const Parts parts(groups, [](size_t, size_t) { return false; });
  std::vector<Fingerprint> found(parts.all.size());
  share(parts.bytes, parts.all.size(), [&](size_t n) {
    found[n] = keepstep::look(parts.all[n].at, parts.all[n].size);
  });
  return parts.joined(found);
}

std::pair<std::vector<Fingerprint>, std::vector<Fingerprint>> Copier::multiply(
    const std::vector<Pieces>& groups, const std::vector<std::vector<bool>>& chosen, float by) {
  const Parts parts(groups, [&](size_t group, size_t n) { return chosen.at(group).at(n); });
  std::vector<Fingerprint> before(parts.all.size()), after(parts.all.size());
  share(parts.bytes, parts.all.size(), [&](size_t n) {
    const auto& [at, size, yes] = parts.all[n];
    if (yes) {
      std::tie(before[n], after[n]) = keepstep::multiply(at, size, by);
    } else {
      before[n] = after[n] = keepstep::look(at, size);
    }
  });
  return {parts.joined(before), parts.joined(after)};
}

void Copier::share(size_t bytes, size_t parts, std::function<void(size_t)> one) {
  const auto work = std::make_shared<Together>(parts, std::move(one));
  if (bytes >= kHelped) {
    put([work] {
      work->help();
      return Fingerprint();
    });
  }
  for (size_t n = std::min(helpers_, bytes / kHelped); n > 0; --n) {
    try {
      std::thread([work] { work->help(); }).detach();
    } catch (...) {
      break;  // there are too many already, and nobody may leave before all is done
    }
  }
  work->finish();
}

uint64_t Copier::put(Job job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  told_something_.notify_one();
  return ++told_;
}

uint64_t Copier::last() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

bool Copier::done(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

bool Copier::ring_after(uint64_t number, std::shared_ptr<Bell> bell) {
  const std::lock_guard lock(mutex_);
  if (done_ >= number) return false;
  bells_.emplace_back(number, std::move(bell));
  return true;
}

void Copier::wait(uint64_t number) const {
  std::unique_lock lock(mutex_);
  done_something_.wait(lock, [&] { return done_ >= number; });
}

Fingerprint Copier::found(uint64_t number) const {
  std::unique_lock lock(mutex_);
  done_something_.wait(lock, [&] { return done_ >= number; });
  return found_.at(number);
}

void Copier::forget() {
  std::unique_lock lock(mutex_);
  done_something_.wait(lock, [&] { return done_ == told_; });
  found_.clear();
}

void Copier::close() {
  if (!ours()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    told_something_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Copier::run() {
  stay_behind("keepstep-copies");
  std::unique_lock lock(mutex_);
  for (;;) {
    told_something_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    const Fingerprint found = job();
    lock.lock();
    found_[++done_] = found;
    done_something_.notify_all();
    std::vector<std::shared_ptr<Bell>> due;
    std::erase_if(bells_, [&](auto& one) {
      if (one.first > done_) return false;
      due.push_back(std::move(one.second));
      return true;
    });
    lock.unlock();
    for (const auto& bell : due) {
      const std::lock_guard ready(bell->mutex);
      bell->turn.notify_all();
    }
    lock.lock();
  }
}

}  // namespace keepstep
