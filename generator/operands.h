//===- operands.h - What kernels are handed --------------------------------===//
//
// A kernel's parameters are a list of operands. The emitter writes the kernel's `Params` struct
// from that list and the runtime packs its bytes from the same list, so the two cannot disagree.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

namespace sagebwd {

// clang-format off
/// Tensors of the caller: name, C type in generated code, whose tokens, which passes take it, and
/// whether it may be missing. These are of (batch, head, token, channel), 16 bits a channel; the
/// strides of the first three follow each, in elements.
#define SAGEBWD_STRIDED_TENSORS(X)                                                                 \
  X(q, "const Element*", queries, both, required)                                                  \
  X(k, "const Element*", keys, both, required)                                                     \
  X(v, "const Element*", keys, both, required)                                                     \
  X(out, "Element*", queries, both, required)                                                      \
  X(dout, "const Element*", queries, backward, required)                                           \
  X(dq, "Element*", queries, backward, required)                                                   \
  X(dk, "Element*", keys, backward, required)                                                      \
  X(dv, "Element*", keys, backward, required)
/// And these of (batch, head, token), contiguous floats.
#define SAGEBWD_ROW_TENSORS(X)                                                                     \
  X(lse, "float*", queries, both, required)                                                        \
  X(dlse, "const float*", queries, backward, optional)
/// And of (batch, head, channel), contiguous floats: what is taken off each head's keys in place of
/// the mean computed from them.
#define SAGEBWD_MEAN_TENSORS(X) X(given_k_mean, "const float*", keys, both, optional)
/// And where packed sequences lie: the first token of each, with one more behind the last, and how
/// many of its tokens count (null: all). One int32 a sequence.
#define SAGEBWD_PACKING_TENSORS(X)                                                                 \
  X(first_queries, "const int*", queries, both, optional)                                          \
  X(first_keys, "const int*", keys, both, optional)                                                \
  X(lengths_q, "const int*", queries, both, optional)                                              \
  X(lengths_kv, "const int*", keys, both, optional)
/// The same tensors for kernels that copy boxes of 64 tokens by 64 channels: name, tensor.
#define SAGEBWD_TENSOR_MAPS(X) X(q_map, q) X(v_map, v) X(dout_map, dout)
/// What every kernel is handed, beside where sequences lie. Of packed ones: how many there are,
/// whether they lie a batch stride apart, and whether the mask's diagonal ends at their last tokens.
#define SAGEBWD_SIZES(X)                                                                           \
  X(channels, "int") X(value_channels, "int")                                                      \
  X(heads, "int") X(heads_kv, "int") X(seq_q, "int") X(seq_kv, "int")                              \
  X(padded_q, "int") X(padded_kv, "int") X(causal_offset, "int") X(window_offset, "int")            \
  X(softmax_scale, "float") X(sequences, "int") X(apart, "int")                  \
  X(diagonal_at_ends, "int")
/// Everything a kernel can be handed. The layouts of the workspace are those of
/// templates/kernels/quantize.cuh.
#define SAGEBWD_OPERANDS(X)                                                                        \
  SAGEBWD_STRIDED_TENSORS(X) SAGEBWD_ROW_TENSORS(X) SAGEBWD_MEAN_TENSORS(X)                        \
  SAGEBWD_PACKING_TENSORS(X)                                                                       \
  /* workspace */                                                                                  \
  X(k_partial, "float*") X(k_mean, "float*") X(q_mean, "float*") X(mean_scores, "float*")          \
  X(q8, "s8*") X(q_rows, "float*") X(k8, "s8*") X(k8_scale, "float*")                              \
  X(vt8, "s8*") X(vt8_scale, "float*") X(kt8, "s8*") X(kt8_scale, "float*")                         \
  X(qt8, "s8*") X(qt8_scale, "float*") X(dot8, "s8*") X(dot8_scale, "float*")                       \
  X(dout_rows, "Element*") X(k_rows, "Element*") X(v_rows, "Element*") X(query_rows, "Element*")   \
  X(sink_partial, "float*")                                                                        \
  X(tile_p_max, "float*") X(tile_ds_max, "float*") X(dq_sum, "float*")                             \
  X(key_range, "float*") X(dq_factor, "bf16*")                                                     \
  /* the caller's */                                                                               \
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

/// A tensor of the caller: its line of the lists above.
struct CallerTensor {
  Operand operand;
  Tokens tokens;
  bool in_forward; ///< both passes take it; else the backward alone
  bool optional;
  bool written; ///< by a kernel
  enum Of {
    elements, ///< 16 bits a channel of each token, with strides
    rows,     ///< a float a token
    means,    ///< a float a channel of each head
    packing,  ///< an int32 a packed sequence
  } of;
  bool strided() const { return of == elements; }
};
/// In the order of the operands, of which they are the first.
const std::vector<CallerTensor>& caller_tensors();
inline const CallerTensor& caller_tensor(Operand operand) {
  return caller_tensors()[static_cast<size_t>(operand)];
}

/// How a value of a C type lies in a struct. A TensorMap is CUDA's opaque 128 bytes.
struct Extent {
  size_t bytes, alignment;
};
Extent extent_of(std::string_view type);

/// One field of a kernel's `Params` struct.
struct Field {
  std::string_view name;
  Operand operand;
};
/// Fields that bear their operands' names, and behind them the sizes. A tensor of the caller brings
/// its strides along.
std::vector<Field> fields_named(std::initializer_list<Operand>);

/// The operand of a tensor's batch stride, which those of its head and token strides follow;
/// Operand::count for what has none.
Operand strides_of(Operand tensor);

/// The tensor that a TensorMap describes.
Operand tensor_of(Operand map);

/// One value per operand of a call: integers and pointers as 64 bits, floats as their bits, a
/// TensorMap as the host's address of it.
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

/// The bytes of a kernel's `Params` struct, laid out by C's rules; `params` holds them all.
size_t pack_params(const std::vector<Field>&, const OperandValues&, std::byte* params);
/// What CUDA lets a kernel have.
inline constexpr size_t kMaxParamsBytes = 4096;

} // namespace sagebwd
