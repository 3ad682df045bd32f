//===- linear_branch.h - Kernels of linear attention beside lists ---------===//
//
// sagebwd.sparse_linear_attention (SLA2) adds linear attention to the blocks that lists leave out.
// These kernels have the pieces of that. An estimate of what the left out keys weigh has three of
// its own.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"

#include <vector>

namespace sagebwd {

/// One of linear_states, linear_sums, linear_out, linear_dout, linear_dsums, linear_dkv,
/// linear_mean, linear_dk, estimated_rest, estimated_dq and estimated_dk, whose templates say what
/// they compute. B sequences, H and Hk heads, M queries, N keys, D channels (64 or 128), and Tq and
/// Tk blocks of sparse_q queries and sparse_kv keys.
struct LinearCall {
  /// Device memory. Every address is a multiple of 16 bytes, those of numbers of queries (alpha,
  /// dalpha, rest, centred_rest, drest) and of row_bits of 4, and that of block_mask any.
  struct Given {
    /// q, k, v, out, sparse_out, dout, dq, dk and dv are as in ForwardArgs, with strides, and
    /// dq_more, dk_more and dv_more lie as dq, dk and dv. dk_linear is (B, Hk, N, D), of 16 bits;
    /// key_states and key_dsums (B, Hk, Tk, D, D), query_sums and query_dsums (B, H, Tq, D, D),
    /// bf16; key_norms, key_dnorms, query_norms and query_dnorms their like without the last
    /// dimension, given_k_mean and dk_mean (B, Hk, D), dk_sums (B, Hk, Tk, D), dalpha (B, H, M),
    /// FP32; all contiguous. alpha is FP32 with strides for batch, head
    /// and query, any of which may be 0. pooled_keys are (B, Hk, Tk, D) of 16 bits, pooled_mean (B,
    /// Hk, D), rest, centred_rest and drest (B, H, M), and pooled_dsums (B, H, estimated_parts(),
    /// Tk, D), FP32; all contiguous. block_mask has a byte for each of Tq lists and Tk blocks, not
    /// 0 where the block is listed; its strides for batch and head, in bytes, may be 0. row_bits
    /// are as in Lists, with strides for batch and head in words.
    Operand tensor;
    uint64_t address;
    int64_t strides[3] = {}; ///< in elements, where the tensor has strides
  };
  KernelKind kernel;
  Problem problem;
  std::vector<Given> given;
  /// All blocks share one sum: query_sums, query_norms, key_dsums and key_dnorms are (B, Hk, ...),
  /// without Tq and Tk.
  bool one_sum = false;
  void* stream = nullptr; ///< a CUstream
};

/// Launches the kernel for calls of an operation whose spec has lists. Raises SpecError for a
/// tensor that is missing, misplaced or not the kernel's, or if has_linear_kernels() says no, and
/// what Attention::forward() raises.
void launch_linear(const LinearCall&, const Attention&);

} // namespace sagebwd
