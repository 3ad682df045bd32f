/*===- fake_libcuda.c - A driver that only writes down what it is asked ----===*
 *
 * Compiled to a libcuda.so.1 by driver_fake_test.cpp. Its answers come from the environment:
 * FAKE_INIT and FAKE_LOAD (what cuInit and cuModuleLoadData return), FAKE_DEVICES, FAKE_FAILS (a
 * function that fails), FAKE_NAME, FAKE_MAJOR, FAKE_MINOR and FAKE_SMS (of its GPUs), FAKE_FIRST
 * (how many of them a process does not see, when it begins), FAKE_CAPTURING (any stream is being
 * captured), FAKE_NULL_STREAM (what cuStreamIsCapturing returns of it). FAKE_QUIET=1: nothing is
 * written down. -DOLD leaves out cuGetProcAddress.
 *
 * FAKE_KERNELS says what kernels do, by a part of their names: "s2_b2=0.5 w8=fault w4_s2=hang
 * b3=wrong" lets the first take 0.5 ms, and the others raise 700, never end, or write other values.
 * Device memory reads as what the last kernel wrote: 1 in every byte.
 *
 * Each function is here in the version that the runtime declares. Where CUDA has an older one of
 * the same name, that is a trap: it answers 999.
 *
 *===----------------------------------------------------------------------===*/
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int answer(const char* name) {
  const char* fails = getenv("FAKE_FAILS");
  return fails && strcmp(fails, name) == 0 ? 700 : 0;
}
static int number(const char* variable, int otherwise) {
  const char* value = getenv(variable);
  return value ? atoi(value) : otherwise;
}
static int trap(void) { return 999; }
#define SAY(...) (getenv("FAKE_QUIET") ? 0 : (printf("cuda: " __VA_ARGS__), printf("\n")))

static char last_launch[512]; /* the kernel's name */
static int faulted = 0;
/* What the last launched kernel does, or NULL. */
static const char* behaviour(void) {
  static char value[32];
  const char* all = getenv("FAKE_KERNELS");
  for (char part[256]; all && sscanf(all, " %255[^=]=%31s", part, value) == 2;
       all = strchr(all, '='), all += strcspn(all, " "))
    if (strstr(last_launch, part))
      return value;
  return NULL;
}
static int wait_for_kernel(void) {
  const char* how = behaviour();
  while (how && strcmp(how, "hang") == 0)
    usleep(100000);
  faulted |= how && strcmp(how, "fault") == 0;
  return faulted ? 700 : 0;
}

static int first; /* of the devices that can be seen */
int cuInit(unsigned flags) {
  first = number("FAKE_FIRST", 0);
  return flags ? 1 : number("FAKE_INIT", 0);
}
int cuDriverGetVersion(int* version) { return *version = number("FAKE_VERSION", 12040), 0; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int error, const char** text) { return *text = "as the test asked", 0; }
int cuDeviceGetCount(int* count) { return *count = number("FAKE_DEVICES", 2), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = 10 + first + ordinal, 0; }
int cuDeviceGetName(char* name, int size, int device) {
  const char* given = getenv("FAKE_NAME");
  given ? snprintf(name, size, "%s", given) : snprintf(name, size, "Fake GPU %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const char* variable = attribute == 75   ? "FAKE_MAJOR"
                         : attribute == 76 ? "FAKE_MINOR"
                         : attribute == 16 ? "FAKE_SMS"
                                           : "FAKE_NOTHING";
  return *value = number(variable, attribute), 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  return memset(uuid, 0xa0, 16), uuid[15] = (unsigned char)device, 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = (size_t)5 << 32, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  SAY("retain %d", device);
  *context = (void*)(uintptr_t)(100 + device);
  return 0;
}
static int pushed; // the last context, which is 100 and its device
int cuCtxPushCurrent_v2(void* context) {
  return SAY("push %d", pushed = (int)(uintptr_t)context), 0;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  (void)type, (void)rank, (void)sizes, (void)strides, (void)box, (void)steps, (void)interleave;
  (void)swizzle, (void)promotion, (void)fill;
  return memcpy(map, &address, sizeof(address)), 0;
}
int cuCtxPopCurrent_v2(void** context) { return SAY("pop"), 0; }
int cuCtxSynchronize(void) {
  SAY("synchronize");
  int fault = wait_for_kernel();
  return fault ? fault : answer("cuCtxSynchronize");
}
int cuModuleLoadData(void** module, const void* image) {
  SAY("load %.5s", (const char*)image);
  *module = (void*)7;
  return number("FAKE_LOAD", 0);
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  SAY("function %s of %d", name, (int)(uintptr_t)module);
  *function = getenv("FAKE_KERNELS") ? strdup(name) : (void*)8;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return SAY("attribute %d = %d", attribute, value), 0;
}
struct attribute { /* CUlaunchAttribute */
  int id;
  _Alignas(8) int value[16];
};
struct config { /* CUlaunchConfig */
  unsigned grid[3], block[3], shared;
  void* stream;
  const struct attribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const struct config* c, void* function, void** params, void** extra) {
  SAY("launch %d grid %u %u %u block %u %u %u shared %u stream %d overlaps %d param %d extra %p",
      (int)(uintptr_t)function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
      c->block[2], c->shared, (int)(uintptr_t)c->stream,
      c->count == 1 && c->attributes->id == 6 /* PROGRAMMATIC_STREAM_SERIALIZATION */
          ? c->attributes->value[0]
          : 0,
      *(int*)params[0], (void*)extra);
  if (getenv("FAKE_KERNELS"))
    snprintf(last_launch, sizeof(last_launch), "%s", (const char*)function);
  return answer("cuLaunchKernelEx");
}
int cuStreamIsCapturing(void* stream, int* status) {
  *status = stream != NULL || getenv("FAKE_CAPTURING");
  return stream ? 0 : number("FAKE_NULL_STREAM", 0);
}
/* No two live at one address, and none is read or written. */
int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  static uint64_t next = 4096;
  *pointer = __atomic_fetch_add(&next, (bytes + 4095) / 4096 * 4096, __ATOMIC_RELAXED);
  return answer("cuMemAlloc");
}
int cuMemFree_v2(uint64_t pointer) { return SAY("free %d", (int)pointer), answer("cuMemFree_v2"); }
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) { return 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  const char* how = behaviour();
  memset(to, how && strcmp(how, "wrong") == 0 ? 2 : 1, bytes);
  return faulted ? 700 : 0;
}
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) { return 0; }
int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) { return 0; }
int cuEventCreate(void** event, unsigned flags) { return *event = (void*)9, 0; }
int cuEventDestroy_v2(void* event) { return answer("cuEventDestroy_v2"); }
int cuEventRecord(void* event, void* stream) { return 0; }
int cuEventSynchronize(void* event) { return SAY("wait"), wait_for_kernel(); }
int cuEventElapsedTime(float* ms, void* start, void* stop) {
  const char* how = behaviour();
  *ms = how && atof(how) > 0 ? (float)atof(how) : 1.5f;
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) { return *stream = (void*)(uintptr_t)flags, 0; }
int cuStreamDestroy_v2(void* stream) { return 0; }
int cuStreamSynchronize(void* stream) { return 0; }

/* The first versions, with 32-bit sizes and pointers or without a context stack. */
int cuDeviceGetUuid(void) { return trap(); }
int cuDeviceTotalMem(void) { return trap(); }
int cuCtxPushCurrent(void) { return trap(); }
int cuCtxPopCurrent(void) { return trap(); }
int cuMemAlloc(void) { return trap(); }
int cuMemFree(void) { return trap(); }
int cuMemcpyHtoD(void) { return trap(); }
int cuMemcpyDtoH(void) { return trap(); }
int cuMemsetD8(void) { return trap(); }
int cuEventDestroy(void) { return trap(); }
int cuStreamDestroy(void) { return trap(); }

#ifndef OLD
/* name, the version whose signature the runtime declares, the next version that changes it */
#define FUNCTIONS(X)                                                                               \
  X(cuInit, cuInit, 2000, 99999)                                                                   \
  X(cuDriverGetVersion, cuDriverGetVersion, 2020, 99999)                                           \
  X(cuGetErrorName, cuGetErrorName, 6000, 99999)                                                   \
  X(cuGetErrorString, cuGetErrorString, 6000, 99999)                                               \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000, 99999)                                               \
  X(cuDeviceGet, cuDeviceGet, 2000, 99999)                                                         \
  X(cuDeviceGetName, cuDeviceGetName, 2000, 99999)                                                 \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, 99999)                                       \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, 99999)                                             \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, 99999)                                            \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 99999)                               \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, 99999)                                            \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, 99999)                                              \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000, 13000)                                               \
  X(cuModuleLoadData, cuModuleLoadData, 2000, 99999)                                               \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000, 99999)                                         \
  X(cuFuncSetAttribute, cuFuncSetAttribute, 9000, 99999)                                           \
  X(cuLaunchKernelEx, cuLaunchKernelEx, 11060, 99999)                                              \
  X(cuTensorMapEncodeTiled, cuTensorMapEncodeTiled, 12000, 99999)                                  \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, 99999)                                        \
  X(cuMemAlloc, cuMemAlloc_v2, 3020, 99999)                                                        \
  X(cuMemFree, cuMemFree_v2, 3020, 99999)                                                          \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, 99999)                                                    \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, 99999)                                                    \
  X(cuMemsetD8, cuMemsetD8_v2, 3020, 99999)                                                        \
  X(cuMemsetD32Async, cuMemsetD32Async, 3020, 99999)                                               \
  X(cuEventCreate, cuEventCreate, 2000, 99999)                                                     \
  X(cuEventDestroy, cuEventDestroy_v2, 4000, 99999)                                                \
  X(cuEventRecord, cuEventRecord, 2000, 99999)                                                     \
  X(cuEventSynchronize, cuEventSynchronize, 2000, 99999)                                           \
  X(cuEventElapsedTime, cuEventElapsedTime, 2000, 12080)                                           \
  X(cuStreamCreate, cuStreamCreate, 2000, 99999)                                                   \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000, 99999)                                              \
  X(cuStreamSynchronize, cuStreamSynchronize, 2000, 99999)

int cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t flags,
                        int* status) {
  *address = NULL;
#define X(name, current, since, until)                                                             \
  if (strcmp(symbol, #name) == 0)                                                                  \
    *address = version >= since && version < until ? (void*)&current : (void*)&trap;
  FUNCTIONS(X)
#undef X
  if (flags != 1) /* the legacy null stream */
    *address = (void*)&trap;
  return *address ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
}
#endif
