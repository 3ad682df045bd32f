//===- front.cpp - Norm and RoPE of queries and keys, and gates of outputs -===//
//
// front gives what attention is computed of, front_gradients the gradients of what it was given,
// and front_gains those of gains, from the parts of them that blocks of front_gradients have. gate
// and gate_gradients are what is behind attention.
//
//===----------------------------------------------------------------------===//

#include "templates/layouts/front.cuh"
#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// Norm, tables and their style are operands: the kernels depend on the tensors alone.
void narrow_to_tensors(AttentionSpec& s) { s = {.head_dim = s.head_dim, .dtype = s.dtype}; }

Grid grid_of_rows(const KernelSpec& k, const Problem& p) {
  return {front_blocks(k.attention, p, front_heads(k.attention, p))};
}
/// Of so many channels of each head, whether or not heads share their gains. A width is at least
/// as many channels as tensors have.
Grid grid_of_gains(const KernelSpec& k, const Problem& p) {
  return {(p.heads + p.heads_kv) * (width(k.attention) / FRONT_GAIN_CHANNELS)};
}

Grid grid_of_outputs(const KernelSpec& k, const Problem& p) {
  return {p.batch * p.heads * front_chunks(Tokens::queries, k.attention, p)};
}

KernelDefinition front_kernel(KernelKind kind, std::initializer_list<O> tensors,
                              std::initializer_list<O> more, std::string_view root_template) {
  ParamFields fields = fields_named(tensors);
  return {
      .kind = kind,
      .narrow = narrow_to_tensors,
      .fields = fields_and(std::move(fields), more),
      .root_template = root_template,
      .configure = [](Configuration&, const KernelSpec&) {},
      .threads = [](const KernelSpec&) { return 128; },
      .grid = grid_of_rows,
  };
}

} // namespace

std::vector<KernelDefinition> front_kernels() {
  const std::initializer_list<O> told = {O::q_cos,
                                         O::q_sin,
                                         O::q_table_stride_b,
                                         O::q_table_stride_s,
                                         O::k_cos,
                                         O::k_sin,
                                         O::k_table_stride_b,
                                         O::k_table_stride_s,
                                         O::q_gain,
                                         O::q_gain_step,
                                         O::k_gain,
                                         O::k_gain_step,
                                         O::q_inv_rms,
                                         O::q_inv_rms_heads,
                                         O::k_inv_rms,
                                         O::k_inv_rms_heads,
                                         O::q_normed,
                                         O::k_normed,
                                         O::norm_eps,
                                         O::rope_begin,
                                         O::rope_channels,
                                         O::rope_interleaved,
                                         O::front_heads};
  KernelDefinition front = front_kernel(KernelKind::front, {O::q, O::k, O::front_q, O::front_k},
                                        told, "kernels/front.cuh");
  KernelDefinition gradients =
      front_kernel(KernelKind::front_gradients, {O::q, O::k, O::front_q, O::front_k, O::dq, O::dk},
                   told, "kernels/front_gradients.cuh");
  gradients.fields = fields_and(gradients.fields,
                                {O::q_gain_parts, O::k_gain_parts, O::dq_inv_rms, O::dk_inv_rms});
  KernelDefinition gains =
      front_kernel(KernelKind::front_gains, {}, told, "kernels/front_gains.cuh");
  gains.fields =
      fields_and(gains.fields, {O::q_gain_parts, O::k_gain_parts, O::dq_gain, O::dk_gain});
  gains.threads = [](const KernelSpec&) {
    return 1024;
  }; // few blocks, each of which waits for memory
  gains.grid = grid_of_gains;
  KernelDefinition gate =
      front_kernel(KernelKind::gate, {O::out, O::gate, O::gated}, {}, "kernels/gate.cuh");
  KernelDefinition gate_gradients =
      front_kernel(KernelKind::gate_gradients, {O::out, O::gate, O::gated, O::gate_dout, O::dgate},
                   {}, "kernels/gate_gradients.cuh");
  for (KernelDefinition* of : {&gate, &gate_gradients}) {
    of->threads = [](const KernelSpec&) { return 256; };
    of->grid = grid_of_outputs;
  }
  return {front, gradients, gains, gate, gate_gradients};
}

} // namespace sagebwd
