//===- quantize.cpp - INT8 copies of Q, K, V and dO ------------------------===//
//
// One template in four roles: each tensor in rows for S, transposed for the products that sum over
// tokens, or both.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

bool scores8(const AttentionSpec& s) { return s.precision == Precision::six_of_seven; }

void narrow(AttentionSpec& s) {
  const AttentionSpec plain;
  s.causal = plain.causal;
  s.deterministic = plain.deterministic;
  if (!scores8(s)) // nothing is rotated but Q and K for INT8 scores
    s.rotate = plain.rotate;
}

/// What the kernel of one tensor reads and writes.
struct Role {
  KernelKind kind;
  std::string_view name; ///< in the template's enumeration
  O x, tokens, padded, rows8, transposed8, transposed8_scale;
  bool of_queries, has_rows;
  bool (*needed)(Pass, const AttentionSpec&);
};

constexpr Role kRoles[] = {
    {KernelKind::quantize_q, "q", O::q, O::seq_q, O::padded_q, O::q8, O::qt8, O::q_channels,
     /*of_queries=*/true, /*has_rows=*/true,
     [](Pass pass, const AttentionSpec& s) { return scores8(s) || pass == Pass::backward; }},
    {KernelKind::quantize_k, "k", O::k, O::seq_kv, O::padded_kv, O::k8, O::kt8, O::kt8_scale,
     /*of_queries=*/false, /*has_rows=*/true,
     [](Pass pass, const AttentionSpec& s) { return scores8(s) || pass == Pass::backward; }},
    {KernelKind::quantize_v, "v", O::v, O::seq_kv, O::padded_kv, O::no_bytes, O::vt8, O::vt8_scale,
     /*of_queries=*/false, /*has_rows=*/false,
     [](Pass pass, const AttentionSpec&) { return pass == Pass::forward; }},
    {KernelKind::quantize_dout, "dout", O::dout, O::seq_q, O::padded_q, O::no_bytes, O::dot8,
     O::q_channels, /*of_queries=*/true, /*has_rows=*/false,
     [](Pass pass, const AttentionSpec&) { return pass == Pass::backward; }},
};

const Role& role_of(KernelKind kind) {
  for (const Role& role : kRoles)
    if (role.kind == kind)
      return role;
  return kRoles[0];
}

int group_of(const KernelSpec& k) {
  return role_of(k.kind).of_queries ? k.attention.group_q : k.attention.group_kv;
}

/// The template calls what it reads and writes the same in every role.
std::vector<Field> fields_of_role(const Role& r) {
  const auto x_stride = [&](int i) {
    return static_cast<O>(static_cast<int>(strides_of(r.x)) + i);
  };
  std::vector<Field> fields = {{"x", r.x},
                               {"x_stride_b", x_stride(0)},
                               {"x_stride_h", x_stride(1)},
                               {"x_stride_s", x_stride(2)},
                               {"rows8", r.rows8},
                               {"transposed8", r.transposed8},
                               {"transposed8_scale", r.transposed8_scale},
                               {"tokens", r.tokens},
                               {"padded", r.padded}};
  for (const Field& field : fields_named({O::k_mean, O::k8_scale, O::q_rows, O::lse, O::out,
                                          O::dlse, O::heads, O::heads_kv, O::softmax_scale}))
    fields.push_back(field);
  return fields;
}

void configure(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const Role& role = role_of(k.kind);
  c.line("enum class Role { q, k, v, dout };");
  c.line("constexpr Role ROLE = Role::" + std::string(role.name) + ";");
  c.add("GROUP", group_of(k));
  c.add("BLOCK_SCALES", grouping_of(s.granularity).one_scale);
  c.add("ROTATE", s.rotate && scores8(s));
  c.add("BACKWARD", k.pass == Pass::backward);
  // Q meets the mean only where its scores are those of smoothed keys.
  const bool of_k = k.kind == KernelKind::quantize_k, of_q = k.kind == KernelKind::quantize_q;
  c.add("USES_MEAN", s.smooth_k && (of_k || (of_q && scores8(s))));
  c.add("WRITE_ROWS", role.has_rows && scores8(s));
  c.add("WRITE_TRANSPOSED", k.pass == Pass::backward || !role.has_rows);
}

KernelDefinition definition(const Role& role) {
  return {
      .kind = role.kind,
      .differs_by_pass = true,
      .needed = role.needed,
      .narrow = narrow,
      .fields = fields_of_role(role),
      .root_template = "kernels/quantize.cuh",
      .configure = configure,
      .threads = [](const KernelSpec& k) { return k.attention.head_dim / 8 * group_of(k) / 4; },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        const bool of_queries = role_of(k.kind).of_queries;
        return {blocks_of(padded(of_queries ? p.seq_q : p.seq_kv), group_of(k)),
                blocks_of(of_queries ? p.heads : p.heads_kv), blocks_of(p.batch)};
      },
  };
}

} // namespace

std::vector<KernelDefinition> quantize_kernels() {
  std::vector<KernelDefinition> kernels;
  for (const Role& role : kRoles)
    kernels.push_back(definition(role));
  return kernels;
}

} // namespace sagebwd
