/*===- sagebwd.h - The operation for C --------------------------------------===
 *
 * This header declares INT8 attention, forward and backward, for C and for languages that call C.
 * It is the operation of runtime/attention.h, whose comments say more about each member. No
 * function synchronises or allocates device memory. Memory and streams belong to the device's
 * primary context (cuDevicePrimaryCtxRetain). examples/attention.c is a complete program.
 *
 * Names in shapes: B = batch, H = heads, Hk = heads_kv, M = seq_q, N = seq_kv, D = the channels of
 * q and k, Dv = the channels of v (value_dim). q, k, v, out and their gradients have 16-bit
 * elements of the spec's dtype (bf16 or fp16); lse, dlse, k_mean, alpha and dalpha are float. So
 * are a norm's gains and RoPE's angles.
 *
 *===----------------------------------------------------------------------===*/
#ifndef SAGEBWD_H
#define SAGEBWD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of this header; sagebwd_version() is the version of the linked library. */
#define SAGEBWD_VERSION_MAJOR 0
#define SAGEBWD_VERSION_MINOR 1
#define SAGEBWD_VERSION_PATCH 0
#define SAGEBWD_VERSION_STRING "0.1.0"

/** The result of a call. Numbers keep their meaning; later versions may add further ones. */
typedef enum sagebwd_status {
  SAGEBWD_OK = 0,
  SAGEBWD_INVALID = 1,    /**< the arguments or the GPU are not supported; nothing was launched */
  SAGEBWD_NO_LIBRARY = 2, /**< no suitable CUDA driver or NVRTC */
  SAGEBWD_OFFLINE = 3,    /**< SAGEBWD_OFFLINE is set, and a kernel is not in the cache */
  SAGEBWD_COMPILE = 4,    /**< a kernel does not compile: please report this */
  SAGEBWD_DRIVER = 5,     /**< there is no such GPU, or a call of the CUDA driver failed */
  /** Another error: a pack cannot be used, SAGEBWD_TUNE=frozen lacks a record, or memory is short
   */
  SAGEBWD_FAILED = 6
} sagebwd_status;

/** The message of this thread's last call that did not return SAGEBWD_OK. It says what was given,
 * what is supported and what to do. It is empty before the first such call, and valid until the
 * next such call. */
const char* sagebwd_last_error(void);

/** The version of the library, such as "1.2.3". */
const char* sagebwd_version(void);

/** Names a libnvrtc (CUDA's run-time compiler), for callers that know where their packages are,
 * such as Python's wheels. It serves if SAGEBWD_NVRTC names none and the process has loaded none;
 * other places come behind it. An empty name takes the suggestion back. */
sagebwd_status sagebwd_suggest_nvrtc(const char* file);

/** One operation on one device. Any number of threads may use it at the same time. */
typedef struct sagebwd_operation sagebwd_operation;

/** Makes an operation on the CUDA device number `device`. `spec` is one line of text. If the line
 * has "numerics=", as in messages and in Python's sagebwd.Spec, it must have all of its words in
 * their order, and switches that it does not name, such as rotate, are off. Otherwise the line
 * names some options, such as "d64 causal=top-left no-rotate", and the others have their defaults.
 * On an error *operation becomes null. */
sagebwd_status sagebwd_create(const char* spec, int device, sagebwd_operation** operation);
/** Destroys an operation; null is allowed. */
void sagebwd_destroy(sagebwd_operation* operation);
/** The operation's complete spec; null if `operation` is null. It is valid while the operation
 * exists. */
const char* sagebwd_spec(const sagebwd_operation* operation);
/** The usual softmax_scale, 1 / sqrt(head_dim); 0 if `operation` is null. */
float sagebwd_usual_scale(const sagebwd_operation* operation);

/** The sizes of a call; seq_q and seq_kv are in tokens. For packed specs, batch is the number of
 * sequences, and seq_q and seq_kv are the tokens of all sequences together. Structs without
 * struct_size, such as this, never get further members. */
typedef struct sagebwd_problem {
  int64_t batch, heads, heads_kv, seq_q, seq_kv;
} sagebwd_problem;

typedef struct sagebwd_warmup_args {
  size_t struct_size; /**< sizeof(sagebwd_warmup_args): later versions append members */
  /** Kernels have the tiles that calls of this size use, which tuning records may name; all zeros:
   * each kernel has its default tile. */
  sagebwd_problem problem;
  int backward; /**< 1: the kernels of both passes; 0: those of the forward */
} sagebwd_warmup_args;

/** Compiles or loads every kernel. Afterwards calls of this size can be captured into a CUDA graph.
 */
sagebwd_status sagebwd_warmup(sagebwd_operation* operation, const sagebwd_warmup_args* args);

/** Stores the bytes of workspace that the forward and the backward need in *forward and *backward;
 * each may be null. */
sagebwd_status sagebwd_workspace_bytes(const sagebwd_operation* operation,
                                       const sagebwd_problem* problem, size_t* forward,
                                       size_t* backward);
/** Stores the bytes of kept_sums for a call whose shares have keeps_sums. */
sagebwd_status sagebwd_kept_sums_bytes(const sagebwd_operation* operation,
                                       const sagebwd_problem* problem, size_t* bytes);

/** A device tensor of 16-bit elements, of shape (batch, head, token, channel). Strides are in
 * elements, multiples of 8 and not negative; those of a result are at least its number of channels.
 * Channels are contiguous; the address is a multiple of 16 bytes. */
typedef struct sagebwd_tensor {
  void* data;
  int64_t stride_b, stride_h, stride_s;
} sagebwd_tensor;

/** Where packed sequences lie. If the spec is not packed, all members must be zeros; otherwise the
 * status is SAGEBWD_INVALID. */
typedef struct sagebwd_packing {
  /** (sequences + 1) in device memory: the first token of each sequence, then the end of the last.
   */
  const int32_t *first_queries, *first_keys;
  /** (sequences) in device memory: the number of tokens that count; null: all tokens. */
  const int32_t *lengths_q, *lengths_kv;
  /** 0: one after the other; 1: sequences of a batch, padded to one length. lse is then (B, H,
   * M / B). */
  int apart;
} sagebwd_packing;

/** The lists of blocks of keys, for specs with sparse_q and sparse_kv. For all others all members
 * must be zeros; otherwise the status is SAGEBWD_INVALID. */
typedef struct sagebwd_lists {
  /** (B, H, lists, words) in device memory, where lists = ceil(M / sparse_q), blocks = ceil(N /
   * sparse_kv), and words = floor(blocks / 32) + 1. Bit b % 32 of word b / 32 lists block b of the
   * keys. sagebwd_pack_lists() writes them. */
  const uint32_t* row_bits;
  /** In words; 0: sequences, or heads, share the lists; otherwise at least the words of a head's
   * lists. */
  int64_t stride_b, stride_h;
} sagebwd_lists;

/** Which queries do not see a key, for specs with intervals=1, 2 or 4 (FlashMask, arXiv 2410.01359,
 * section 4). For all others all members must be zeros; otherwise the status is SAGEBWD_INVALID.
 * With a causal mask they are those from the number on (1 number a key), or from the first to
 * before the second (2); without a causal mask those from the first on and those before the second
 * (2), or from the first to before the second and from the third to before the fourth (4). A call's
 * lists are what sagebwd_pack_lists() makes of the same numbers. */
typedef struct sagebwd_intervals {
  /** (B, Hk, N, 1, 2 or 4) in device memory, aligned to a key's numbers, which lie together, and so
   * do a head's keys. */
  const int32_t* numbers;
  /** In int32, multiples of a key's numbers; 0: sequences, or key heads, share them. */
  int64_t stride_b, stride_h;
} sagebwd_intervals;

/** What the mask of a spec with mask= indexes: rows of int32 in device memory, one behind the
 * other. An operand of one index has one row. Indices outside are clamped into the range. Those
 * behind the last of the mask's operands must be zeros; otherwise the status is SAGEBWD_INVALID. A
 * call's lists are what sagebwd_pack_lists() makes of the same tables. */
typedef struct sagebwd_table {
  const int32_t* numbers;
  int64_t rows, columns;
} sagebwd_table;
/** The most tables of a call. */
#define SAGEBWD_TABLES 8

/** The share of exact attention in each query's output, for specs with linear=complement or
 * linear=all, which are SLA2's: out = alpha out_sparse + (1 - alpha) out_linear. For all others
 * alpha must be null and the strides 0; otherwise the status is SAGEBWD_INVALID. Kernels take alpha
 * as 0 for queries that list nothing and, with linear=complement, as 1 for queries that list every
 * block. */
typedef struct sagebwd_shares {
  /** (B, H, ceil(M / tokens)) in device memory. It is not checked to be from 0 to 1. */
  const float* alpha;
  /** In floats, and any may be 0: sequences, heads or queries then share a number. */
  int64_t stride_b, stride_h, stride_s;
  int tokens; /**< queries one behind the other that share a number, such as 1 or sparse_q */
  /** 0; or 1 if the numbers are not alpha but rest, the logarithm of what a query's other keys
   * weigh: alpha = sigmoid(lse - rest), whose gradient reaches q and k through lse too. The
   * backward then takes the forward's out as out, and dalpha is the gradient of rest. */
  int of_rest;
  /** 1: the forward writes the sums of linear attention to kept_sums, and the backward reads them
   * there instead of forming them again; 0: kept_sums is null. The same in both passes. */
  int keeps_sums;
} sagebwd_shares;

typedef struct sagebwd_forward_args {
  size_t struct_size; /**< sizeof(sagebwd_forward_args): later versions append members */
  sagebwd_problem problem;
  sagebwd_tensor q, k, v, out; /**< (B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M, Dv) */
  /** (B, H, M) contiguous, or (H, M) for packed sequences: the natural logarithm of the sum of
   * exp(scaled score) over the keys. */
  float* lse;
  sagebwd_packing packing;
  int value_dim; /**< Dv, the channels of v and out; 0 means D */
  /** (B, Hk, D) contiguous, also for packed sequences: the vector that smooth_k subtracts from the
   * keys in place of their mean, the same in both passes; null means their mean. */
  const float* k_mean;
  sagebwd_lists lists;
  /** With linear attention lse is of listed keys, and k_mean must be null. */
  sagebwd_shares shares;
  /** Like out, with linear attention only: it gets the output of attention to listed blocks, which
   * the backward reads. */
  sagebwd_tensor sparse_out;
  /** With shares.keeps_sums: device memory, aligned to 16 bytes, with sagebwd_kept_sums_bytes(). */
  void* kept_sums;
  sagebwd_intervals intervals;
  sagebwd_table tables[SAGEBWD_TABLES]; /**< in the order in which the mask names them first */
  /** (H) floats, for specs with max_logits only: the largest score of each query head over all
   * sequences, as the softmax has it or up to two steps of its INT32 sum larger; -inf if no query
   * of the head sees a key, and NaN if lse of one of its queries is NaN. */
  float* max_logits;
} sagebwd_forward_args;

typedef struct sagebwd_backward_args {
  size_t struct_size; /**< sizeof(sagebwd_backward_args) */
  sagebwd_problem problem;
  /** As in the forward; with linear attention out is the forward's sparse_out, not its out, unless
   * shares.of_rest is 1. dout is the gradient of the forward's out, and has its shape. */
  sagebwd_tensor q, k, v, out, dout;
  const float* lse;          /**< the forward's result */
  const float* dlse;         /**< (B, H, M) contiguous: the gradient of lse; null means 0 */
  sagebwd_tensor dq, dk, dv; /**< results with the shapes of q, k and v */
  sagebwd_packing packing;
  int value_dim;
  const float* k_mean;   /**< the same as in the forward */
  sagebwd_lists lists;   /**< the same as in the forward */
  sagebwd_shares shares; /**< the same as in the forward */
  /** (B, H, M) contiguous, with linear attention only: the gradient of each query's alpha, 0 where
   * the kernels do not take it; null: not wanted. */
  float* dalpha;
  const void* kept_sums;                /**< with shares.keeps_sums: what the forward wrote */
  sagebwd_intervals intervals;          /**< the same as in the forward */
  sagebwd_table tables[SAGEBWD_TABLES]; /**< the same as in the forward */
} sagebwd_backward_args;

typedef struct sagebwd_pack_args {
  size_t struct_size; /**< sizeof(sagebwd_pack_args) */
  /** batch and heads may be 1 for lists that are shared; heads_kv is ignored without intervals */
  sagebwd_problem problem;
  /** (B, H, lists, blocks) bytes in device memory, not 0 where a block is listed; or null. */
  const void* mask;
  /** Without a mask: (B, H, lists, width) numbers of blocks, in any order. A list with a number of
   * no block is marked: out and lse of its queries are NaN. */
  const int32_t* indices;
  int width;             /**< 0 with a mask */
  const int32_t* counts; /**< (B, H, lists): how many indices of a list count; null: all */
  uint32_t* row_bits;    /**< the result, in memory that nothing else here has */
  /** In place of a mask and indices, for specs with intervals. The lists then have the heads of
   * `problem`, a multiple of heads_kv, that many of which the numbers have; words are twice as
   * many.
   */
  sagebwd_intervals intervals;
  /** In place of a mask and indices, for specs with mask=. batch and heads of `problem` are 1 where
   * the mask depends on neither b nor h. */
  sagebwd_table tables[SAGEBWD_TABLES];
} sagebwd_pack_args;

/** Writes lists as bits, on `stream`. */
sagebwd_status sagebwd_pack_lists(sagebwd_operation* operation, const sagebwd_pack_args* args,
                                  void* stream);

/** Launches a pass on `stream`, a CUstream. `workspace` is device memory, aligned to 256 bytes,
 * with at least the bytes of sagebwd_workspace_bytes(). `softmax_scale` multiplies the scores. If
 * no kernel supports the arguments, the status is SAGEBWD_INVALID, and nothing is launched. */
sagebwd_status sagebwd_forward(sagebwd_operation* operation, const sagebwd_forward_args* args,
                               float softmax_scale, void* workspace, size_t workspace_bytes,
                               void* stream);
sagebwd_status sagebwd_backward(sagebwd_operation* operation, const sagebwd_backward_args* args,
                                float softmax_scale, void* workspace, size_t workspace_bytes,
                                void* stream);

/*--- norm and RoPE of queries and keys --------------------------------------
 *
 * What a layer does between its projections and attention: RMSNorm of each head (QK-norm) and
 * RoPE, of q and k in one launch, computed in FP32 and rounded once. T = M for the queries, N for
 * the keys. The operation is one of any spec with the tensors' head_dim and dtype whose sequences
 * are not packed; packed sequences are one sequence to it, of a batch of 1. No workspace is needed.
 */

/** Cosines and sines in device memory, (B, T, R/2), channels side by side. Both null: no RoPE. */
typedef struct sagebwd_rope_table {
  const float *cos, *sin;
  /** In floats, multiples of 4 (interleaved: of 2), not negative; 0: sequences, or tokens, share
   * angles. */
  int64_t stride_b, stride_s;
} sagebwd_rope_table;

/** The queries, or the keys. All but tensors is contiguous, in device memory. */
typedef struct sagebwd_front_side {
  sagebwd_tensor x, y; /**< (B, H, M, D), or (B, Hk, N, D); y is written */
  int normed;          /**< 1: by the root of the mean square of a head's channels; 0: no norm */
  int gain_per_head;   /**< 1: each head has a gain of its own; otherwise 0 */
  const float* gain;   /**< (D), or (H, D) for gains of heads; null: none */
  /** What takes the place of 1 / sqrt(mean square + norm_eps), (B, T), or (B, H, T) if of heads;
   * null: nothing does. */
  const float* inv_rms;
  int inv_rms_per_head; /**< 1: each head has a 1/rms of its own; otherwise 0 */
  sagebwd_rope_table rope;
} sagebwd_front_side;

typedef struct sagebwd_front_args {
  size_t struct_size; /**< sizeof(sagebwd_front_args): later versions append members */
  sagebwd_problem problem;
  sagebwd_front_side q, k;
  float norm_eps; /**< what is added to the mean square, such as 1e-6f; 0 is allowed */
  /** With a table: channels [rope_begin, rope_begin + rope_channels) are rotated. The first is a
   * multiple of 4, the second, R, of 8, or if interleaved of 4. */
  int rope_begin, rope_channels;
  int rope_interleaved; /**< 0: pairs are channels (i, i + R/2); 1: (2i, 2i + 1) */
} sagebwd_front_args;

/** Gradients of the queries, or of the keys. All but dx is contiguous. */
typedef struct sagebwd_front_gradients_side {
  sagebwd_tensor dx; /**< like x, and written */
  float* dgain;      /**< like the gain; null: not wanted */
  float* gain_parts; /**< memory of sagebwd_front_part_floats() for it; null without dgain */
  float* dinv_rms;   /**< (B, H, T), also if heads share 1/rms; null: not wanted */
} sagebwd_front_gradients_side;

typedef struct sagebwd_front_gradients_args {
  size_t struct_size; /**< sizeof(sagebwd_front_gradients_args) */
  /** What sagebwd_front() was given, but y is the gradient of y, and is read. */
  const sagebwd_front_args* of;
  sagebwd_front_gradients_side q, k;
} sagebwd_front_gradients_args;

/** Both launch on `stream`, a CUstream, and have the statuses of sagebwd_forward(). The gradients
 * have the same bits in every run. */
sagebwd_status sagebwd_front(sagebwd_operation* operation, const sagebwd_front_args* args,
                             void* stream);
sagebwd_status sagebwd_front_gradients(sagebwd_operation* operation,
                                       const sagebwd_front_gradients_args* args, void* stream);
/** Stores how many floats gain_parts has for the queries and for the keys in *q and *k; each may be
 * null. */
sagebwd_status sagebwd_front_part_floats(const sagebwd_operation* operation,
                                         const sagebwd_problem* problem, int64_t* q, int64_t* k);

/** A gate of outputs: gated = out * sigmoid(gate). Tensors are (B, H, M, D). */
typedef struct sagebwd_gate_args {
  size_t struct_size; /**< sizeof(sagebwd_gate_args) */
  sagebwd_problem problem;
  sagebwd_tensor out, gate, gated; /**< gated is written, and shares no memory with the others */
} sagebwd_gate_args;

typedef struct sagebwd_gate_gradients_args {
  size_t struct_size; /**< sizeof(sagebwd_gate_gradients_args) */
  /** What sagebwd_gate() was given, but gated is the gradient of gated, and is read. */
  const sagebwd_gate_args* of;
  sagebwd_tensor dout, dgate; /**< written: the gradients of out and of gate */
} sagebwd_gate_gradients_args;

/** Both are as sagebwd_front(). */
sagebwd_status sagebwd_gate(sagebwd_operation* operation, const sagebwd_gate_args* args,
                            void* stream);
sagebwd_status sagebwd_gate_gradients(sagebwd_operation* operation,
                                      const sagebwd_gate_gradients_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif
