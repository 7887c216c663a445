// As much of libcuda and libcudart as Keepstep asks for, in host memory. Not thread-safe.
// FAKE_CUDA_FAIL="cuCheckpointProcessCheckpoint=999,cuMemCreate=2" makes calls fail; what the file
// FAKE_CUDA_FAIL_ONCE says makes one call fail, and is gone then. The file FAKE_CUDA_STATE has the
// state that all processes see. A process in which fake_thread() was called takes memory of its own
// for a snapshot, by a thread of the driver's, and looks at it when it is restored.
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;

int fake_state;  // of every process
int fake_version = 13000;
unsigned fake_timeout_ms, fake_pair_count;
unsigned char fake_pairs[8][32];
u64 fake_mapped;  // bytes of physical memory in use

static int fails(const char* call) {
  const char* wanted = getenv("FAKE_CUDA_FAIL");
  const char* at = wanted ? strstr(wanted, call) : NULL;
  if (at) return atoi(at + strlen(call) + 1);
  const char* path = getenv("FAKE_CUDA_FAIL_ONCE");
  FILE* file = path ? fopen(path, "r") : NULL;
  char text[100] = "";
  if (!file) return 0;
  if (!fgets(text, sizeof text, file)) text[0] = 0;
  fclose(file);
  if (!(at = strstr(text, call))) return 0;
  remove(path);
  return atoi(at + strlen(call) + 1);
}

static int* state(int put) {
  const char* path = getenv("FAKE_CUDA_STATE");
  FILE* file = path ? fopen(path, put ? "w" : "r") : NULL;
  if (file) {
    if (put) fprintf(file, "%d", fake_state);
    else if (fscanf(file, "%d", &fake_state) != 1) fake_state = 0;
    fclose(file);
  }
  return &fake_state;
}
#define CALL(name)                       \
  do {                                   \
    int code = fails(name);              \
    if (code) return code;               \
  } while (0)

int cuInit(unsigned flags) { (void)flags; CALL("cuInit"); return 0; }
int cuDriverGetVersion(int* version) { *version = fake_version; return 0; }
int cuGetErrorName(int code, const char** name) {
  *name = code == 401 ? "CUDA_ERROR_ILLEGAL_STATE" : code == 600 ? "CUDA_ERROR_NOT_READY" : NULL;
  return 0;
}
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int room, int device) {
  snprintf(name, room, "Fake %d", device);
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  memset(uuid, 0x10 + device, 16);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (device + 1ULL) << 30; return 0; }

// ------------------------------------------------------------------------------------- snapshots

static int go(const char* call, int from, int to) {
  CALL(call);
  if (*state(0) != from) return 401;
  fake_state = to;
  state(1);
  return 0;
}
int cuCheckpointProcessGetState(int pid, int* found) {
  (void)pid;
  *found = *state(0);
  return 0;
}

// Words between the driver here and its thread in a process: files in the process's nest.
#define NEST "/run/keepstep-nest"
#define AREA (24 << 20)
int fake_areas;  // that were found as they had been left

static void place(char* path, int pid, const char* name) {
  if (pid) snprintf(path, 200, "/proc/%d/root" NEST "/fake-%s", pid, name);
  else snprintf(path, 200, NEST "/fake-%s", name);
}
static void say(int pid, const char* name, int number) {
  char made[200], path[200];
  place(made, pid, "making");
  place(path, pid, name);
  FILE* file = fopen(made, "w");
  if (!file) return;
  fprintf(file, "%d", number);
  fclose(file);
  rename(made, path);
}
static int heard(int pid, const char* name, int looks) {
  char path[200];
  int number = -1;
  FILE* file = NULL;
  place(path, pid, name);
  for (; looks && !(file = fopen(path, "r")); looks -= looks > 0) usleep(1000);
  if (!file) return -1;
  if (fscanf(file, "%d", &number) != 1) number = -1;
  fclose(file);
  remove(path);
  return number;
}
// The driver's thread in a process, or 0.
static int thread_in(int pid) {
  char path[300], name[20] = "";
  int found = 0;
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR* tasks = opendir(path);
  for (struct dirent* one; tasks && !found && (one = readdir(tasks));) {
    snprintf(path, sizeof path, "/proc/%d/task/%s/comm", pid, one->d_name);
    FILE* file = fopen(path, "r");
    if (file && fgets(name, sizeof name, file) && !strcmp(name, "fake-driver\n"))
      found = atoi(one->d_name);
    if (file) fclose(file);
  }
  if (tasks) closedir(tasks);
  return found;
}
static void* live(void* unused) {
  (void)unused;
  pthread_setname_np(pthread_self(), "fake-driver");
  for (;;) {
    heard(0, "take", -1);
    // Numbers, zeros that are worth leaving out, numbers with a few zeros.
    unsigned* area = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const unsigned count = AREA / sizeof *area;
    for (unsigned i = 0; i < count; ++i)
      area[i] = i < count / 3 || (i > 2 * count / 3 && i / 1024 % 7) ? i * 2654435761u : 0;
    say(0, "taken", 1);
    heard(0, "give", -1);
    int right = 1;
    for (unsigned i = 0; i < count; ++i)
      right &= area[i] == (i < count / 3 || (i > 2 * count / 3 && i / 1024 % 7) ? i * 2654435761u : 0);
    munmap(area, AREA);
    fake_areas += right;
    say(0, "given", right);
  }
  return NULL;
}
void fake_thread(void) {
  pthread_t thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_create(&thread, NULL, live, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int* thread) {
  *thread = thread_in(pid);
  if (!*thread) *thread = pid + 1;
  return 0;
}
int cuCheckpointProcessLock(int pid, unsigned* args) {
  (void)pid;
  fake_timeout_ms = args ? args[0] : 0;
  return go("cuCheckpointProcessLock", 0, 1);
}
int cuCheckpointProcessCheckpoint(int pid, void* args) {
  (void)pid, (void)args;
  if (fails("hang")) for (;;);
  int code = go("cuCheckpointProcessCheckpoint", 1, 2);
  if (code || !thread_in(pid)) return code;
  say(pid, "take", 1);
  return heard(pid, "taken", 5000) == 1 ? 0 : 999;
}
int cuCheckpointProcessRestore(int pid, void* args) {
  struct { unsigned char (*pairs)[32]; unsigned count; }* given = args;
  fake_pair_count = given ? given->count : 0;
  if (given) memcpy(fake_pairs, given->pairs, 32 * given->count);
  int code = go("cuCheckpointProcessRestore", 2, 1);
  if (code || !thread_in(pid)) return code;
  say(pid, "give", 1);
  return heard(pid, "given", 5000) == 1 ? 0 : 999;
}
int cuCheckpointProcessUnlock(int pid, void* args) {
  (void)pid, (void)args;
  return go("cuCheckpointProcessUnlock", 1, 0);
}

// ---------------------------------------------------------------------------------------- memory

int cuMemGetAllocationGranularity(size_t* unit, const void* p, int f) {
  (void)p, (void)f;
  *unit = 2 << 20;
  return 0;
}
int cuMemAddressReserve(u64* at, size_t size, size_t align, u64 hint, u64 flags) {
  (void)align, (void)hint, (void)flags;
  CALL("cuMemAddressReserve");
  *at = (u64)mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return 0;
}
int cuMemAddressFree(u64 at, size_t size) { return munmap((void*)at, size); }
int cuMemCreate(u64* handle, size_t size, const void* p, u64 f) {
  (void)p, (void)f;
  CALL("cuMemCreate");
  fake_mapped += size;
  *handle = size;
  return 0;
}
int cuMemRelease(u64 handle) { fake_mapped -= handle; return 0; }
int cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
  (void)offset, (void)handle, (void)flags;
  void* done = mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return done == (void*)at ? 0 : 1;
}
int cuMemUnmap(u64 at, size_t size) { return cuMemMap(at, size, 0, 0, 0); }  // what was there is lost
int cuMemSetAccess(u64 at, size_t size, const void* a, size_t n) {
  (void)a, (void)n;
  return mprotect((void*)at, size, PROT_READ | PROT_WRITE);
}
int cuCtxGetCurrent(void** context) { *context = &fake_state; return 0; }
int cuCtxSetCurrent(void* context) { (void)context; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAllocHost_v2(void** at, size_t size) { *at = malloc(size); return 0; }
int cuMemFreeHost(void* at) { free(at); return 0; }
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t size, void* stream) {
  (void)stream;
  CALL("cuMemcpyDtoHAsync");
  memcpy(to, (void*)from, size);
  return 0;
}
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t size, void* stream) {
  (void)stream;
  memcpy((void*)to, from, size);
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) { (void)flags; *stream = &fake_state; return 0; }
int cuStreamSynchronize(void* stream) { (void)stream; return 0; }
int cuStreamDestroy_v2(void* stream) { (void)stream; return 0; }

// --------------------------------------------------------------------------------------- runtime

int cudaMalloc(void** at, size_t size) { *at = malloc(size); return 0; }
int cudaFree(void* at) { free(at); return 0; }
int cudaMallocManaged(void** at, size_t size, unsigned flags) {
  (void)flags;
  *at = malloc(size);
  return 0;
}
int cudaIpcGetMemHandle(void* handle, void* at) { (void)handle, (void)at; return 0; }
