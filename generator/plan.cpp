//===- plan.cpp - Operands, workspace and launch geometry ------------------===//

#include "generator/plan.h"

#include <cstring>

namespace sagebwd {
namespace {

constexpr std::string_view kNames[] = {
#define X(name, type) #name,
    SAGEBWD_OPERANDS(X)
#undef X
};
constexpr std::string_view kTypes[] = {
#define X(name, type) type,
    SAGEBWD_OPERANDS(X)
#undef X
};

using O = Operand;

/// Fields that bear their operand's name.
std::vector<Field> plain(std::initializer_list<Operand> operands) {
  std::vector<Field> fields;
  for (Operand operand : operands)
    fields.push_back({name_of(operand), operand});
  return fields;
}

/// What the quantisation kernel of one tensor reads and writes.
struct QuantizeRole {
  O x, stride_b, stride_h, stride_s, tokens, padded;
  O rows8, transposed8, transposed8_scale;
};

std::vector<Field> quantize_fields(const QuantizeRole& r) {
  std::vector<Field> fields = {{"x", r.x},
                               {"x_stride_b", r.stride_b},
                               {"x_stride_h", r.stride_h},
                               {"x_stride_s", r.stride_s},
                               {"rows8", r.rows8},
                               {"transposed8", r.transposed8},
                               {"transposed8_scale", r.transposed8_scale},
                               {"tokens", r.tokens},
                               {"padded", r.padded}};
  for (O operand :
       {O::k_mean, O::k8_scale, O::q_rows, O::lse, O::out, O::out_stride_b, O::out_stride_h,
        O::out_stride_s, O::dlse, O::heads, O::heads_kv, O::softmax_scale})
    fields.push_back({name_of(operand), operand});
  return fields;
}

// clang-format off
std::vector<Field> make_fields(KernelKind kind) {
  switch (kind) {
  case KernelKind::key_mean_partial:
    return plain({O::k, O::k_stride_b, O::k_stride_h, O::k_stride_s, O::k_partial, O::heads_kv,
                  O::seq_kv});
  case KernelKind::key_mean:
    return plain({O::k_partial, O::k_mean, O::heads_kv, O::seq_kv});
  case KernelKind::quantize_q:
    return quantize_fields({O::q, O::q_stride_b, O::q_stride_h, O::q_stride_s, O::seq_q,
                            O::padded_q, O::q8, O::qt8, O::q_channels});
  case KernelKind::quantize_k:
    return quantize_fields({O::k, O::k_stride_b, O::k_stride_h, O::k_stride_s, O::seq_kv,
                            O::padded_kv, O::k8, O::kt8, O::kt8_scale});
  case KernelKind::quantize_v:
    return quantize_fields({O::v, O::v_stride_b, O::v_stride_h, O::v_stride_s, O::seq_kv,
                            O::padded_kv, O::no_bytes, O::vt8, O::vt8_scale});
  case KernelKind::quantize_dout:
    return quantize_fields({O::dout, O::dout_stride_b, O::dout_stride_h, O::dout_stride_s, O::seq_q,
                            O::padded_q, O::no_bytes, O::dot8, O::q_channels});
  case KernelKind::forward:
    return plain({O::q, O::q_stride_b, O::q_stride_h, O::q_stride_s,
                  O::k, O::k_stride_b, O::k_stride_h, O::k_stride_s,
                  O::out, O::out_stride_b, O::out_stride_h, O::out_stride_s,
                  O::lse, O::q8, O::q_rows, O::k8, O::k8_scale, O::vt8, O::vt8_scale,
                  O::heads, O::heads_kv, O::seq_q, O::seq_kv, O::padded_q, O::padded_kv,
                  O::causal_offset, O::softmax_scale});
  case KernelKind::backward_dq:
    return plain({O::q, O::q_stride_b, O::q_stride_h, O::q_stride_s,
                  O::k, O::k_stride_b, O::k_stride_h, O::k_stride_s,
                  O::v, O::v_stride_b, O::v_stride_h, O::v_stride_s,
                  O::dout, O::dout_stride_b, O::dout_stride_h, O::dout_stride_s,
                  O::dq, O::dq_stride_b, O::dq_stride_h, O::dq_stride_s,
                  O::dlse, O::k_mean, O::q8, O::q_rows, O::k8, O::k8_scale, O::kt8, O::kt8_scale,
                  O::tile_p_max, O::tile_ds_max,
                  O::heads, O::heads_kv, O::seq_q, O::seq_kv, O::padded_q, O::padded_kv,
                  O::causal_offset, O::softmax_scale});
  case KernelKind::backward_dkv:
    return plain({O::q, O::q_stride_b, O::q_stride_h, O::q_stride_s,
                  O::k, O::k_stride_b, O::k_stride_h, O::k_stride_s,
                  O::v, O::v_stride_b, O::v_stride_h, O::v_stride_s,
                  O::dout, O::dout_stride_b, O::dout_stride_h, O::dout_stride_s,
                  O::dk, O::dk_stride_b, O::dk_stride_h, O::dk_stride_s,
                  O::dv, O::dv_stride_b, O::dv_stride_h, O::dv_stride_s,
                  O::q8, O::q_rows, O::k8, O::k8_scale, O::qt8, O::dot8, O::q_channels,
                  O::tile_p_max, O::tile_ds_max,
                  O::heads, O::heads_kv, O::seq_q, O::seq_kv, O::padded_q, O::padded_kv,
                  O::causal_offset, O::softmax_scale});
  }
  return {};
}
// clang-format on

/// One buffer of the workspace.
struct Buffer {
  Operand operand;
  int64_t bytes;
};

int64_t padded(int64_t tokens) { return (tokens + kPadding - 1) / kPadding * kPadding; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require(bool condition, const std::string& what) {
  if (!condition)
    throw SpecError(what);
}

/// More than any device holds, and sums of a few such sizes stay below 2^64.
constexpr int64_t kMaxBytes = int64_t{1} << 62;

void require_addressable(bool condition) {
  require(condition, "the workspace would take more than 2^62 bytes; take a smaller batch, fewer "
                     "heads or shorter sequences");
}

/// The product of positive factors.
int64_t bytes_of(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors) {
    require_addressable(factor <= kMaxBytes / product);
    product *= factor;
  }
  return product;
}

std::vector<Buffer> workspace_buffers(Pass pass, const AttentionSpec& s, const Problem& p) {
  const int64_t d = s.head_dim, heads_q = p.batch * p.heads, heads_k = p.batch * p.heads_kv;
  const int64_t tokens_q = padded(p.seq_q), tokens_k = padded(p.seq_kv);
  const int64_t groups_q = tokens_q / s.group_q, groups_k = tokens_k / s.group_kv;
  const bool scores8 = s.precision == Precision::six_of_seven, backward = pass == Pass::backward;
  std::vector<Buffer> buffers;
  const auto add = [&](Operand operand, std::initializer_list<int64_t> factors) {
    buffers.push_back({operand, bytes_of(factors)});
  };
  if (s.smooth_k && (scores8 || backward)) {
    add(O::k_partial, {heads_k, ceil_div(p.seq_kv, kMeanChunk), d, 4});
    add(O::k_mean, {heads_k, d, 4});
  }
  add(O::q_rows, {heads_q, tokens_q, 3, 4});
  if (scores8) {
    add(O::q8, {heads_q, tokens_q, d});
    add(O::k8, {heads_k, tokens_k, d});
    add(O::k8_scale, {heads_k, tokens_k, 4});
  }
  if (!backward) {
    add(O::vt8, {heads_k, tokens_k, d});
    add(O::vt8_scale, {heads_k, groups_k, d, 4});
    return buffers;
  }
  add(O::qt8, {heads_q, tokens_q, d});
  add(O::dot8, {heads_q, tokens_q, d});
  add(O::q_channels, {heads_q, groups_q, 2, d, 4});
  add(O::kt8, {heads_k, tokens_k, d});
  add(O::kt8_scale, {heads_k, groups_k, d, 4});
  if (s.granularity == Granularity::block) {
    add(O::tile_p_max, {heads_q, groups_q, groups_k, 4});
    add(O::tile_ds_max, {heads_q, groups_q, groups_k, 4});
  }
  return buffers;
}

constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

} // namespace

std::string_view name_of(Operand operand) { return kNames[static_cast<size_t>(operand)]; }
std::string_view type_of(Operand operand) { return kTypes[static_cast<size_t>(operand)]; }

const std::vector<Field>& fields_of(KernelKind kind) {
  static const auto table = [] {
    std::array<std::vector<Field>, static_cast<size_t>(KernelKind::backward_dkv) + 1> fields;
    for (size_t i = 0; i < fields.size(); ++i)
      fields[i] = make_fields(static_cast<KernelKind>(i));
    return fields;
  }();
  return table[static_cast<size_t>(kind)];
}

size_t pack_params(const std::vector<Field>& fields, const OperandValues& values,
                   std::byte* params) {
  size_t offset = 0;
  for (const Field& field : fields) {
    const std::string_view type = type_of(field.operand);
    const size_t size = type == "int" || type == "float" ? 4 : 8;
    offset = (offset + size - 1) / size * size;
    std::memcpy(params + offset, &values[static_cast<size_t>(field.operand)], size);
    offset += size;
  }
  return (offset + 7) / 8 * 8;
}

size_t workspace_bytes(Pass pass, const AttentionSpec& spec, const Problem& problem) {
  check(spec, problem);
  int64_t total = 0;
  for (const Buffer& buffer : workspace_buffers(pass, spec, problem)) {
    require_addressable(aligned(buffer.bytes) <= kMaxBytes - total);
    total += aligned(buffer.bytes);
  }
  return static_cast<size_t>(total);
}

void place_workspace(Pass pass, const AttentionSpec& spec, const Problem& p, uint64_t workspace,
                     OperandValues& values) {
  workspace_bytes(pass, spec, p); // refuses what cannot be placed
  const auto set = [&](Operand operand, uint64_t value) {
    values[static_cast<size_t>(operand)] = value;
  };
  for (const Buffer& buffer : workspace_buffers(pass, spec, p)) {
    set(buffer.operand, workspace);
    workspace += aligned(buffer.bytes);
  }
  set(O::heads, p.heads);
  set(O::heads_kv, p.heads_kv);
  set(O::seq_q, p.seq_q);
  set(O::seq_kv, p.seq_kv);
  set(O::padded_q, padded(p.seq_q));
  set(O::padded_kv, padded(p.seq_kv));
  const int64_t offset = spec.causal == Causal::bottom_right ? p.seq_kv - p.seq_q : 0;
  set(O::causal_offset, static_cast<uint64_t>(offset));
}

Grid grid_of(const KernelSpec& k, const Problem& p) {
  const auto blocks = [](int64_t tokens, int64_t per_block) {
    return static_cast<unsigned>(ceil_div(tokens, per_block));
  };
  const unsigned batch = static_cast<unsigned>(p.batch);
  const unsigned heads = static_cast<unsigned>(p.heads);
  const unsigned heads_kv = static_cast<unsigned>(p.heads_kv);
  switch (k.kind) {
  case KernelKind::key_mean_partial:
    return {blocks(p.seq_kv, kMeanChunk), heads_kv, batch};
  case KernelKind::key_mean:
    return {1, heads_kv, batch};
  case KernelKind::quantize_q:
  case KernelKind::quantize_dout:
    return {blocks(padded(p.seq_q), k.attention.group_q), heads, batch};
  case KernelKind::quantize_k:
  case KernelKind::quantize_v:
    return {blocks(padded(p.seq_kv), k.attention.group_kv), heads_kv, batch};
  case KernelKind::forward:
  case KernelKind::backward_dq:
    return {blocks(p.seq_q, k.tile.block_q), heads, batch};
  case KernelKind::backward_dkv:
    return {blocks(p.seq_kv, k.tile.block_kv), heads_kv, batch};
  }
  return {};
}

void check(const AttentionSpec& spec, const Problem& p) {
  require(spec.group_q > 0 && spec.group_kv > 0,
          "the group sizes of '" + to_string(spec) +
              "' are not filled in: pass the spec through resolved() first");
  const auto named = [](std::string_view name, int64_t value) {
    return std::string(name) + " = " + std::to_string(value);
  };
  // The grid's y and z extents, and token counts as 32-bit integers with room for padding.
  constexpr int64_t kMaxGrid = 65535, kMaxTokens = (int64_t{1} << 31) - 1024;
  require(p.batch >= 1 && p.batch <= kMaxGrid,
          named("batch", p.batch) + " is not supported: 1 to 65535");
  require(p.heads >= 1 && p.heads <= kMaxGrid,
          named("heads", p.heads) + " is not supported: 1 to 65535");
  require(p.heads_kv >= 1 && p.heads % p.heads_kv == 0,
          named("heads", p.heads) + " is not a multiple of " +
              named("key/value heads", p.heads_kv) +
              ": each key/value head serves the same number of query heads");
  require(p.seq_q >= 1 && p.seq_q <= kMaxTokens,
          named("query length", p.seq_q) + " is not supported: 1 to 2^31 - 1024 tokens");
  require(p.seq_kv >= 1 && p.seq_kv <= kMaxTokens,
          named("key length", p.seq_kv) + " is not supported: 1 to 2^31 - 1024 tokens");
  if (spec.granularity == Granularity::block) {
    const double tiles = double(p.batch) * double(p.heads) *
                         double(padded(p.seq_q) / spec.group_q) *
                         double(padded(p.seq_kv) / spec.group_kv);
    require(tiles < 2147483648.0, "granularity 'block' keeps two maxima for each of " +
                                      std::to_string(tiles) +
                                      " tiles: 2^31 are supported; take 'row' or a smaller batch");
  }
}

} // namespace sagebwd
