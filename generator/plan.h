//===- plan.h - Operands, workspace and launch geometry --------------------===//
//
// A kernel's parameters are a list of operands. The emitter writes the kernel's `Params` struct
// from that list and the runtime packs its bytes from the same list, so the two cannot disagree.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/kernel.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace sagebwd {

/// The sizes of one call. All lengths in tokens.
struct Problem {
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t heads_kv = 1;
  int64_t seq_q = 1;
  int64_t seq_kv = 1;
};

/// Everything a kernel can be handed: its name and its C type in generated code. The layouts of the
/// workspace are those of templates/kernels/quantize.cuh.
// clang-format off
#define SAGEBWD_OPERANDS(X)                                                                        \
  /* tensors of the caller */                                                                      \
  X(q, "const Element*") X(k, "const Element*") X(v, "const Element*")                             \
  X(out, "Element*") X(lse, "float*") X(dout, "const Element*") X(dlse, "const float*")            \
  X(dq, "Element*") X(dk, "Element*") X(dv, "Element*")                                            \
  /* workspace */                                                                                  \
  X(k_partial, "float*") X(k_mean, "float*")                                                       \
  X(q8, "s8*") X(k8, "s8*") X(k8_scale, "float*") X(vt8, "s8*") X(vt8_scale, "float*")             \
  X(qt8, "s8*") X(kt8, "s8*") X(kt8_scale, "float*") X(dot8, "s8*")                                \
  X(q_rows, "float*") X(q_channels, "float*")                                                      \
  X(tile_p_max, "float*") X(tile_ds_max, "float*")                                                 \
  /* strides of the caller's tensors, in elements: batch, head, token */                           \
  X(q_stride_b, "s64") X(q_stride_h, "s64") X(q_stride_s, "s64")                                   \
  X(k_stride_b, "s64") X(k_stride_h, "s64") X(k_stride_s, "s64")                                   \
  X(v_stride_b, "s64") X(v_stride_h, "s64") X(v_stride_s, "s64")                                   \
  X(out_stride_b, "s64") X(out_stride_h, "s64") X(out_stride_s, "s64")                             \
  X(dout_stride_b, "s64") X(dout_stride_h, "s64") X(dout_stride_s, "s64")                          \
  X(dq_stride_b, "s64") X(dq_stride_h, "s64") X(dq_stride_s, "s64")                                \
  X(dk_stride_b, "s64") X(dk_stride_h, "s64") X(dk_stride_s, "s64")                                \
  X(dv_stride_b, "s64") X(dv_stride_h, "s64") X(dv_stride_s, "s64")                                \
  /* sizes */                                                                                      \
  X(heads, "int") X(heads_kv, "int") X(seq_q, "int") X(seq_kv, "int")                              \
  X(padded_q, "int") X(padded_kv, "int") X(causal_offset, "int")                                   \
  X(softmax_scale, "float")                                                                        \
  /* what a role of the quantisation kernel leaves empty */                                        \
  X(no_bytes, "s8*") X(no_floats, "float*")
// clang-format on

enum class Operand {
#define X(name, type) name,
  SAGEBWD_OPERANDS(X)
#undef X
      count
};
std::string_view name_of(Operand);
/// The C type in generated code: a pointer, "s64", "int" or "float".
std::string_view type_of(Operand);

/// One field of a kernel's `Params` struct. The quantisation kernels call the tensor they read
/// `x`, whichever it is: a field's name need not be its operand's.
struct Field {
  std::string_view name;
  Operand operand;
};
/// The fields of a kernel's `Params` struct, in order.
const std::vector<Field>& fields_of(KernelKind);

/// One value per operand of a call; pointers and integers as 64 bits, floats as their bits.
using OperandValues = std::array<uint64_t, static_cast<size_t>(Operand::count)>;
/// The bytes of a kernel's `Params` struct, laid out by C's rules. At most 512 bytes.
size_t pack_params(const std::vector<Field>&, const OperandValues&, std::byte* params);

/// The sequence padded to whole tiles of every configuration.
inline constexpr int64_t kPadding = 128;
/// Keys summed by one block of the key-mean pass.
inline constexpr int64_t kMeanChunk = 256;

/// Bytes of device memory a pass needs beside the caller's tensors. The spec must be resolved, here
/// and below; raises SpecError where it is not, as check() does, and beyond 2^62 bytes.
size_t workspace_bytes(Pass, const AttentionSpec&, const Problem&);
/// Fills in workspace pointers (from `workspace`) and sizes; the caller's tensors stay as they are.
void place_workspace(Pass, const AttentionSpec&, const Problem&, uint64_t workspace,
                     OperandValues&);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
/// Blocks of a kernel for a problem. Raises SpecError for sizes beyond the hardware's grids.
Grid grid_of(const KernelSpec&, const Problem&);

/// Raises SpecError for problems no kernel can run: sizes below one, heads that do not divide; and
/// for a spec that is not resolved.
void check(const AttentionSpec&, const Problem&);

} // namespace sagebwd
