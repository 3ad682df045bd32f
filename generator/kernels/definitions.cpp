//===- definitions.cpp - The definition of each kernel ----------------------===//

#include "generator/definition.h"

#include <algorithm>
#include <array>

namespace sagebwd {
namespace {

using Definitions = std::vector<KernelDefinition>;

/// The definitions of a kernel: one, or one for each family that builds the kernel. Every launch
/// looks up a definition, so the table is built only once.
const Definitions& definitions_of(KernelKind kind) {
  static const auto table = [] {
    std::array<Definitions, std::size(Words<KernelKind>::all)> table;
    for (auto group :
         {key_mean_kernels, quantize_kernels, mean_scores_kernels, list_kernels, router_kernels,
          linear_kernels, estimated_kernels, front_kernels, attention_kernels})
      for (KernelDefinition& definition : group())
        table[static_cast<size_t>(definition.kind)].push_back(std::move(definition));
    return table;
  }();
  if (static_cast<size_t>(kind) >= table.size())
    throw SpecError("there is no kernel of number " + std::to_string(static_cast<int>(kind)));
  return table[static_cast<size_t>(kind)];
}

} // namespace

const KernelDefinition& definition_of(KernelKind kind, std::optional<Family> family) {
  for (const KernelDefinition& definition : definitions_of(kind))
    if (!family || !definition.tiling || definition.family == *family)
      return definition;
  throw SpecError(std::string(to_string(kind)) + " is not built by the family '" +
                  value_text(*family) + "'");
}

const KernelDefinition& definition_of(const KernelSpec& k) {
  return definition_of(k.kind, k.tile.family);
}

std::string_view root_template_of(const KernelSpec& k) {
  const KernelDefinition& definition = definition_of(k);
  if (very_wide(k.attention) && !definition.very_wide_template.empty())
    return definition.very_wide_template;
  const Int8Products int8 = which_int8(k.attention.precision);
  const bool in_16_bits = !int8.dq && !int8.dk && !int8.dv;
  return in_16_bits && !definition.root_template16.empty() ? definition.root_template16
                                                           : definition.root_template;
}

const Tiling& tiling_of(KernelKind kind, std::optional<Family> family) {
  if (const Tiling* tiling = definition_of(kind, family).tiling)
    return *tiling;
  throw SpecError(std::string(to_string(kind)) + " has no tiles");
}

std::vector<Family> families_of(KernelKind kind) {
  std::vector<Family> families;
  for (const KernelDefinition& definition : definitions_of(kind))
    if (definition.tiling)
      families.push_back(definition.family);
  return families;
}

const std::vector<KernelKind>& tiled_kernels(std::optional<Pass> pass) {
  static const auto lists = [] {
    std::array<std::vector<KernelKind>, 3> lists; // of the forward, of the backward, of both
    for (const auto& [kind, name] : Words<KernelKind>::all)
      if (const KernelDefinition& d = definition_of(kind); d.tiling && d.of != Backward::fused) {
        lists[static_cast<size_t>(d.tiling->pass)].push_back(kind);
        lists[2].push_back(kind);
      }
    return lists;
  }();
  return lists[pass ? static_cast<size_t>(*pass) : 2];
}

KernelKind parse_tiled_kernel(std::string_view name) {
  for (KernelKind kind : tiled_kernels())
    if (to_string(kind) == name)
      return kind;
  throw SpecError("'" + std::string(name) + "' is no kernel with tiles: those are " +
                  joined(tiled_kernels(), ", ", to_string<KernelKind>));
}

const ParamFields& fields_of(const KernelSpec& k) {
  const KernelDefinition& definition = definition_of(k);
  const bool half = sums_dp_in_fp16(k.attention) && !definition.half_fields.empty();
  if (k.attention.smooth_v && !definition.smooth_v_fields.empty())
    return definition.smooth_v_fields;
  if (k.attention.max_logits) {
    const bool changes = hides_anywhere(k.attention) || has_score(k.attention);
    return definition.max_logits_fields[is_sparse(k.attention) ? 1 + changes : changes ? 3 : 0];
  }
  if (!is_sparse(k.attention) && has_score(k.attention) && !definition.score_fields.empty())
    return definition.score_fields;
  const auto& listed = hides_anywhere(k.attention) || has_score(k.attention)
                           ? definition.hiding_fields[half]
                           : definition.listed_fields[half];
  if (is_sparse(k.attention) && !listed.empty())
    return listed;
  return half ? definition.half_fields : definition.fields;
}

std::vector<KernelKind> launch_order(Pass pass, const ResolvedSpec& spec) {
  const Backward other = is_fused(spec) ? Backward::split : Backward::fused;
  std::vector<KernelKind> order;
  for (const auto& [kind, name] : Words<KernelKind>::all)
    if (const KernelDefinition& definition = definition_of(kind);
        definition.of != other && includes(definition.passes, pass) &&
        (!definition.needed || definition.needed(pass, *spec)))
      order.push_back(kind);
  // backward_dkv comes before backward_dq, because copies that backward_dkv reads can lie in dQ's
  // memory until then. If a group has one scale, backward_dkv needs maxima that backward_dq finds,
  // and comes after it.
  const auto dq = std::find(order.begin(), order.end(), KernelKind::backward_dq);
  if (dq != order.end() && !grouping_of(spec->granularity).one_scale)
    std::iter_swap(dq, std::find(order.begin(), order.end(), KernelKind::backward_dkv));
  return order;
}

} // namespace sagebwd
