// The tables that NCCL and RCCL look up: thin wrappers of one core. No exception leaves them.
#include <sys/types.h>

#include <climits>
#include <cstdlib>
#include <memory>

#include "abi.h"
#include "engine.h"

namespace keepstep::net {
namespace {

using namespace abi;

constexpr char kName[] = "Keepstep";
constexpr float kLatencyMicroseconds = 20;  // of a round through two kernels; NCCL tunes by it
constexpr int kCommsMax = 65536;
constexpr size_t kCollectiveBytesMax = 512ull << 20;

using Shared = std::shared_ptr<Comm>;

struct Listener {
  Shared comm;
  bool accepted = false;
};

// Memory may run out; NCCL is written in a C that knows no exceptions.
template <typename Function>
Result guarded(Function function) noexcept {
  try {
    return function();
  } catch (...) {
    return SystemError;
  }
}

Result init(Log log) {
  return guarded([&] {
    set_log(log);
    return Engine::get() ? Success : SystemError;
  });
}

Result devices(int* count) {
  *count = 1;  // all paths together; NCCL merges no further
  return Success;
}

char* pci_path() {
  static char* found = [] {
    std::string device = "/sys/class/net/" + Engine::get()->config().paths[0].interface + "/device";
    return realpath(device.c_str(), nullptr);
  }();
  return found;
}

template <typename Properties>
Result properties(int device, Properties* out) {
  Engine* engine = Engine::get();
  if (device != 0 || !engine) return InternalError;
  *out = {};
  static char name[] = "keepstep0";
  out->name = name;
  out->pci_path = pci_path();
  out->guid = 0x4B65657073746570ull;
  out->pointer_support = kPointerHost;
  out->speed = engine->speed_mbps();
  out->latency = kLatencyMicroseconds;
  out->comms_max = kCommsMax;
  out->receives_max = 1;
  return Success;
}

template <typename Properties>
Result get_properties(int device, Properties* out) {
  return guarded([&] { return properties(device, out); });
}

Result get_properties_v11(int device, PropertiesV11* out) {
  Result result = get_properties(device, out);
  if (result != Success) return result;
  out->virtual_count = 1;
  out->virtual_devices[0] = device;
  out->p2p_bytes_max = kMessageBytesMax;
  out->collective_bytes_max = kCollectiveBytesMax;
  out->multi_request_size_max = 1;
  return Success;
}

Result listen(int device, void* handle, void** listener) {
  return guarded([&] {
    *listener = nullptr;
    Engine* engine = Engine::get();
    if (device != 0 || !engine) return InternalError;
    auto comm = engine->listen(static_cast<uint8_t*>(handle));
    if (!comm) return SystemError;
    *listener = new Listener{comm};
    return Success;
  });
}

Result connect(int device, void* handle, void** result) {
  return guarded([&] {
    *result = nullptr;
    Engine* engine = Engine::get();
    if (device != 0 || !engine) return InternalError;
    auto comm = engine->connect(static_cast<uint8_t*>(handle));
    if (!comm) return InvalidUsage;
    Result error;
    if (comm->ready(&error)) {
      *result = new Shared(comm);
      return Success;
    }
    if (error) comm->close();
    return error;
  });
}

Result accept(void* listener, void** result) {
  return guarded([&] {
    *result = nullptr;
    auto* from = static_cast<Listener*>(listener);
    if (from->accepted) return InvalidUsage;
    Result error;
    if (from->comm->ready(&error)) {
      from->accepted = true;
      *result = new Shared(from->comm);
    }
    return *result ? Success : error;
  });
}

template <typename Size>
Result reg_mr(void*, void*, Size, int type, void** mr) {
  *mr = nullptr;
  return type == kPointerHost ? Success : InternalError;
}

Result dereg_mr(void*, void*) { return Success; }

Comm& comm_of(void* comm) { return **static_cast<Shared*>(comm); }

template <typename Size>
Result isend(void* comm, void* data, Size size, int, void*, void** request) {
  return guarded([&] {
    if constexpr (std::is_signed_v<Size>) {
      if (size < 0) return InvalidUsage;
    }
    return comm_of(comm).isend(data, static_cast<uint64_t>(size), request);
  });
}

template <typename Size>
Result irecv(void* comm, int n, void** data, Size* sizes, int*, void**, void** request) {
  return guarded([&] {
    *request = nullptr;
    if (n != 1) return InternalError;
    if constexpr (std::is_signed_v<Size>) {
      if (sizes[0] < 0) return InvalidUsage;
    }
    return comm_of(comm).irecv(data[0], static_cast<uint64_t>(sizes[0]), request);
  });
}

// Host memory needs no flush, and NCCL asks for none.
Result iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return InternalError;
}

Result test(void* request, int* done, int* size) {
  return guarded([&] {
    auto* it = static_cast<Request*>(request);
    return it->comm->test(it, done, size);
  });
}

Result close_comm(void* comm) {
  return guarded([&] {
    std::unique_ptr<Shared> owned(static_cast<Shared*>(comm));
    if (owned) (*owned)->close();
    return Success;
  });
}

Result close_listen(void* listener) {
  return guarded([&] {
    std::unique_ptr<Listener> owned(static_cast<Listener*>(listener));
    if (owned && !owned->accepted) owned->comm->close();
    return Success;
  });
}

// ------------------------------------------------------------------- what differs between versions

Result connect_v8(int device, void* handle, void** comm, void**) {
  return connect(device, handle, comm);
}

Result accept_v8(void* listener, void** comm, void**) { return accept(listener, comm); }

Result init_v11(void** context, uint64_t, void*, Log log, void*) {
  *context = nullptr;
  return init(log);
}

Result listen_v11(void*, int device, void* handle, void** listener) {
  return listen(device, handle, listener);
}

Result connect_v11(void*, int device, void* handle, void** comm, void**) {
  return connect(device, handle, comm);
}

Result isend_v11(void* comm, void* data, size_t size, int tag, void* mr, void*, void** request) {
  return isend<size_t>(comm, data, size, tag, mr, request);
}

Result irecv_v11(void* comm, int n, void** data, size_t* sizes, int* tags, void** mrs, void**,
                 void** request) {
  return irecv<size_t>(comm, n, data, sizes, tags, mrs, request);
}

Result finalize_v11(void*) { return Success; }

}  // namespace
}  // namespace keepstep::net

namespace ks = keepstep::net;
namespace abi = keepstep::net::abi;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const abi::TableV6 ncclNetPlugin_v6;
EXPORTED const abi::TableV8 ncclNetPlugin_v8;
EXPORTED const abi::TableV11 ncclNetPlugin_v11;

const abi::TableV6 ncclNetPlugin_v6 = {
    ks::kName,          ks::init,          ks::devices,        ks::get_properties<abi::PropertiesV6>,
    ks::listen,         ks::connect,       ks::accept,         ks::reg_mr<int>,
    nullptr,            ks::dereg_mr,      ks::isend<int>,     ks::irecv<int>,
    ks::iflush,         ks::test,          ks::close_comm,     ks::close_comm,
    ks::close_listen,
};

const abi::TableV8 ncclNetPlugin_v8 = {
    ks::kName,          ks::init,          ks::devices,        ks::get_properties<abi::PropertiesV8>,
    ks::listen,         ks::connect_v8,    ks::accept_v8,      ks::reg_mr<size_t>,
    nullptr,            ks::dereg_mr,      ks::isend<int>,     ks::irecv<int>,
    ks::iflush,         ks::test,          ks::close_comm,     ks::close_comm,
    ks::close_listen,   nullptr,           nullptr,
};

const abi::TableV11 ncclNetPlugin_v11 = {
    ks::kName,          ks::init_v11,      ks::devices,        ks::get_properties_v11,
    ks::listen_v11,     ks::connect_v11,   ks::accept_v8,      ks::reg_mr<size_t>,
    nullptr,            ks::dereg_mr,      ks::isend_v11,      ks::irecv_v11,
    ks::iflush,         ks::test,          ks::close_comm,     ks::close_comm,
    ks::close_listen,   nullptr,           nullptr,            nullptr,
    ks::finalize_v11,   nullptr,
};
