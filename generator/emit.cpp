//===- emit.cpp - KernelSpec to CUDA source ---------------------------------===//
//
// Generated source is one template with all files that it includes. One of these files is the
// configuration, which this file writes. In the template's text only the kernel's name is replaced.
// The source depends on the spec and the templates alone.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "generator/definition.h"
#include "generator/pointwise.h"
#include "generator/ptxas.h"
#include "generator/space.h"

namespace sagebwd {

namespace {

/// The first lines of the file that templates include as configuration.cuh.
const std::string kConfiguration =
    "//===- configuration.cuh - What this kernel is specialised by --------------===//\n"
    "#include \"base.cuh\"\n\n";

/// A template that stands in the place of another one: whoever includes the one gets the other.
struct StandIn {
  std::string_view stands_for, instead;
  std::string_view when; ///< as the source says it
  bool (*stands)(const KernelSpec&);
};

bool has_lists(const KernelSpec& k) { return is_sparse(k.attention); }
constexpr std::string_view kHasLists = "the kernel has lists of blocks";

constexpr StandIn kStandIns[] = {
    {"tile/math/family.cuh", "tile/math/products_wgmma.cuh", "the tile's products are wgmma's",
     [](const KernelSpec& k) { return k.tile.family.instruction() == Instruction::wgmma; }},
    {"tile/math/dp_sums.cuh", "tile/math/dp_sums16.cuh", "the kernel sums dP in FP16",
     [](const KernelSpec& k) { return sums_dp_in_fp16(k.attention); }},
    {"tile/prepass/whole_dout.cuh", "tile/prepass/shared_dout.cuh",
     "linear attention has a part of dO",
     [](const KernelSpec& k) { return is_mixed(k.attention); }},
    {"tile/walk/visible.cuh", "tile/walk/lists.cuh", kHasLists, has_lists},
    {"tile/walk/tiles.cuh", "tile/walk/listed_tiles.cuh", kHasLists, has_lists},
    {"tile/walk/hidden.cuh", "tile/walk/hidden_anywhere.cuh", "any score may be hidden",
     [](const KernelSpec& k) { return hides_anywhere(k.attention); }},
    {"tile/walk/hidden_by_intervals.cuh", "tile/walk/hidden_by_expression.cuh", "there is a mask",
     [](const KernelSpec& k) { return !k.attention.mask.empty(); }},
    {"tile/math/plain_score.cuh", "tile/math/given_score.cuh", "there is a score function",
     [](const KernelSpec& k) { return has_score(k.attention); }},
    {"tile/math/no_max_logits.cuh", "tile/math/max_logits.cuh",
     "the kernel gives each head's largest score",
     [](const KernelSpec& k) { return k.attention.max_logits; }},
    {"tile/math/values_as_given.cuh", "tile/math/smoothed_values.cuh", "V is smoothed",
     [](const KernelSpec& k) { return k.attention.smooth_v; }},
    {"tile/walk/own_keys.cuh", "tile/walk/own_keys_in_order.cuh",
     "the kernel's blocks of keys have lists of queries", has_lists_of_queries},
    {"tile/sla/matrix_sums.cuh", "tile/sla/matrix_sums_wgmma.cuh", "the GPU has wgmma",
     [](const KernelSpec& k) { return k.arch.has_wgmma(); }},
};

/// The text of a template for this kernel. In the place of one that another stands for there is an
/// include of that other, which has a line above it that says so.
std::string template_for(const KernelSpec& k, std::string_view path,
                         const TemplateSource& templates) {
  for (const StandIn& s : kStandIns)
    if (path == s.stands_for && s.stands(k))
      return "#include \"" + std::string(s.instead) + "\"\n";
    else if (path == s.instead && s.stands(k))
      return "// In the place of " + std::string(s.stands_for) + ", as " + std::string(s.when) +
             ":\n" + templates(path);
  return templates(path);
}

} // namespace

KernelSource emit(const KernelSpec& k, const TemplateSource& templates) {
  check_tile(k);
  const KernelDefinition& definition = definition_of(k);
  KernelSource source;
  source.name = kernel_name(k);
  source.threads = definition.threads(k);
  source.shared_bytes = shared_bytes(k);
  if (const PtxasRow* row = ptxas_row(k))
    source.options = {"--ptxas-options=" + std::string(row->option)};

  Configuration c;
  c.line("using Element = " + value_text(k.attention.dtype) + ";");
  visit_places(k.attention, [&](auto... constant) { c.add(constant...); });
  c.add("PLACE_BYTES", k.attention.packed ? kPlaceBytes : 0);
  c.add("PLACE_OFFSET", source.shared_bytes - (k.attention.packed ? kPlaceBytes : 0));
  c.add("ALL_CHANNELS", k.channels == Channels::all);
  c.add("SUM_CHANNELS", sum_channels(k));
  c.add("CHANNEL_PARTS", channel_parts(k));
  c.add("THREADS", source.threads);
  c.add("WARPS", source.threads / 32);
  definition.configure(c, k);
  if (const Roles roles = k.tile.family.roles(); roles == Roles::copier || roles == Roles::pairs) {
    const bool three = k.tile.warps == 12; // three warpgroups multiply
    // The copier needs more for a walk over lists of several heads.
    const bool listed_keys = has_lists_of_queries(k);
    c.add("CONSUMER_REGISTERS", three ? 160 : listed_keys ? 232 : 240);
    c.add("PRODUCER_REGISTERS", three ? 32 : listed_keys ? 40 : 24);
  }

  source.text = "// " + source.name + "\n" +
                "// Generated by sagebwd; complete as it stands: NVRTC and nvcc take it without "
                "headers.\n"
                "#pragma nv_diag_suppress 177 // not every kernel uses every constant\n\n" +
                expanded(root_template_of(k), [&](std::string_view path) {
                  if (path == "configuration.cuh")
                    return kConfiguration + c.text() + "\n" + params_struct(fields_of(k));
                  if (path == "mask_expression.cuh")
                    return mask_source(k.attention);
                  if (path == "mask_ranges.cuh")
                    return mask_ranges_source(k.attention);
                  if (path == "score_expression.cuh")
                    return score_source(k.attention, k.kind == KernelKind::forward);
                  return template_for(k, path, templates);
                });
  const std::string placeholder = "KERNEL(";
  const size_t at = source.text.find(placeholder);
  source.text.replace(at, placeholder.size(), source.name + "(");
  return source;
}

} // namespace sagebwd
