//===- operands.h - The parameters of kernels ------------------------------===//
//
// A kernel's parameters are a list of operands. The kernel's `Params` struct in the source and the
// bytes that a launch passes are made from that list, so the two cannot disagree.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

// clang-format off
/// Tensors of the caller: name, C type in generated code, whose tokens the tensor has, which passes
/// read or write the tensor, and whether it may be missing. Calls with linear attention alone have
/// those that are `mixed`. The tensors of this list are (batch,
/// head, token, channel), with 16 bits per channel. Three strides in elements, for batch, head and
/// token, belong to each.
#define SAGEBWD_STRIDED_TENSORS(X)                                                                 \
  X(q, "const Element*", queries, both, required)                                                  \
  X(k, "const Element*", keys, both, required)                                                     \
  X(v, "const Element*", keys, both, required)                                                     \
  X(out, "Element*", queries, both, required)                                                      \
  X(dout, "const Element*", queries, backward, required)                                           \
  X(dq, "Element*", queries, backward, required)                                                   \
  X(dk, "Element*", keys, backward, required)                                                      \
  X(dv, "Element*", keys, backward, required)                                                      \
  X(sparse_out, "Element*", queries, forward, mixed)
/// Tensors of the caller that are (batch, head, token), contiguous floats.
#define SAGEBWD_ROW_TENSORS(X)                                                                     \
  X(lse, "float*", queries, both, required)                                                        \
  X(dlse, "const float*", queries, backward, optional)                                             \
  X(dalpha, "float*", queries, backward, mixed)
/// Tensors of the caller that are (batch, head, channel), contiguous floats. given_k_mean is
/// subtracted from each head's keys instead of their computed mean.
#define SAGEBWD_MEAN_TENSORS(X) X(given_k_mean, "const float*", keys, both, optional)
/// Tensors of the caller that say where packed sequences lie, with one int32 per sequence. first_*:
/// the index of each sequence's first token, and one more entry, the end of the last sequence.
/// lengths_*: how many of each sequence's tokens are used (null: all).
#define SAGEBWD_PACKING_TENSORS(X)                                                                 \
  X(first_queries, "const int*", queries, both, optional)                                          \
  X(first_keys, "const int*", keys, both, optional)                                                \
  X(lengths_q, "const int*", queries, both, optional)                                              \
  X(lengths_kv, "const int*", keys, both, optional)
/// Tensors of the caller that list blocks of keys, with 32 blocks in a word (Lists of
/// runtime/attention.h). row_stride_b and row_stride_h are the batch and head strides in words.
#define SAGEBWD_LIST_TENSORS(X) X(row_bits, "const u32*", queries, both, required)
/// Numbers of each key that say which queries do not see it, (batch, key head, key, numbers): int32,
/// a key's contiguous and its keys one behind the other, with batch and head strides in int32.
#define SAGEBWD_INTERVAL_TENSORS(X) X(intervals, "const int*", keys, both, required)
/// What expressions index, in the order of their operands: rows of int32, one behind the other, and
/// how many rows and columns there are. Of one index there is one row.
#define SAGEBWD_TABLE_TENSORS(X)                                                                   \
  X(table_0, "const int*", keys, both, optional) X(table_1, "const int*", keys, both, optional)    \
  X(table_2, "const int*", keys, both, optional) X(table_3, "const int*", keys, both, optional)    \
  X(table_4, "const int*", keys, both, optional) X(table_5, "const int*", keys, both, optional)    \
  X(table_6, "const int*", keys, both, optional) X(table_7, "const int*", keys, both, optional)
#define SAGEBWD_TABLE_SIZES(X)                                                                     \
  X(table_0_rows, "int") X(table_1_rows, "int") X(table_2_rows, "int") X(table_3_rows, "int")      \
  X(table_4_rows, "int") X(table_5_rows, "int") X(table_6_rows, "int") X(table_7_rows, "int")      \
  X(table_0_columns, "int") X(table_1_columns, "int") X(table_2_columns, "int")                    \
  X(table_3_columns, "int") X(table_4_columns, "int") X(table_5_columns, "int")                    \
  X(table_6_columns, "int") X(table_7_columns, "int")
/// The exact attention's share of each query's output, or, with alpha_of_rest, the logarithm of
/// what other keys weigh: floats with strides of their own, of which alpha_tokens queries one
/// behind the other share one.
#define SAGEBWD_SHARE_TENSORS(X) X(alpha, "const float*", queries, both, mixed)
/// Memory of the caller that the forward writes and the backward reads: some buffers of the
/// workspace (is_kept() of generator/mixture.h). Kernels know it by these buffers alone.
#define SAGEBWD_KEPT_TENSORS(X) X(kept_sums, "s8*", queries, both, mixed)
/// Tensors of the caller that have a float for each query head, of all sequences together.
#define SAGEBWD_HEAD_TENSORS(X) X(max_logits, "float*", queries, forward, required)
/// Lists are packed from these into `packed_bits`. With them are the numbers of lists and of a
/// list's entries.
#define SAGEBWD_PACKING_OF_LISTS(X)                                                                \
  X(block_mask, "const s8*") X(block_indices, "const int*") X(block_counts, "const int*")          \
  X(packed_bits, "u32*") X(lists, "s64") X(list_width, "int")
/// The linear branch's kernels have these of their own, contiguous unless there are strides: of
/// each block a matrix of channels by channels and a vector; alpha and tensors like O and K; and
/// for an estimated alpha means of blocks of keys and numbers of queries.
#define SAGEBWD_LINEAR_TENSORS(X)                                                                  \
  X(key_states, "bf16*") X(key_norms, "float*")                                                    \
  X(query_sums, "bf16*") X(query_norms, "float*")                                                  \
  X(query_dsums, "bf16*") X(query_dnorms, "float*")                                                \
  X(key_dsums, "bf16*") X(key_dnorms, "float*")                                                    \
  X(dq_more, "const Element*") X(dk_more, "const Element*") X(dv_more, "const Element*")           \
  X(dk_linear, "const Element*") X(dk_sums, "float*") X(dk_mean, "float*")                         \
  X(pooled_keys, "const Element*") X(pooled_mean, "const float*") X(rest, "float*")                \
  X(centred_rest, "float*") X(drest, "const float*") X(pooled_dsums, "float*")
/// The router's kernels have these of their own, contiguous: sums of blocks of tokens; maps of these,
/// and how many floats lie from a head's map to the next one's; and for each block of queries the
/// scores of blocks of keys, which of them are listed in any case, a byte for each that says whether
/// it is listed, and how many shall be.
#define SAGEBWD_ROUTER_OPERANDS(X)                                                                 \
  X(query_block_sums, "float*") X(key_block_sums, "float*")                                        \
  X(query_map, "const float*") X(query_map_step, "int")                                            \
  X(key_map, "const float*") X(key_map_step, "int")                                                \
  X(block_scores, "const float*") X(always, "const s8*") X(listed_mask, "s8*") X(kept, "int")
/// The front end's kernels have these of their own: y or its gradient, with strides; tables of
/// cosines and sines, FP32, with strides for batch and token; gains, and how many floats lie from a
/// head's to the next one's; given 1/rms of tokens, and of how many heads; whether there is a norm;
/// the parts of gains' gradients; and gradients. front_heads: the heads of a block.
#define SAGEBWD_FRONT_OPERANDS(X)                                                                  \
  X(front_q, "Element*")                                                                           \
  X(front_q_stride_b, "s64") X(front_q_stride_h, "s64") X(front_q_stride_s, "s64")                 \
  X(front_k, "Element*")                                                                           \
  X(front_k_stride_b, "s64") X(front_k_stride_h, "s64") X(front_k_stride_s, "s64")                 \
  X(q_cos, "const float*") X(q_sin, "const float*")                                                \
  X(q_table_stride_b, "s64") X(q_table_stride_s, "s64")                                            \
  X(k_cos, "const float*") X(k_sin, "const float*")                                                \
  X(k_table_stride_b, "s64") X(k_table_stride_s, "s64")                                            \
  X(q_gain, "const float*") X(q_gain_step, "int") X(k_gain, "const float*") X(k_gain_step, "int")  \
  X(q_inv_rms, "const float*") X(q_inv_rms_heads, "int")                                           \
  X(k_inv_rms, "const float*") X(k_inv_rms_heads, "int") X(q_normed, "int") X(k_normed, "int")     \
  X(norm_eps, "float") X(rope_begin, "int") X(rope_channels, "int") X(rope_interleaved, "int")     \
  X(front_heads, "int") X(q_gain_parts, "float*") X(k_gain_parts, "float*")                        \
  X(dq_gain, "float*") X(dk_gain, "float*") X(dq_inv_rms, "float*") X(dk_inv_rms, "float*")
/// The gate's kernels have these of their own, each with strides: gates of outputs; gated outputs, or
/// their gradients; and the gradients of outputs and of gates.
#define SAGEBWD_GATE_OPERANDS(X)                                                                   \
  X(gate, "const Element*") X(gate_stride_b, "s64") X(gate_stride_h, "s64")                        \
  X(gate_stride_s, "s64")                                                                          \
  X(gated, "Element*") X(gated_stride_b, "s64") X(gated_stride_h, "s64") X(gated_stride_s, "s64")  \
  X(gate_dout, "Element*") X(gate_dout_stride_b, "s64") X(gate_dout_stride_h, "s64")               \
  X(gate_dout_stride_s, "s64")                                                                     \
  X(dgate, "Element*") X(dgate_stride_b, "s64") X(dgate_stride_h, "s64") X(dgate_stride_s, "s64")
/// Tensor maps, for kernels that copy boxes of 64 tokens by 64 channels: name, tensor.
#define SAGEBWD_TENSOR_MAPS(X) X(q_map, q) X(v_map, v) X(dout_map, dout)
/// Sizes, which every kernel has as parameters, as it has SAGEBWD_PACKING_TENSORS. The last three:
/// how many sequences there are, packed or in the launch, and of packed ones whether each is a batch
/// stride behind the one before it, and whether the mask's diagonal ends at their last tokens.
#define SAGEBWD_SIZES(X)                                                                           \
  X(channels, "int") X(value_channels, "int")                                                      \
  X(heads, "int") X(heads_kv, "int") X(seq_q, "int") X(seq_kv, "int")                              \
  X(padded_q, "int") X(padded_kv, "int") X(causal_offset, "int") X(window_offset, "int")           \
  X(softmax_scale, "float") X(sequences, "int") X(apart, "int")                                    \
  X(diagonal_at_ends, "int")
/// All operands. templates/base.cuh and templates/kernels/quantize.cuh describe the layouts of the
/// workspace.
#define SAGEBWD_OPERANDS(X)                                                                        \
  SAGEBWD_STRIDED_TENSORS(X) SAGEBWD_ROW_TENSORS(X) SAGEBWD_MEAN_TENSORS(X)                        \
  SAGEBWD_PACKING_TENSORS(X) SAGEBWD_LIST_TENSORS(X) SAGEBWD_INTERVAL_TENSORS(X)                   \
  SAGEBWD_TABLE_TENSORS(X) SAGEBWD_SHARE_TENSORS(X) SAGEBWD_KEPT_TENSORS(X)                        \
  SAGEBWD_HEAD_TENSORS(X)                                                                          \
  /* workspace */                                                                                  \
  X(k_partial, "float*") X(k_mean, "float*") X(q_mean, "float*") X(mean_scores, "float*")          \
  X(value_sums, "float*")                                                                          \
  X(q8, "s8*") X(q_rows, "float*") X(k8, "s8*") X(k8_scale, "float*")                              \
  X(vt8, "s8*") X(vt8_scale, "float*") X(kt8, "s8*") X(kt8_scale, "float*")                        \
  X(qt8, "s8*") X(qt8_scale, "float*") X(dot8, "s8*") X(dot8_scale, "float*")                      \
  X(dout_rows, "Element*") X(k_rows, "Element*") X(v_rows, "Element*") X(query_rows, "Element*")   \
  X(sink_partial, "float*") X(sparse_dout, "Element*")                                             \
  X(tile_p_max, "float*") X(tile_ds_max, "float*") X(dq_sum, "float*") X(dq_turns, "u32*")          \
  X(key_range, "float*") X(dq_factor, "bf16*")                                                     \
  X(value_range, "float*") X(half_v, "fp16*") X(half_dout, "fp16*") X(dp_factor, "float*")         \
  X(column_bits, "u32*") X(list_lengths, "u32*") X(key_order, "u32*")                               \
  /* the caller's */                                                                               \
  X(row_stride_b, "s64") X(row_stride_h, "s64")                                                    \
  X(interval_stride_b, "s64") X(interval_stride_h, "s64") SAGEBWD_TABLE_SIZES(X)                   \
  SAGEBWD_PACKING_OF_LISTS(X)                                                                      \
  SAGEBWD_LINEAR_TENSORS(X) SAGEBWD_ROUTER_OPERANDS(X) SAGEBWD_FRONT_OPERANDS(X)                   \
  SAGEBWD_GATE_OPERANDS(X)                                                                         \
  X(alpha_stride_b, "s64") X(alpha_stride_h, "s64") X(alpha_stride_s, "s64") X(alpha_tokens, "int") \
  X(alpha_of_rest, "int") X(one_sum, "int")                                                        \
  X(q_map, "TensorMap") X(v_map, "TensorMap") X(dout_map, "TensorMap")                             \
  SAGEBWD_SIZES(X)
// clang-format on

enum class Operand {
#define X(name, ...) name,
  SAGEBWD_OPERANDS(X)
#undef X
#define X(name, ...) name##_stride_b, name##_stride_h, name##_stride_s,
      SAGEBWD_STRIDED_TENSORS(X)
#undef X
          count
};
std::string_view name_of(Operand);
/// The C type in generated code: a pointer, "s64", "int", "float" or "TensorMap".
std::string_view type_of(Operand);

enum class Tokens { queries, keys };

/// How many tables a call can have.
inline constexpr int kMostTables = 8;
/// A table's address, and how many rows and columns it has.
inline Operand table_operand(int i) { return static_cast<Operand>(int(Operand::table_0) + i); }
inline Operand rows_operand(int i) { return static_cast<Operand>(int(Operand::table_0_rows) + i); }
inline Operand columns_operand(int i) {
  return static_cast<Operand>(int(Operand::table_0_columns) + i);
}

/// A tensor of the caller, as one line of the lists above describes it.
struct CallerTensor {
  Operand operand;
  Tokens tokens;
  bool in_forward, in_backward;
  bool optional;
  bool mixed;   ///< calls with linear attention alone have it
  bool written; ///< by a kernel
  enum Of {
    elements,  ///< 16 bits per channel of each token, with strides
    rows,      ///< one float per token
    means,     ///< one float per channel of each head
    packing,   ///< one int32 per packed sequence
    lists,     ///< bits per block of queries, with strides of their own
    intervals, ///< int32 per key, with strides of their own
    tables,    ///< int32, with rows and columns of their own
    shares,    ///< floats per query or block of queries, with strides of their own
    kept,      ///< bytes, as kept_sums_bytes() says
    heads,     ///< one float per query head
  } of;
  bool strided() const { return of == elements; }
};
/// All tensors of the caller, in the order of enum Operand, which begins with them.
const std::vector<CallerTensor>& caller_tensors();
inline const CallerTensor& caller_tensor(Operand operand) {
  return caller_tensors()[static_cast<size_t>(operand)];
}

/// The size and alignment of a C type in a struct. A TensorMap is CUDA's opaque 128 bytes.
struct Extent {
  size_t bytes, alignment;
};
Extent extent_of(std::string_view type);

/// The fields of a kernel's `Params` struct, in order. Each has the name of its operand.
using ParamFields = std::vector<Operand>;
/// These operands, each tensor followed by its strides, and behind them the sizes and the packing
/// tensors.
ParamFields fields_named(std::initializer_list<Operand>);
/// These fields, and behind them others, which have no strides.
inline ParamFields fields_and(ParamFields fields, const ParamFields& more) {
  fields.insert(fields.end(), more.begin(), more.end());
  return fields;
}
/// All tables with their rows and columns.
ParamFields table_operands();

/// The operand of a tensor's batch stride. The next two operands are the head and token strides.
/// Operand::count for an operand without strides.
Operand strides_of(Operand tensor);

/// The tensor that a TensorMap describes.
Operand tensor_of(Operand map);

/// One value of 64 bits for each operand of a call: an integer, an address, the bits of a float, or
/// the host address of a TensorMap.
using OperandValues = std::array<uint64_t, static_cast<size_t>(Operand::count)>;
inline void set(OperandValues& values, Operand operand, uint64_t value) {
  values[static_cast<size_t>(operand)] = value;
}
inline uint64_t get(const OperandValues& values, Operand operand) {
  return values[static_cast<size_t>(operand)];
}
void set(OperandValues& values, Operand operand, float value);
/// A tensor's address and its strides in elements: batch, head, token.
void set_tensor(OperandValues&, Operand tensor, uint64_t address, const int64_t (&strides)[3]);

/// The text of a kernel's `Params` struct.
std::string params_struct(const ParamFields&);
/// Writes the struct to `params`, laid out by C's rules, and returns its size in bytes. `params`
/// must have room for kMaxParamsBytes.
size_t pack_params(const ParamFields&, const OperandValues&, std::byte* params);
/// The most bytes of parameters that CUDA allows a kernel.
inline constexpr size_t kMaxParamsBytes = 4096;

} // namespace sagebwd
