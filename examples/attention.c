/*===- attention.c - Trainable INT8 attention from C -------------------------===
 *
 * Forward and backward on the GPU; O and dV are checked against sums in double on the CPU. C99. Of
 * the CUDA driver it looks up what it needs at run time, as the library does.
 *
 *   cc attention.c $(pkg-config --cflags --libs sagebwd) -ldl -lm \
 *     -Wl,-rpath,$(pkg-config --variable=libdir sagebwd)
 *
 *===----------------------------------------------------------------------===*/
#include <sagebwd.h>

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, TOKENS = 100, DIM = 64, COUNT = HEADS * TOKENS * DIM, ROWS = HEADS * TOKENS };

static const char* const SPEC = "d64 causal=top-left"; /* other options have their defaults */

static void fail(const char* what, const char* why) {
  fprintf(stderr, "attention_c_example: %s: %s\n", what, why);
  exit(1);
}

static void check(const char* what, sagebwd_status status) {
  if (status != SAGEBWD_OK)
    fail(what, sagebwd_last_error());
}

/*--- memory -----------------------------------------------------------------*/

typedef unsigned long long device_pointer;

static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(void**, int);
static int (*cuCtxPushCurrent)(void*);
static int (*cuCtxSynchronize)(void);
static int (*cuMemAlloc)(device_pointer*, size_t);
static int (*cuMemFree)(device_pointer);
static int (*cuMemcpyHtoD)(device_pointer, const void*, size_t);
static int (*cuMemcpyDtoH)(void*, device_pointer, size_t);

static void look_up(void* library, const char* symbol, void* function) {
  void* found = dlsym(library, symbol);
  if (!found)
    fail(symbol, "the CUDA driver does not have it");
  memcpy(function, &found, sizeof(found));
}

static void cuda(const char* what, int result) {
  if (result != 0) {
    char text[32];
    snprintf(text, sizeof(text), "CUDA error %d", result);
    fail(what, text);
  }
}

/* The library has found a driver before this is called. */
static void open_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library)
    fail("libcuda.so.1", dlerror());
  look_up(library, "cuInit", &cuInit);
  look_up(library, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
  look_up(library, "cuCtxPushCurrent_v2", &cuCtxPushCurrent);
  look_up(library, "cuCtxSynchronize", &cuCtxSynchronize);
  look_up(library, "cuMemAlloc_v2", &cuMemAlloc);
  look_up(library, "cuMemFree_v2", &cuMemFree);
  look_up(library, "cuMemcpyHtoD_v2", &cuMemcpyHtoD);
  look_up(library, "cuMemcpyDtoH_v2", &cuMemcpyDtoH);
  void* context;
  cuda("cuInit", cuInit(0));
  cuda("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, 0));
  cuda("cuCtxPushCurrent", cuCtxPushCurrent(context));
}

static void* allocate(size_t bytes) {
  device_pointer pointer;
  cuda("cuMemAlloc", cuMemAlloc(&pointer, bytes));
  return (void*)(uintptr_t)pointer;
}

/* A contiguous (1, HEADS, TOKENS, DIM) tensor; of numbers that bf16 has, or not yet written. */
static sagebwd_tensor tensor(const float* values) {
  static uint16_t bits[COUNT];
  sagebwd_tensor result = {allocate(sizeof(bits)), COUNT, TOKENS * DIM, DIM};
  if (values) {
    for (int i = 0; i < COUNT; ++i) {
      uint32_t word;
      memcpy(&word, &values[i], sizeof(word));
      bits[i] = (uint16_t)(word >> 16);
    }
    cuda("cuMemcpyHtoD", cuMemcpyHtoD((uintptr_t)result.data, bits, sizeof(bits)));
  }
  return result;
}

/* Relative L2 distance of a tensor to what it should be. */
static double error_of(sagebwd_tensor tensor, const double* expected) {
  static uint16_t bits[COUNT];
  double distance = 0, norm = 0;
  cuda("cuMemcpyDtoH", cuMemcpyDtoH(bits, (uintptr_t)tensor.data, sizeof(bits)));
  for (int i = 0; i < COUNT; ++i) {
    uint32_t word = (uint32_t)bits[i] << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    distance += (value - expected[i]) * (value - expected[i]);
    norm += expected[i] * expected[i];
  }
  return sqrt(distance / norm);
}

/*--- what should come out ---------------------------------------------------*/

/* Multiples of 1/32 below 2 in magnitude, about evenly spread. */
static void draw(float* values, uint32_t seed) {
  for (int i = 0; i < COUNT; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)((int)(seed >> 25) - 64) / 32;
  }
}

static void reference(const float* q, const float* k, const float* v, const float* dout,
                      double scale, double* out, double* dv) {
  for (int row = 0; row < ROWS; ++row) {
    const int query = row % TOKENS, first = row - query; /* the head's first row */
    double p[TOKENS], sum = 0;
    for (int key = 0; key <= query; ++key) { /* causal */
      double score = 0;
      for (int d = 0; d < DIM; ++d)
        score += (double)q[row * DIM + d] * k[(first + key) * DIM + d];
      sum += p[key] = exp(scale * score);
    }
    for (int key = 0; key <= query; ++key)
      for (int d = 0; d < DIM; ++d) {
        out[row * DIM + d] += p[key] / sum * v[(first + key) * DIM + d];
        dv[(first + key) * DIM + d] += p[key] / sum * dout[row * DIM + d];
      }
  }
}

int main(void) {
  static float q[COUNT], k[COUNT], v[COUNT], dout[COUNT];
  static double out[COUNT], dv[COUNT];
  draw(q, 1), draw(k, 2), draw(v, 3), draw(dout, 4);
  const float scale = 1 / sqrtf(DIM);
  reference(q, k, v, dout, scale, out, dv);

  sagebwd_operation* operation;
  check("sagebwd_create", sagebwd_create(SPEC, /*device=*/0, &operation));
  printf("sagebwd %s: %s\n", sagebwd_version(), sagebwd_spec(operation));
  open_driver();

  sagebwd_forward_args forward = {.struct_size = sizeof(forward),
                                  .problem = {1, HEADS, HEADS, TOKENS, TOKENS},
                                  .q = tensor(q),
                                  .k = tensor(k),
                                  .v = tensor(v),
                                  .out = tensor(NULL),
                                  .lse = allocate(ROWS * sizeof(float))};
  sagebwd_backward_args backward = {.struct_size = sizeof(backward),
                                    .problem = forward.problem,
                                    .q = forward.q,
                                    .k = forward.k,
                                    .v = forward.v,
                                    .out = forward.out,
                                    .dout = tensor(dout),
                                    .lse = forward.lse,
                                    .dq = tensor(NULL),
                                    .dk = tensor(NULL),
                                    .dv = tensor(NULL)};

  /* The library allocates nothing: it says how much it needs. Both passes may share it. */
  size_t bytes, backward_bytes;
  check("sagebwd_workspace_bytes",
        sagebwd_workspace_bytes(operation, &forward.problem, &bytes, &backward_bytes));
  if (bytes < backward_bytes)
    bytes = backward_bytes;
  void* workspace = allocate(bytes);
  void* stream = NULL; /* the default one */
  check("sagebwd_forward", sagebwd_forward(operation, &forward, scale, workspace, bytes, stream));
  check("sagebwd_backward",
        sagebwd_backward(operation, &backward, scale, workspace, bytes, stream));
  cuda("cuCtxSynchronize", cuCtxSynchronize());

  const double error_of_out = error_of(forward.out, out), error_of_dv = error_of(backward.dv, dv);
  printf("relative L2 error: O %.4f, dV %.4f\n", error_of_out, error_of_dv);

  void* const memory[] = {forward.q.data,   forward.k.data,     forward.v.data,   forward.out.data,
                          forward.lse,      backward.dout.data, backward.dq.data, backward.dk.data,
                          backward.dv.data, workspace};
  for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); ++i)
    cuda("cuMemFree", cuMemFree((uintptr_t)memory[i]));
  sagebwd_destroy(operation);
  return error_of_out < 0.05 && error_of_dv < 0.05 ? 0 : 1;
}
