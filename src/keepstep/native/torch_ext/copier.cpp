#include "copier.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace keepstep {
namespace {

constexpr size_t kHelped = 2 << 20;  // bytes that are worth a thread

}  // namespace

void stay_behind(const char* name) {
  pthread_setname_np(pthread_self(), name);
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);  // if not: it is as good, only slower
}

uint64_t Copier::copy(Copies pieces) {
  return put([pieces = std::move(pieces)] { return std::vector{keepstep::copy(pieces)}; });
}

uint64_t Copier::multiply(std::vector<Pieces> groups, float by) {
  const auto work = std::make_shared<Fingerprints>(std::move(groups), by);
  return put([this, work] { return helped(work); });
}

std::vector<Fingerprint> Copier::look(std::vector<Pieces> groups) {
  const auto work = std::make_shared<Fingerprints>(std::move(groups));
  if (work->bytes() >= kHelped) {
    put([work] {
      work->help();
      return std::vector<Fingerprint>();
    });
  }
  return helped(work);
}

std::vector<Fingerprint> Copier::helped(const std::shared_ptr<Fingerprints>& work) const {
  for (size_t n = std::min(helpers_, work->bytes() / kHelped); n > 0; --n) {
    try {
      std::thread([work] { work->help(); }).detach();
    } catch (const std::system_error&) {
      break;  // there are too many already
    }
  }
  return work->take();
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

std::vector<Fingerprint> Copier::found(uint64_t number) const {
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
    auto found = job();
    lock.lock();
    found_[++done_] = std::move(found);
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
