//===- kernel.cpp - One kernel of an attention operation --------------------===//

#include "generator/definition.h"
#include "generator/space.h"

#include <algorithm>
#include <cctype>

namespace sagebwd {
namespace {

AttentionSpec narrowed(const KernelDefinition& definition, Pass pass, AttentionSpec spec) {
  // Mostly it is which kernels a pass has, and not what they are.
  if (pass == Pass::forward || !definition.shares_dout)
    spec.linear = LinearKeys::none;
  if (definition.kind != KernelKind::forward) // it alone has all scores
    spec.max_logits = false;
  // The backward reads V as it comes, and O.
  if (pass == Pass::backward ||
      (definition.kind != KernelKind::forward && definition.smooth_v_fields.empty()))
    spec.smooth_v = false;
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
  usual = narrowed(definition, Pass::forward, resolved(usual));
  usual.granularity = AttentionSpec().granularity;
  usual.head_dim = 0;
  if (spec.group_kv != usual.group_kv)
    usual.group_q = 0;
  return usual;
}

/// A text as 16 digits, because a name cannot have every character: FNV-1a of 64 bits.
std::string digits_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text)
    hash = (hash ^ c) * 0x100000001b3;
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4)
    digits += "0123456789abcdef"[hash >> shift & 15];
  return digits;
}

} // namespace

std::string kernel_name(const KernelSpec& k) {
  const KernelDefinition& definition = definition_of(k.kind);
  std::string text = "sagebwd_" + std::string(to_string(k.kind)) + " ";
  if (definition.differs_by_pass)
    text += std::string(to_string(k.pass)) + " ";
  const AttentionSpec usual = usual_spec(definition, k.attention);
  visit_differences(k.attention, usual, [&]<typename T>(const Label& label, const T& value) {
    if constexpr (std::is_same_v<T, bool>)
      text += (value ? " " : " no_") + std::string(label.name);
    else if constexpr (std::is_same_v<T, std::string>)
      text += " " + std::string(label.name) + "_" + digits_of(value);
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

KernelSpec read_labelled(const std::function<std::string(const std::string&)>& text_of,
                         const Arch& arch) {
  KernelSpec k{parse_word<KernelKind>(text_of("kind")), Pass::forward, {}, arch, {}};
  if (const std::string pass = text_of("pass"); !pass.empty())
    k.pass = parse_word<Pass>(pass);
  const auto read = [&]<typename T>(const Label& label, T& value) {
    value = read_value<T>(label, text_of(std::string(label.name)));
  };
  visit_numerics(k, read);
  if (definition_of(k.kind).tiling)
    visit_fields(k.tile, read);
  if (!includes(kWidths, k.attention.head_dim))
    throw SpecError("no kernel has the head dimension " + std::to_string(k.attention.head_dim));
  check_tile(k);
  return k;
}

KernelSpec kernel_of(KernelKind kind, Pass pass, const AttentionSpec& spec, const Arch& arch,
                     const TileConfig& tile) {
  return {kind, pass, narrowed(definition_of(kind), pass, spec), arch, tile, channels_of(spec)};
}

KernelSpec tiled_kernel(KernelKind kind, const ResolvedSpec& spec, const Arch& arch,
                        const TileConfig& tile) {
  return kernel_of(kind, tiling_of(kind).pass, spec, arch, tile);
}

} // namespace sagebwd
