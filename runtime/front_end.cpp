//===- front_end.cpp - Norm and RoPE of queries and keys, gates of outputs ===//

#include "runtime/front_end.h"

#include "generator/definition.h"
#include "runtime/driver/driver.h"
#include "runtime/loaded_kernels.h"
#include "runtime/overlap.h"
#include "runtime/pack_lists.h"

#include <cmath>
#include <string>
#include <vector>

namespace sagebwd {
namespace {

using O = Operand;
using Areas = std::vector<MemoryArea>;

constexpr int64_t kElement = 2, kFloat = sizeof(float), kVector = 16; ///< bytes
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr int64_t kMostReach = int64_t{1} << 58; ///< elements from a tensor's first to its last

uint64_t device_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

/// Which operands are the queries', or the keys', and what they are called in errors.
struct Side {
  Tokens tokens;
  O x, y, dx, cos, sin, table_stride_b, table_stride_s, gain, gain_step, inv_rms, inv_rms_heads,
      normed, gain_parts, dgain, dinv_rms;
  const char *x_name, *y_name, *dx_name, *cos_name, *sin_name, *gain_name, *inv_rms_name,
      *parts_name, *dgain_name, *dinv_rms_name;
};
constexpr Side kQueries = {Tokens::queries,
                           O::q,
                           O::front_q,
                           O::dq,
                           O::q_cos,
                           O::q_sin,
                           O::q_table_stride_b,
                           O::q_table_stride_s,
                           O::q_gain,
                           O::q_gain_step,
                           O::q_inv_rms,
                           O::q_inv_rms_heads,
                           O::q_normed,
                           O::q_gain_parts,
                           O::dq_gain,
                           O::dq_inv_rms,
                           "q.x",
                           "q.y",
                           "q.dx",
                           "q.rope.cos",
                           "q.rope.sin",
                           "q.gain",
                           "q.inv_rms",
                           "q.gain_parts",
                           "q.dgain",
                           "q.dinv_rms"};
constexpr Side kKeys = {Tokens::keys,
                        O::k,
                        O::front_k,
                        O::dk,
                        O::k_cos,
                        O::k_sin,
                        O::k_table_stride_b,
                        O::k_table_stride_s,
                        O::k_gain,
                        O::k_gain_step,
                        O::k_inv_rms,
                        O::k_inv_rms_heads,
                        O::k_normed,
                        O::k_gain_parts,
                        O::dk_gain,
                        O::dk_inv_rms,
                        "k.x",
                        "k.y",
                        "k.dx",
                        "k.rope.cos",
                        "k.rope.sin",
                        "k.gain",
                        "k.inv_rms",
                        "k.gain_parts",
                        "k.dgain",
                        "k.dinv_rms"};

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw SpecError(name + ": " + why);
}

/// Sets a tensor of 16-bit elements.
void put_tensor(OperandValues& values, Areas& areas, const char* name, O operand,
                const Tensor& tensor, Tokens of, const Problem& p, int channels, bool written) {
  const uint64_t address = device_address(tensor.data);
  if (address == 0)
    refuse(name, "the address is null; pass device memory");
  if (address % kVector != 0)
    refuse(name, "the address is not a multiple of 16 bytes, in which kernels read it");
  MemoryArea area{name, written, address};
  area.row_bytes = channels * kElement;
  int64_t strides[3] = {};
  const struct {
    const char* name;
    int64_t size, stride;
  } dimensions[] = {{"batch", p.batch, tensor.stride_b},
                    {"head", heads_of(of, p), tensor.stride_h},
                    {"token", tokens_of(of, p), tensor.stride_s}};
  for (int i = 0; i < 3; ++i) {
    const auto& [dimension, size, stride] = dimensions[i];
    area.sizes[i] = size;
    if (size <= 1)
      continue;
    const std::string told =
        "the " + std::string(dimension) + " stride is " + std::to_string(stride) + " elements";
    if (stride % (kVector / kElement) != 0)
      refuse(name, told + ", not a multiple of 8");
    if (stride < 0 || (written && stride < channels))
      refuse(name, told + "; pass " + (written ? std::to_string(channels) : "0") + " or more");
    if (stride > 0 && size - 1 > kMostReach / stride)
      refuse(name, told + ", with which it would take more than 2^58 elements");
    strides[i] = stride;
    area.strides[i] = stride * kElement;
  }
  set_tensor(values, operand, address, strides);
  areas.push_back(area);
}

/// Sets floats without gaps, of which null may be given.
void put_floats(OperandValues& values, Areas& areas, const char* name, O operand,
                const float* pointer, int64_t floats, bool written, int64_t alignment = kVector) {
  if (device_address(pointer) % static_cast<uint64_t>(alignment) != 0)
    refuse(name, "the address is not a multiple of " + std::to_string(alignment) + " bytes");
  MemoryArea area{name, written, device_address(pointer)};
  area.row_bytes = floats * kFloat;
  areas.push_back(area);
  set(values, operand, device_address(pointer));
}

void put_table(OperandValues& values, Areas& areas, const Side& side, const FrontCall& call,
               const RopeTable& table) {
  if ((table.cos == nullptr) != (table.sin == nullptr))
    refuse(side.cos_name, "one of cos and sin is null; pass both, or neither for no RoPE");
  if (!table.cos)
    return;
  const Problem& p = call.problem;
  const int64_t tokens = tokens_of(side.tokens, p);
  const int64_t at_once = call.rope_interleaved ? 2 : 4; // floats that are read together
  for (const auto& [dimension, size, stride] :
       {std::tuple{"batch", p.batch, table.stride_b}, {"token", tokens, table.stride_s}})
    if (size > 1 && (stride < 0 || stride % at_once != 0 || stride > kMostReach / size))
      refuse(side.cos_name, "the " + std::string(dimension) + " stride is " +
                                std::to_string(stride) + " floats; pass a multiple of " +
                                std::to_string(at_once) + ", 0 or more");
  const int64_t stride_b = p.batch > 1 ? table.stride_b : 0;
  const int64_t stride_s = tokens > 1 ? table.stride_s : 0;
  for (const auto& [name, operand, pointer] :
       {std::tuple{side.cos_name, side.cos, table.cos}, {side.sin_name, side.sin, table.sin}}) {
    put_floats(values, areas, name, operand, pointer, call.rope_channels / 2, /*written=*/false);
    MemoryArea& area = areas.back();
    area.sizes[0] = p.batch, area.sizes[1] = tokens;
    area.strides[0] = stride_b * kFloat, area.strides[1] = stride_s * kFloat;
  }
  set(values, side.table_stride_b, static_cast<uint64_t>(stride_b));
  set(values, side.table_stride_s, static_cast<uint64_t>(stride_s));
}

void put_side(OperandValues& values, Areas& areas, const Side& side, const FrontCall& call,
              const FrontSide& a, int channels, bool writes_y) {
  const Problem& p = call.problem;
  const int64_t heads = heads_of(side.tokens, p), tokens = tokens_of(side.tokens, p);
  put_tensor(values, areas, side.x_name, side.x, a.x, side.tokens, p, channels, false);
  put_tensor(values, areas, side.y_name, side.y, a.y, side.tokens, p, channels, writes_y);
  if (!a.normed && (a.gain || a.inv_rms))
    refuse(a.gain ? side.gain_name : side.inv_rms_name,
           "it is given without a norm; set normed, or pass null");
  put_floats(values, areas, side.gain_name, side.gain, a.gain,
             (a.gain_per_head ? heads : 1) * channels, false);
  put_floats(values, areas, side.inv_rms_name, side.inv_rms, a.inv_rms,
             p.batch * (a.inv_rms_per_head ? heads : 1) * tokens, false, kFloat);
  set(values, side.gain_step, static_cast<uint64_t>(a.gain_per_head ? channels : 0));
  set(values, side.inv_rms_heads, static_cast<uint64_t>(a.inv_rms_per_head ? heads : 1));
  set(values, side.normed, uint64_t{a.normed});
  put_table(values, areas, side, call, a.rope);
}

void check_rope(const FrontCall& a, int channels) {
  if (!a.q.rope.cos && !a.k.rope.cos)
    return;
  const int of_pairs = a.rope_interleaved ? 4 : 8;
  if (a.rope_channels < of_pairs || a.rope_channels % of_pairs != 0)
    throw SpecError("rope_channels = " + std::to_string(a.rope_channels) +
                    " is not supported: a positive multiple of " + std::to_string(of_pairs) +
                    (a.rope_interleaved ? "" : ", or of 4 if interleaved"));
  if (a.rope_begin < 0 || a.rope_begin % 4 != 0 || a.rope_begin > channels - a.rope_channels)
    throw SpecError("rope_begin = " + std::to_string(a.rope_begin) + " with " +
                    std::to_string(a.rope_channels) + " channels is not supported: a multiple of " +
                    "4 from 0 to " + std::to_string(channels - a.rope_channels));
}

OperandValues front_values(const FrontCall& a, const ResolvedSpec& spec, bool writes_y,
                           Areas& areas) {
  check(spec, a.problem);
  if (spec->packed)
    throw SpecError("norm and RoPE of a spec of packed sequences are not supported: take one "
                    "without, whose batch of 1 has all tokens");
  if (!(a.norm_eps >= 0) || !std::isfinite(a.norm_eps))
    throw SpecError("norm_eps = " + std::to_string(a.norm_eps) +
                    " is not supported: a number from 0 on");
  check_rope(a, spec->head_dim);
  const int64_t heads = front_heads(*spec, a.problem);
  if (const int64_t blocks = front_blocks(*spec, a.problem, heads); blocks > kMostBlocks)
    throw SpecError("norm and RoPE in " + std::to_string(blocks) +
                    " blocks are not supported: 2^31 - 1 at most; divide the batch");
  OperandValues values{};
  put_sizes(spec, a.problem, values);
  put_side(values, areas, kQueries, a, a.q, spec->head_dim, writes_y);
  put_side(values, areas, kKeys, a, a.k, spec->head_dim, writes_y);
  set(values, O::norm_eps, a.norm_eps);
  set(values, O::rope_begin, static_cast<uint64_t>(a.rope_begin));
  set(values, O::rope_channels, static_cast<uint64_t>(a.rope_channels));
  set(values, O::rope_interleaved, uint64_t{a.rope_interleaved});
  set(values, O::front_heads, static_cast<uint64_t>(heads));
  return values;
}

void put_gradients(OperandValues& values, Areas& areas, const Side& side, const FrontCall& call,
                   const FrontSide& of, const FrontSideGradients& a, const ResolvedSpec& spec) {
  const Problem& p = call.problem;
  const int64_t heads = heads_of(side.tokens, p);
  put_tensor(values, areas, side.dx_name, side.dx, a.dx, side.tokens, p, spec->head_dim, true);
  if ((a.dgain == nullptr) != (a.gain_parts == nullptr))
    refuse(side.dgain_name, "one of dgain and gain_parts is null; pass both or neither");
  if (a.dgain && !of.gain)
    refuse(side.dgain_name, "it is given, and gain is not; pass null");
  if (a.dinv_rms && !of.inv_rms)
    refuse(side.dinv_rms_name, "it is given, and inv_rms is not; pass null");
  put_floats(values, areas, side.dgain_name, side.dgain, a.dgain,
             (of.gain_per_head ? heads : 1) * spec->head_dim, true);
  put_floats(values, areas, side.parts_name, side.gain_parts, a.gain_parts,
             front_part_floats(side.tokens, spec, p), true);
  put_floats(values, areas, side.dinv_rms_name, side.dinv_rms, a.dinv_rms,
             p.batch * heads * tokens_of(side.tokens, p), true, kFloat);
}

/// `overlaps`: the kernel before it on the stream is one of ours, behind which it may begin.
void launch_front(KernelKind kind, const Problem& problem, const OperandValues& values,
                  const Attention& attention, void* stream, bool overlaps) {
  const ResolvedSpec& spec = attention.spec();
  const KernelSpec kernel = kernel_of(kind, Pass::forward, *spec, attention.arch(), {});
  const driver::DeviceScope scope(attention.device());
  launch(loaded_beside(kernel, spec, attention.device(), stream), problem, values,
         static_cast<driver::Stream>(stream), overlaps);
}

/// A tensor of a gate's call.
struct OfGate {
  const char* name;
  O operand;
  const Tensor& tensor;
  bool written;
};

void launch_gate(KernelKind kind, const GateCall& call, std::initializer_list<OfGate> tensors,
                 const Attention& attention) {
  const ResolvedSpec& spec = attention.spec();
  check(spec, call.problem);
  if (spec->packed)
    throw SpecError("gates of a spec of packed sequences are not supported: take one without, "
                    "whose batch of 1 has all tokens");
  const int64_t blocks =
      call.problem.batch * call.problem.heads * front_chunks(Tokens::queries, *spec, call.problem);
  if (blocks > kMostBlocks)
    throw SpecError("gates in " + std::to_string(blocks) +
                    " blocks are not supported: 2^31 - 1 at most; divide the batch");
  OperandValues values{};
  put_sizes(spec, call.problem, values);
  Areas areas;
  for (const OfGate& of : tensors)
    put_tensor(values, areas, of.name, of.operand, of.tensor, Tokens::queries, call.problem,
               spec->head_dim, of.written);
  check_shared_memory(areas);
  launch_front(kind, call.problem, values, attention, call.stream, /*overlaps=*/false);
}

} // namespace

int64_t front_part_floats(Tokens of, const ResolvedSpec& spec, const Problem& p) {
  return p.batch * heads_of(of, p) * front_chunks(of, *spec, p) * spec->head_dim;
}

void front(const FrontCall& a, const Attention& attention) {
  Areas areas;
  const OperandValues values = front_values(a, attention.spec(), /*writes_y=*/true, areas);
  check_shared_memory(areas);
  launch_front(KernelKind::front, a.problem, values, attention, a.stream, /*overlaps=*/false);
}

void front_gradients(const FrontGradientsCall& a, const Attention& attention) {
  const ResolvedSpec& spec = attention.spec();
  Areas areas;
  OperandValues values = front_values(a.of, spec, /*writes_y=*/false, areas);
  put_gradients(values, areas, kQueries, a.of, a.of.q, a.q, spec);
  put_gradients(values, areas, kKeys, a.of, a.of.k, a.k, spec);
  check_shared_memory(areas);
  launch_front(KernelKind::front_gradients, a.of.problem, values, attention, a.of.stream,
               /*overlaps=*/false);
  if (a.q.dgain || a.k.dgain)
    launch_front(KernelKind::front_gains, a.of.problem, values, attention, a.of.stream,
                 /*overlaps=*/true);
}

void gate(const GateCall& a, const Attention& attention) {
  launch_gate(KernelKind::gate, a,
              {{"out", O::out, a.out, false},
               {"gate", O::gate, a.gate, false},
               {"gated", O::gated, a.gated, true}},
              attention);
}

void gate_gradients(const GateGradientsCall& a, const Attention& attention) {
  launch_gate(KernelKind::gate_gradients, a.of,
              {{"out", O::out, a.of.out, false},
               {"gate", O::gate, a.of.gate, false},
               {"gated", O::gated, a.of.gated, false},
               {"dout", O::gate_dout, a.dout, true},
               {"dgate", O::dgate, a.dgate, true}},
              attention);
}

} // namespace sagebwd
