//===- kernel.cpp - One kernel of an attention operation --------------------===//

#include "generator/definition.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace sagebwd {
namespace {

using Definitions = std::vector<KernelDefinition>;

/// The definitions of a kernel: one, or one for each family that builds the kernel. Every launch
/// looks up a definition, so the table is built only once.
const Definitions& definitions_of(KernelKind kind) {
  static const auto table = [] {
    std::array<Definitions, std::size(Words<KernelKind>::all)> table;
    for (auto group : {key_mean_kernels, quantize_kernels, mean_scores_kernels, list_kernels,
                       linear_kernels, attention_kernels})
      for (KernelDefinition& definition : group())
        table[static_cast<size_t>(definition.kind)].push_back(std::move(definition));
    return table;
  }();
  if (static_cast<size_t>(kind) >= table.size())
    throw SpecError("there is no kernel of number " + std::to_string(static_cast<int>(kind)));
  return table[static_cast<size_t>(kind)];
}

std::vector<KernelKind> tiled_kernels_where(bool (*wanted)(Pass)) {
  std::vector<KernelKind> kinds;
  for (const auto& [kind, name] : Words<KernelKind>::all)
    if (const KernelDefinition& d = definition_of(kind);
        d.tiling && d.of != Backward::fused && wanted(d.tiling->pass))
      kinds.push_back(kind);
  return kinds;
}

AttentionSpec narrowed(const KernelDefinition& definition, AttentionSpec spec) {
  definition.narrow(spec);
  spec.head_dim = width(spec);
  return spec;
}
Channels channels_of(const AttentionSpec& spec) {
  return fills_width(spec) ? Channels::all : Channels::part;
}

/// The values that a kernel's name leaves out. A name always has the head dimension. If group_kv is
/// not the granularity's default, the name has group_q too.
AttentionSpec usual_spec(const KernelDefinition& definition, const AttentionSpec& spec) {
  AttentionSpec usual;
  usual.granularity = spec.granularity;
  usual = narrowed(definition, resolved(usual));
  usual.granularity = AttentionSpec().granularity;
  usual.head_dim = 0;
  if (spec.group_kv != usual.group_kv)
    usual.group_q = 0;
  return usual;
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

const std::vector<KernelKind>& tiled_kernels() {
  static const std::vector<KernelKind> kinds = tiled_kernels_where([](Pass) { return true; });
  return kinds;
}

const std::vector<KernelKind>& tiled_kernels(Pass pass) {
  static const std::vector<KernelKind> kinds[] = {
      tiled_kernels_where([](Pass of) { return of == Pass::forward; }),
      tiled_kernels_where([](Pass of) { return of == Pass::backward; })};
  return kinds[static_cast<int>(pass)];
}

KernelKind parse_tiled_kernel(std::string_view name) {
  std::string known;
  for (KernelKind kind : tiled_kernels()) {
    if (to_string(kind) == name)
      return kind;
    known += (known.empty() ? "" : ", ") + std::string(to_string(kind));
  }
  throw SpecError("'" + std::string(name) + "' is no kernel with tiles: those are " + known);
}

std::string kernel_name(const KernelSpec& k) {
  const KernelDefinition& definition = definition_of(k.kind);
  std::string text = "sagebwd_" + std::string(to_string(k.kind)) + " ";
  if (definition.differs_by_pass)
    text += std::string(to_string(k.pass)) + " ";
  const AttentionSpec usual = usual_spec(definition, k.attention);
  visit_differences(k.attention, usual, [&]<typename T>(const Label& label, const T& value) {
    if constexpr (std::is_same_v<T, bool>)
      text += (value ? " " : " no_") + std::string(label.name);
    else
      text += std::string(label.mark) + value_text(value);
  });
  if (k.channels == Channels::part)
    text += " part";
  if (definition.tiling)
    text += " " + to_string(k.tile);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return text;
}

std::vector<std::pair<std::string, std::string>> labelled(const KernelSpec& k) {
  std::vector<std::pair<std::string, std::string>> fields = {
      {"kind", std::string(to_string(k.kind))}, {"pass", std::string(to_string(k.pass))}};
  const KernelDefinition& definition = definition_of(k.kind);
  if (!definition.differs_by_pass && !definition.tiling)
    fields.pop_back(); // both passes launch it
  const auto add = [&](const Label& label, const auto& value) {
    if (!untold(label, value))
      fields.emplace_back(label.name, value_text(value));
  };
  visit_numerics(k, add);
  if (definition.tiling)
    visit_fields(k.tile, add);
  return fields;
}

KernelSpec kernel_of(KernelKind kind, Pass pass, const AttentionSpec& spec, const Arch& arch,
                     const TileConfig& tile) {
  return {kind, pass, narrowed(definition_of(kind), spec), arch, tile, channels_of(spec)};
}

KernelSpec tiled_kernel(KernelKind kind, const ResolvedSpec& spec, const Arch& arch,
                        const TileConfig& tile) {
  return kernel_of(kind, tiling_of(kind).pass, spec, arch, tile);
}

} // namespace sagebwd
