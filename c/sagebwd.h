/*===- sagebwd.h - The operation for C --------------------------------------===
 *
 * INT8 attention, forward and backward, for C and for whatever calls C: the operation of
 * runtime/attention.h, which says what each member means. Nothing here synchronises or allocates
 * device memory. examples/attention.c is a complete program.
 *
 *===----------------------------------------------------------------------===*/
#ifndef SAGEBWD_H
#define SAGEBWD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of this header; sagebwd_version() is that of the library that was found. */
#define SAGEBWD_VERSION_MAJOR 0
#define SAGEBWD_VERSION_MINOR 1
#define SAGEBWD_VERSION_PATCH 0
#define SAGEBWD_VERSION_STRING "0.1.0"

/** The result of a call. Numbers keep their meaning; later versions may add more. */
typedef enum sagebwd_status {
  SAGEBWD_OK = 0,
  SAGEBWD_INVALID = 1,    /**< the arguments or the GPU are not supported; nothing was launched */
  SAGEBWD_NO_LIBRARY = 2, /**< no suitable CUDA driver or NVRTC */
  SAGEBWD_OFFLINE = 3,    /**< SAGEBWD_OFFLINE is set, and a kernel is not in the cache */
  SAGEBWD_COMPILE = 4,    /**< a kernel does not compile: please report it */
  SAGEBWD_DRIVER = 5,     /**< there is no such GPU, or a call of the CUDA driver failed */
  SAGEBWD_FAILED = 6      /**< anything else: a pack that cannot be used, memory running out */
} sagebwd_status;

/** The message of this thread's last call that was not SAGEBWD_OK: what was given, what is
 * supported, what to do. Empty before the first such call; valid until the next one. */
const char* sagebwd_last_error(void);

/** Such as "1.2.3". */
const char* sagebwd_version(void);

/** One operation on one device. Any number of threads may use it at the same time. */
typedef struct sagebwd_operation sagebwd_operation;

/** Makes an operation. `spec` is one line of text. A line with "numerics=", as messages and
 * Python's sagebwd.Spec print it, is exact: it holds all of its words in their order, and a switch
 * that it does not name, such as rotate, is off. A line without it names some options, such as
 * "d64 causal=top-left no-rotate", and everything that it leaves out has its default. */
sagebwd_status sagebwd_create(const char* spec, int device, sagebwd_operation** operation);
/** Destroys an operation; null is allowed. */
void sagebwd_destroy(sagebwd_operation* operation);
/** The complete line; null for null. It is valid as long as the operation exists. */
const char* sagebwd_spec(const sagebwd_operation* operation);
/** The usual softmax_scale, 1 / sqrt(head_dim); 0 for null. */
float sagebwd_usual_scale(const sagebwd_operation* operation);
/** Compiles or loads every kernel. Afterwards calls can be captured into a CUDA graph. */
sagebwd_status sagebwd_warmup(sagebwd_operation* operation, int backward);

/** Lengths in tokens. */
typedef struct sagebwd_problem {
  int64_t batch, heads, heads_kv, seq_q, seq_kv;
} sagebwd_problem;

/** Gives the bytes of device memory that the passes need; `forward` or `backward` may be null. */
sagebwd_status sagebwd_workspace_bytes(const sagebwd_operation* operation,
                                       const sagebwd_problem* problem, size_t* forward,
                                       size_t* backward);

/** A device tensor of (batch, head, token, channel), strides in elements; channels are contiguous.
 */
typedef struct sagebwd_tensor {
  void* data;
  int64_t stride_b, stride_h, stride_s;
} sagebwd_tensor;

/** For packed specs. For others it must be all zeros; else the status is SAGEBWD_INVALID. */
typedef struct sagebwd_packing {
  const int32_t *first_queries, *first_keys; /**< device memory, (sequences + 1) */
  const int32_t *lengths_q, *lengths_kv;     /**< device memory, (sequences), or null */
  int apart; /**< 0: one after the other; 1: sequences of a batch, padded to one length */
} sagebwd_packing;

typedef struct sagebwd_forward_args {
  size_t struct_size; /**< sizeof(sagebwd_forward_args): later versions append members */
  sagebwd_problem problem;
  sagebwd_tensor q, k, v, out;
  float* lse; /**< (batch, heads, query) contiguous */
  sagebwd_packing packing;
  int value_dim;       /**< channels of v and out; 0 means as many as q has */
  const float* k_mean; /**< (batch, heads_kv, channel): what smooth_k subtracts from the keys in
                          place of their mean, the same in both passes; null means their mean */
} sagebwd_forward_args;

typedef struct sagebwd_backward_args {
  size_t struct_size; /**< sizeof(sagebwd_backward_args) */
  sagebwd_problem problem;
  sagebwd_tensor q, k, v, out, dout;
  const float* lse;
  const float* dlse; /**< the gradient of lse, or null */
  sagebwd_tensor dq, dk, dv;
  sagebwd_packing packing;
  int value_dim;
  const float* k_mean; /**< as the forward's */
} sagebwd_backward_args;

/** `workspace` is device memory, aligned to 256 bytes; `stream` a CUstream. */
sagebwd_status sagebwd_forward(sagebwd_operation* operation, const sagebwd_forward_args* args,
                               float softmax_scale, void* workspace, size_t workspace_bytes,
                               void* stream);
sagebwd_status sagebwd_backward(sagebwd_operation* operation, const sagebwd_backward_args* args,
                                float softmax_scale, void* workspace, size_t workspace_bytes,
                                void* stream);

#ifdef __cplusplus
}
#endif

#endif
