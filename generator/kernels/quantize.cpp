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
  drop_mask(s);
  s.deterministic = plain.deterministic;
  if (!scores8(s)) // nothing is rotated but Q and K for INT8 scores
    s.rotate = plain.rotate;
}

/// What the kernel of one tensor reads and writes.
struct Role {
  KernelKind kind;
  std::string_view name; ///< in the template's enumeration
  O x, rows8, transposed8, transposed8_scale;
  bool has_rows;
  bool (*needed)(Pass, const AttentionSpec&);
};

constexpr Role kRoles[] = {
    {KernelKind::quantize_q, "q", O::q, O::q8, O::qt8, O::q_channels,
     /*has_rows=*/true,
     [](Pass pass, const AttentionSpec& s) { return scores8(s) || pass == Pass::backward; }},
    {KernelKind::quantize_k, "k", O::k, O::k8, O::kt8, O::kt8_scale,
     /*has_rows=*/true,
     [](Pass pass, const AttentionSpec& s) { return scores8(s) || pass == Pass::backward; }},
    {KernelKind::quantize_v, "v", O::v, O::no_bytes, O::vt8, O::vt8_scale,
     /*has_rows=*/false, [](Pass pass, const AttentionSpec&) { return pass == Pass::forward; }},
    {KernelKind::quantize_dout, "dout", O::dout, O::no_bytes, O::dot8, O::q_channels,
     /*has_rows=*/false, [](Pass pass, const AttentionSpec&) { return pass == Pass::backward; }},
};

const Role& role_of(KernelKind kind) {
  for (const Role& role : kRoles)
    if (role.kind == kind)
      return role;
  return kRoles[0];
}

Tokens tokens_of_role(const KernelSpec& k) { return caller_tensor(role_of(k.kind).x).tokens; }

int group_of(const KernelSpec& k) {
  return tokens_of_role(k) == Tokens::queries ? k.attention.group_q : k.attention.group_kv;
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
                               {"transposed8_scale", r.transposed8_scale}};
  for (const Field& field :
       fields_named({O::k_mean, O::k8_scale, O::q_rows, O::lse, O::out, O::dlse}))
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
        const Tokens of = tokens_of_role(k);
        return {blocks_of(padded(tokens_of(of, p)), group_of(k)), blocks_of(heads_of(of, p)),
                blocks_of(p.batch)};
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
