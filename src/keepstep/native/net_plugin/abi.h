// The network plugin interface of NCCL and RCCL, written down from its documented layout: only what
// a plugin for host memory needs. Versions 6, 8 and 11 cover NCCL 2.17 to 2.30 and RCCL since
// ROCm 5.7: a library takes the newest table that it knows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keepstep::net::abi {

enum Result : int {
  Success = 0,
  SystemError = 2,
  InternalError = 3,
  InvalidUsage = 5,
  RemoteError = 6,
};

enum LogLevel : int { LogWarn = 2, LogInfo = 3 };
constexpr unsigned long kLogInit = 0x1, kLogNet = 0x10;
using Log = void (*)(int level, unsigned long flags, const char* file, int line, const char* format,
                     ...);

constexpr int kPointerHost = 1;

struct PropertiesV6 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int speed;
  int port;
  float latency;
  int comms_max;
  int receives_max;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int speed;
  int port;
  float latency;
  int comms_max;
  int receives_max;
  int device_type;
  int device_version;
};

struct PropertiesV11 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int comms_max;
  int receives_max;
  int device_type;
  int device_version;
  int virtual_count;
  int virtual_devices[4];
  size_t p2p_bytes_max;
  size_t collective_bytes_max;
  int multi_request_size_max;
};

struct TableV6 {
  const char* name;
  Result (*init)(Log);
  Result (*devices)(int*);
  Result (*get_properties)(int, PropertiesV6*);
  Result (*listen)(int, void* handle, void** listener);
  Result (*connect)(int, void* handle, void** comm);
  Result (*accept)(void* listener, void** comm);
  Result (*reg_mr)(void* comm, void* data, int size, int type, void** mr);
  void* reg_mr_dma_buf;
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, int size, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int n, void** data, int* sizes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int n, void** data, int* sizes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void*);
  Result (*close_recv)(void*);
  Result (*close_listen)(void*);
};

struct TableV8 {
  const char* name;
  Result (*init)(Log);
  Result (*devices)(int*);
  Result (*get_properties)(int, PropertiesV8*);
  Result (*listen)(int, void* handle, void** listener);
  Result (*connect)(int, void* handle, void** comm, void** device_comm);
  Result (*accept)(void* listener, void** comm, void** device_comm);
  Result (*reg_mr)(void* comm, void* data, size_t size, int type, void** mr);
  void* reg_mr_dma_buf;
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, int size, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int n, void** data, int* sizes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int n, void** data, int* sizes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void*);
  Result (*close_recv)(void*);
  Result (*close_listen)(void*);
  void* get_device_mr;
  void* irecv_consumed;
};

struct TableV11 {
  const char* name;
  Result (*init)(void** context, uint64_t comm_id, void* config, Log, void* profiler);
  Result (*devices)(int*);
  Result (*get_properties)(int, PropertiesV11*);
  Result (*listen)(void* context, int, void* handle, void** listener);
  Result (*connect)(void* context, int, void* handle, void** comm, void** device_comm);
  Result (*accept)(void* listener, void** comm, void** device_comm);
  Result (*reg_mr)(void* comm, void* data, size_t size, int type, void** mr);
  void* reg_mr_dma_buf;
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, size_t size, int tag, void* mr, void* profile,
                  void** request);
  Result (*irecv)(void* comm, int n, void** data, size_t* sizes, int* tags, void** mrs,
                  void** profiles, void** request);
  Result (*iflush)(void* comm, int n, void** data, int* sizes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void*);
  Result (*close_recv)(void*);
  Result (*close_listen)(void*);
  void* get_device_mr;
  void* irecv_consumed;
  void* make_virtual_device;
  Result (*finalize)(void* context);
  void* set_net_attributes;
};

}  // namespace keepstep::net::abi
