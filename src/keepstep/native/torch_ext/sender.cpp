#include "sender.h"

#include <pthread.h>

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
    turn_.notify_all();
  }
  return last_;
}

void Sender::wait_read(uint64_t ticket) const {
  std::unique_lock lock(mutex_);
  turn_.wait(lock, [&] { return read_ >= ticket; });
}

uint64_t Sender::read() const {
  const std::lock_guard lock(mutex_);
  return read_;
}

void Sender::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    turn_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Sender::run() {
  pthread_setname_np(pthread_self(), "keepstep-vault");
  std::unique_lock lock(mutex_);
  for (;;) {
    turn_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (closed_) break;
    auto batch = next(lock);
    const uint64_t last = batch.back().ticket;
    lock.unlock();
    const bool sent = send(batch);
    lock.lock();
    if (!sent) {
      failed_ = true;
      break;
    }
    read_ = last;
    turn_.notify_all();
  }
  queue_.clear();
  read_ = last_;
  turn_.notify_all();
}

// What is there already: nobody waits for others' memory with what could be sent.
std::vector<Sender::Item> Sender::next(std::unique_lock<std::mutex>& lock) {
  std::vector<Item> batch;
  size_t size = 0;
  do {
    size += queue_.front().size;
    batch.push_back(std::move(queue_.front()));
    queue_.pop_front();
    if (const auto& first = batch.front(); batch.size() == 1 && first.copier) {
      lock.unlock();
      first.copier->wait(first.number);
      lock.lock();
    }
  } while (size < batch_bytes_ && !queue_.empty() &&
           (!queue_.front().copier || queue_.front().copier->done(queue_.front().number)));
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
