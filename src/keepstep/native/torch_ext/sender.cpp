#include "sender.h"

#include <pthread.h>
#include <sched.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "digests.h"
#include "send.h"

namespace keepstep {
namespace {

constexpr size_t kStep = sizeof Sender::kMark + Sender::kDigest;

size_t digests_begin(const Sender::Item& item) {
  return item.header.size() - kStep * item.pieces.size();
}

bool has_room_for_digests(const Sender::Item& item) {
  if (item.header.size() < kStep * item.pieces.size()) return false;
  for (size_t at = digests_begin(item); at < item.header.size(); at += kStep) {
    if (std::memcmp(&item.header[at], Sender::kMark, sizeof Sender::kMark) != 0) return false;
  }
  return true;
}

}  // namespace

Sender::Sender(int socket, double silence_s, size_t batch_bytes, uint64_t last, Instead instead)
    : socket_(socket),
      silence_s_(silence_s),
      batch_bytes_(batch_bytes),
      instead_(std::move(instead)),
      last_(last),
      read_(last),
      thread_([this] { run(); }) {}

uint64_t Sender::put(Item item) {
  if (!has_room_for_digests(item)) throw std::invalid_argument("no room for digests");
  for (const auto& piece : item.pieces) item.size += piece.iov_len;
  const std::lock_guard lock(mutex_);
  item.ticket = ++last_;
  if (failed_ || closed_) {
    read_ = last_;
  } else {
    queue_.push_back(std::move(item));
    told_something_.notify_one();
  }
  return last_;
}

void Sender::wait_read(uint64_t ticket) const {
  std::unique_lock lock(mutex_);
  read_something_.wait(lock, [&] { return read_ >= ticket; });
}

uint64_t Sender::read() const {
  const std::lock_guard lock(mutex_);
  return read_;
}

void Sender::close() {
  if (!ours()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    told_something_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Sender::run() {
  pthread_setname_np(pthread_self(), "keepstep-vault");
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);  // if not: it is as good, only slower
  std::unique_lock lock(mutex_);
  for (;;) {
    told_something_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (closed_) break;
    auto batch = next();
    const uint64_t last = batch.back().ticket;
    lock.unlock();
    const bool sent = send(batch);
    batch.clear();
    lock.lock();
    if (!sent) {
      failed_ = true;
      break;
    }
    read_ = last;
    read_something_.notify_all();
  }
  queue_.clear();
  read_ = last_;
  read_something_.notify_all();
}

std::vector<Sender::Item> Sender::next() {
  std::vector<Item> batch;
  for (size_t size = 0; size < batch_bytes_ && !queue_.empty();) {
    size += queue_.front().size;
    batch.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  return batch;
}

bool Sender::send(std::vector<Item>& batch) {
  if (instead_) return instead_(batch);
  std::vector<iovec> said;
  for (auto& item : batch) {
    char* at = item.header.data() + digests_begin(item);
    for (const auto& digest : digests(item.pieces)) {
      std::memcpy(at + sizeof kMark, digest.data(), kDigest);
      at += kStep;
    }
    said.push_back({item.header.data(), item.header.size()});
    said.insert(said.end(), item.pieces.begin(), item.pieces.end());
  }
  error_ = send_all(socket_, std::move(said), silence_s_);
  return error_ == 0;
}

}  // namespace keepstep
