// Ends the waiting of threads for messages of gloo.
//
// When a connection is lost, gloo's Pair tells all whose messages wait to be sent or received, but
// not those whose message is on its way: one that is half received, half sent, or that was put into
// the queue because the connection was closed already. They sleep until the timeout of the group,
// half an hour by default. Their buffer has a method that wakes them, and nobody knows the buffer.
//
// So the two methods that wait are replaced in the class's table of virtual methods by ones that note
// the buffer first. Nothing is known here about how gloo's objects look: methods and table are found
// by name among the symbols of libtorch_cpu, and the place in the table by the method's address.
#include "gloo_waits.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace keepstep {
namespace {

#define GLOO_BUFFER "N4gloo9transport3tcp13UnboundBuffer"
constexpr auto kTable = "_ZTV" GLOO_BUFFER "E";
constexpr auto kWaitRecv = "_Z" GLOO_BUFFER "8waitRecvEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE";
constexpr auto kWaitSend = "_Z" GLOO_BUFFER "8waitSendEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE";
constexpr auto kSignal = "_Z" GLOO_BUFFER "15signalExceptionENSt15__exception_ptr13exception_ptrE";
#undef GLOO_BUFFER

using Wait = bool (*)(void* buffer, int* rank, std::chrono::milliseconds timeout);
using Signal = void (*)(void* buffer, std::exception_ptr error);

Wait real_recv = nullptr;
Wait real_send = nullptr;
Signal real_signal = nullptr;

// Never destroyed: threads may wait while the process ends.
std::mutex& lock = *new std::mutex;  // a buffer that is noted does not go away while it is held
std::vector<void*>& waiting = *new std::vector<void*>;

class Noted {
 public:
  explicit Noted(void* buffer) : buffer_(buffer) {
    std::lock_guard<std::mutex> guard(lock);
    waiting.push_back(buffer_);
  }
  ~Noted() {
    std::lock_guard<std::mutex> guard(lock);
    waiting.erase(std::find(waiting.begin(), waiting.end(), buffer_));
  }
  Noted(const Noted&) = delete;
  Noted& operator=(const Noted&) = delete;

 private:
  void* buffer_;
};

bool wait_recv(void* buffer, int* rank, std::chrono::milliseconds timeout) {
  Noted noted(buffer);
  return real_recv(buffer, rank, timeout);
}

bool wait_send(void* buffer, int* rank, std::chrono::milliseconds timeout) {
  Noted noted(buffer);
  return real_send(buffer, rank, timeout);
}

// PROT_* of the page at an address, as the kernel says.
int protection(uintptr_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t dash = 0, space = 0;
    const auto begin = std::stoull(line, &dash, 16);
    const auto end = std::stoull(line.substr(dash + 1), &space, 16);
    if (begin <= address && address < end) {
      const auto flags = line.substr(dash + 1 + space + 1, 3);
      return (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) |
             (flags[2] == 'x' ? PROT_EXEC : 0);
    }
  }
  return 0;
}

bool put(void** slot, void* method) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(slot);
  auto* const start = reinterpret_cast<void*>(address & ~(page - 1));
  const int before = protection(address);
  if (before == 0 || mprotect(start, page, before | PROT_WRITE) != 0) {
    return false;
  }
  __atomic_store_n(slot, method, __ATOMIC_RELEASE);
  mprotect(start, page, before);
  return true;
}

void** find(void** begin, void** end, void* method) {
  auto* const found = method == nullptr ? end : std::find(begin, end, method);
  return found == end ? nullptr : found;
}

}  // namespace

bool note_waits() {
  if (real_signal != nullptr) {
    return true;
  }
  auto* const table = dlsym(RTLD_DEFAULT, kTable);
  auto* const recv = dlsym(RTLD_DEFAULT, kWaitRecv);
  auto* const send = dlsym(RTLD_DEFAULT, kWaitSend);
  auto* const signal = dlsym(RTLD_DEFAULT, kSignal);
  Dl_info info;
  ElfW(Sym)* symbol = nullptr;
  if (table == nullptr || signal == nullptr ||
      dladdr1(table, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) == 0 ||
      symbol == nullptr || info.dli_saddr != table) {
    return false;
  }
  auto** const begin = static_cast<void**>(table);
  auto** const end = begin + symbol->st_size / sizeof(void*);
  auto** const recv_slot = find(begin, end, recv);
  auto** const send_slot = find(begin, end, send);
  if (recv_slot == nullptr || send_slot == nullptr) {
    return false;
  }
  real_recv = reinterpret_cast<Wait>(recv);
  real_send = reinterpret_cast<Wait>(send);
  if (!put(recv_slot, reinterpret_cast<void*>(&wait_recv)) ||
      !put(send_slot, reinterpret_cast<void*>(&wait_send))) {
    return false;
  }
  real_signal = reinterpret_cast<Signal>(signal);
  return true;
}

size_t end_waits() {
  std::lock_guard<std::mutex> guard(lock);
  if (real_signal == nullptr) {
    return 0;
  }
  for (void* buffer : waiting) {
    real_signal(
        buffer, std::make_exception_ptr(std::runtime_error("Connection closed by Keepstep")));
  }
  return waiting.size();
}

}  // namespace keepstep
