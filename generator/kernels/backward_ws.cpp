//===- backward_ws.cpp - dQ, dK and dV at once, warp-specialised ------------===//

#include "generator/kernels/attention.h"

#include "templates/layouts/backward_ws.cuh"

namespace sagebwd::attention {
namespace {

int bytes_of_backward_ws(const AttentionSpec& s, const TileConfig& t) {
  return BackwardWsLayout(shape_of(s, t), sums_dq_in_fp16(s)).total;
}

std::string objection_to_backward_ws(const AttentionSpec& s, const TileConfig& t) {
  if (width(s) > kWidestFused)
    return too_wide(s);
  if (s.deterministic)
    return "dQ is summed in no order: it takes no 'deterministic'";
  if (s.precision != Precision::gradients16)
    return "it forms dP, dV, dK and dQ in 16 bits, as precision '" +
           value_text(Precision::gradients16) + "' has them";
  return "";
}

Tiling tiling_of_backward_ws() {
  Tiling tiling = *backward(Family::mma).tiling;
  tiling.warps = {8};
  tiling.stages = {2, 4};
  tiling.shared_bytes = bytes_of_backward_ws;
  tiling.objection = objection_to_backward_ws;
  return tiling;
}
const Tiling& backward_ws_tiling() {
  static const Tiling of_ws = tiling_of_backward_ws();
  return of_ws;
}

} // namespace

KernelDefinition backward_ws() {
  KernelDefinition specialised = backward(Family::ws);
  static const auto configure_fused = specialised.configure;
  specialised.half_fields.clear();
  specialised.fields = fields_named({O::dk, O::dv, O::q8, O::q_rows, O::k8, O::k8_scale, O::k_rows,
                                     O::sink_partial, O::dq_sum, O::dq_factor, O::q_map, O::v_map,
                                     O::dout_map, O::v_rows, O::dout_rows, O::query_rows});
  specialised.root_template = "kernels/backward_ws.cuh";
  specialised.root_template16 = {};
  specialised.configure = [](Configuration& c, const KernelSpec& k) {
    configure_fused(c, k);
    c.add("DQ_SUM16", sums_dq_in_fp16(k.attention));
  };
  specialised.tiling = &backward_ws_tiling();
  return specialised;
}

} // namespace sagebwd::attention
