#include "copier.h"

#include <pthread.h>

#include <utility>

namespace keepstep {

uint64_t Copier::copy(Copies pieces) {
  return put([pieces = std::move(pieces)] { return std::vector{keepstep::copy(pieces)}; });
}

uint64_t Copier::multiply(std::vector<Pieces> groups, float by) {
  return put([this, by, groups = std::move(groups)] {
    return fingerprints_multiplied(groups, by, helpers_);
  });
}

uint64_t Copier::put(Job job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  turn_.notify_all();
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

void Copier::wait(uint64_t number) const {
  std::unique_lock lock(mutex_);
  turn_.wait(lock, [&] { return done_ >= number; });
}

std::vector<Fingerprint> Copier::found(uint64_t number) const {
  std::unique_lock lock(mutex_);
  turn_.wait(lock, [&] { return done_ >= number; });
  return found_.at(number);
}

void Copier::forget() {
  std::unique_lock lock(mutex_);
  turn_.wait(lock, [&] { return done_ == told_; });
  found_.clear();
}

void Copier::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    turn_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Copier::run() {
  pthread_setname_np(pthread_self(), "keepstep-copies");
  std::unique_lock lock(mutex_);
  for (;;) {
    turn_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    auto found = job();
    lock.lock();
    found_[++done_] = std::move(found);
    turn_.notify_all();
  }
}

}  // namespace keepstep
