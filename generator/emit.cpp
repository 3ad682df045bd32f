//===- emit.cpp - KernelSpec to CUDA source ---------------------------------===//
//
// Generated source is one template with what it includes, its configuration among it, unchanged but
// for the kernel's name. Nothing here depends on anything but the spec and the templates.
//
//===----------------------------------------------------------------------===//

#include "generator/plan.h"
#include "generator/templates.h"

namespace sagebwd {

namespace {

/// The template of a kernel; all others are reached by its includes.
std::string_view template_of(KernelKind kind) {
  switch (kind) {
  case KernelKind::key_mean_partial:
    return "kernels/key_mean_partial.cuh";
  case KernelKind::key_mean:
    return "kernels/key_mean.cuh";
  case KernelKind::forward:
    return "kernels/forward.cuh";
  case KernelKind::backward_dq:
    return "kernels/backward_dq.cuh";
  case KernelKind::backward_dkv:
    return "kernels/backward_dkv.cuh";
  default:
    return "kernels/quantize.cuh";
  }
}

/// How the stand-in for templates/configuration.cuh starts.
const std::string kConfiguration =
    "//===- configuration.cuh - What this kernel is specialised by --------------===//\n"
    "#include \"base.cuh\"\n\n";

/// The constants a template is specialised by.
class Configuration {
public:
  void add(std::string_view name, int value) {
    text_ += "constexpr int " + std::string(name) + " = " + std::to_string(value) + ";\n";
  }
  void add(std::string_view name, bool value) {
    text_ += "constexpr bool " + std::string(name) + (value ? " = true;\n" : " = false;\n");
  }
  void line(const std::string& text) { text_ += text + "\n"; }
  const std::string& text() const { return text_; }

private:
  std::string text_;
};

int threads_of(const KernelSpec& k) {
  const int octets = k.attention.head_dim / 8;
  switch (k.kind) {
  case KernelKind::key_mean_partial:
    return octets * 16;
  case KernelKind::key_mean:
    return k.attention.head_dim;
  case KernelKind::quantize_q:
  case KernelKind::quantize_dout:
    return octets * k.attention.group_q / 4;
  case KernelKind::quantize_k:
  case KernelKind::quantize_v:
    return octets * k.attention.group_kv / 4;
  default:
    return k.tile.warps * 32;
  }
}

void configure_quantize(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const bool scores8 = s.precision == Precision::six_of_seven;
  const bool of_q = k.kind == KernelKind::quantize_q, of_k = k.kind == KernelKind::quantize_k;
  const bool of_queries = of_q || k.kind == KernelKind::quantize_dout;
  c.line("enum class Role { q, k, v, dout };");
  c.line(std::string("constexpr Role ROLE = Role::") +
         (of_q         ? "q"
          : of_k       ? "k"
          : of_queries ? "dout"
                       : "v") +
         ";");
  c.add("GROUP", of_queries ? s.group_q : s.group_kv);
  c.add("BLOCK_SCALES", s.granularity == Granularity::block);
  c.add("ROTATE", s.rotate);
  c.add("BACKWARD", k.pass == Pass::backward);
  // Q meets the mean only where its scores are those of smoothed keys.
  c.add("USES_MEAN", s.smooth_k && (of_k || (of_q && scores8)));
  c.add("WRITE_ROWS", (of_q || of_k) && scores8);
  c.add("WRITE_TRANSPOSED", k.pass == Pass::backward || k.kind == KernelKind::quantize_v);
}

void configure_attention(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const bool qk16 = s.precision == Precision::qk16;
  c.add("CAUSAL", s.causal != Causal::none);
  c.add("QK16", qk16);
  c.add("SMOOTH_K", s.smooth_k);
  c.add("USES_MEAN", s.smooth_k && !qk16);
  c.add("BLOCK_SCALES", s.granularity == Granularity::block);
  c.add("GROUP_Q", s.group_q);
  c.add("GROUP_KV", s.group_kv);
  c.add("BLOCK_Q", k.tile.block_q);
  c.add("BLOCK_KV", k.tile.block_kv);
  c.add("WARPS", k.tile.warps);
  c.add("STAGES", k.tile.stages);
  c.add("BLOCKS_PER_SM", k.tile.blocks_per_sm);
  c.add("SHARED_BYTES", shared_bytes(k.kind, s, k.tile));
  // ptxas needs the registers for wgmma's accumulators; with mma.sync it makes worse use of them.
  c.add("LEAN_COPIES", k.tile.family == Family::wgmma);
  // Unrolled, this product takes registers that dK and dV under `block` do not leave at 128. What
  // does not spill differs among datacentre Blackwells.
  const bool blackwell = k.arch.major == 10 || k.arch.major == 11;
  const bool roomy = blackwell && s.causal != Causal::none && (qk16 || k.arch.name == "sm_103");
  const bool crowded = k.kind == KernelKind::backward_dkv && s.head_dim > 64 &&
                       s.granularity == Granularity::block && !roomy;
  c.add("VALUE_UNROLL", !crowded ? s.head_dim / 16 : blackwell ? 2 : 1);
  // A operands stay in registers where they leave room for the accumulators.
  const bool narrow = s.head_dim <= 64 && k.tile.blocks_per_sm * k.tile.warps <= 8;
  const bool forward = k.kind == KernelKind::forward;
  const bool dq = k.kind == KernelKind::backward_dq;
  c.add("SCORE_ROWS_IN_REGISTERS", narrow || forward || (dq && !qk16 && s.group_kv == 64));
  c.add("VALUE_ROWS_IN_REGISTERS", narrow);
}

std::string params_struct(KernelKind kind) {
  std::string text = "struct Params {\n";
  for (const Field& field : fields_of(kind))
    text += "  " + std::string(type_of(field.operand)) + " " + std::string(field.name) + ";\n";
  return text + "};\n";
}

} // namespace

KernelSource emit_from(const TemplateSource& templates, const KernelSpec& kernel) {
  KernelSpec k = kernel;
  k.attention = resolved(k.attention, k.arch);
  check_tile(k);

  KernelSource source;
  source.name = kernel_name(k);
  source.threads = threads_of(k);
  source.shared_bytes = shared_bytes(k.kind, k.attention, k.tile);

  // ptxas' own balance between speed and registers spills a few bytes here.
  if (k.kind == KernelKind::backward_dkv && k.tile.family == Family::mma)
    source.options.push_back("--ptxas-options=--register-usage-level=0");

  Configuration c;
  c.line(std::string("using Element = ") + std::string(to_string(k.attention.dtype)) + ";");
  c.add("HEAD_DIM", k.attention.head_dim);
  c.add("THREADS", source.threads);
  if (k.kind == KernelKind::key_mean_partial || k.kind == KernelKind::key_mean)
    c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
  else if (k.kind < KernelKind::forward)
    configure_quantize(c, k);
  else
    configure_attention(c, k);

  source.text =
      "// " + source.name + "\n" +
      "// Generated by sagebwd; complete as it stands: NVRTC and nvcc take it without "
      "headers.\n"
      "#pragma nv_diag_suppress 177 // not every kernel uses every constant\n\n" +
      expanded(template_of(k.kind), [&](std::string_view path) {
        if (path == "configuration.cuh")
          return kConfiguration + c.text() + "\n" + params_struct(k.kind);
        if (path == "tile/family.cuh")
          return "#include \"tile/products_" + std::string(to_string(k.tile.family)) + ".cuh\"\n";
        return templates(path);
      });
  const std::string placeholder = "KERNEL(";
  const size_t at = source.text.find(placeholder);
  source.text.replace(at, placeholder.size(), source.name + "(");
  return source;
}

KernelSource emit(const KernelSpec& kernel) { return emit_from(embedded_template, kernel); }

} // namespace sagebwd
