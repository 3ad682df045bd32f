//===- covering.cpp - Which kernels the compile tests compile ---------------===//

#include "tests/templates/covering.h"
#include "generator/choice.h"
#include "generator/operation.h"

#include <cstdlib>

namespace sagebwd::test {

bool is_twin(std::string_view arch) {
  return !std::getenv("SAGEBWD_TEST_EVERYTHING") && (arch == "sm_89" || arch == "sm_121");
}

Form form_of(const AttentionSpec& s) {
  return s.granularity == Granularity::block ? block : s.sink_keys == 0 ? row : row_with_sink;
}

namespace {

/// Whether gradients of wide heads fit its shared memory.
bool fits_wide(const Arch& arch) { return arch.max_shared_bytes > 128 * 1024; }

/// Each precision in each form, and the two-valued fields so that any two of them take all four
/// pairs of values, with every precision and every form both: a mixed orthogonal array's merits in
/// twelve specs. `turn` flips fields, so that architectures differ.
std::vector<AttentionSpec> covering_specs(int turn) {
  std::vector<AttentionSpec> specs;
  for (const auto& [precision, word] : Words<Precision>::all)
    for (int form = 0; form < kForms; ++form) {
      const int low = static_cast<int>(precision) & 1, high = static_cast<int>(precision) >> 1;
      const auto flipped = [&](int value, int field) { return (value ^ turn >> field) & 1; };
      AttentionSpec s;
      s.precision = precision;
      s.granularity = form == block ? Granularity::block : Granularity::row;
      s.sink_keys = form == row ? 0 : -1;
      if (form == row && flipped(low, 0))
        s.window_left = 100;
      s.packed = form != block && flipped(low ^ high, 2);
      s.head_dim = low ^ (form == row) ? 128 : 64;
      s.dtype = flipped(high ^ (form == row), 0) ? DType::fp16 : DType::bf16;
      s.causal = flipped(low ^ high ^ (form == block), 1) ? Causal::top_left : Causal::none;
      s.smooth_k = s.rotate = flipped(high ^ (form == block), 2);
      specs.push_back(s);
    }
  return specs;
}

} // namespace

std::vector<Pair> covering_pairs() {
  std::vector<Pair> pairs;
  for (size_t turn = 0; turn < std::size(kArchs); ++turn)
    for (const AttentionSpec& spec : covering_specs(static_cast<int>(turn)))
      pairs.push_back({spec, &find_arch(kArchs[turn])});
  // Most will use these, on every architecture: six of seven, smoothed and rotated.
  for (const char* arch : kArchs)
    for (int head_dim : {64, 128}) {
      AttentionSpec spec;
      spec.head_dim = head_dim, spec.causal = Causal::top_left;
      pairs.push_back({spec, &find_arch(arch), true});
      if (head_dim == 64) // 128 channels leave the fewest registers
        continue;
      spec.causal = Causal::none;
      pairs.push_back({spec, &find_arch(arch), true});
      spec.granularity = Granularity::block;
      pairs.push_back({spec, &find_arch(arch), true});
    }
  // Smoothed queries, of each precision that has them in both granularities, on six architectures.
  for (size_t turn = 0; turn < 6; ++turn) {
    constexpr Precision kPrecisions[] = {Precision::six_of_seven, Precision::dv16,
                                         Precision::gradients16};
    AttentionSpec spec;
    spec.smooth_q = true;
    spec.head_dim = turn % 4 == 3 ? 56 : turn % 2 ? 64 : 128;
    spec.precision = kPrecisions[turn % 3];
    spec.granularity = turn / 3 % 2 ? Granularity::block : Granularity::row;
    spec.causal = turn % 4 < 2 ? Causal::top_left : Causal::none;
    spec.deterministic = turn < 4;
    pairs.push_back({spec, &find_arch(kArchs[turn * 3 / 2])});
  }
  // Smoothed values, of each format of S, in both granularities and widths, on six architectures.
  for (size_t turn = 0; turn < 6; ++turn) {
    AttentionSpec spec;
    spec.smooth_v = true;
    spec.head_dim = turn % 3 == 2 ? 64 : 128;
    spec.precision = turn % 4 == 3 ? Precision::qk16 : Precision::six_of_seven;
    spec.granularity = turn == 4 ? Granularity::block : Granularity::row;
    spec.causal = turn % 2 ? Causal::top_left : Causal::none;
    spec.packed = turn == 2;
    spec.smooth_k = turn != 5;
    pairs.push_back({spec, &find_arch(kArchs[turn * 3 / 2])});
  }
  // The largest scores, which the forward alone gives, with every format of S, granularity, mask
  // and width on some architecture.
  for (size_t turn = 0; turn < 2 * std::size(kArchs); ++turn) {
    const Arch& arch = find_arch(kArchs[turn % std::size(kArchs)]);
    AttentionSpec spec;
    spec.max_logits = true;
    spec.head_dim = turn % 5 == 4 && fits_wide(arch) ? 256 : turn % 2 ? 128 : 64;
    spec.precision = turn % 7 == 2 ? Precision::qk16 : Precision::six_of_seven;
    const bool block = turn % 6 == 5 && spec.head_dim <= 128;
    spec.granularity = block ? Granularity::block : Granularity::row;
    spec.causal = turn % 4 < 2 ? Causal::top_left : Causal::none;
    if (turn % 3 == 1)
      spec.sparse_q = spec.sparse_kv = 128;
    else if (turn % 9 == 2)
      spec.mask = "q - k < 512";
    else if (!block)
      spec.packed = turn % 2;
    if (turn < std::size(kArchs) || arch.name != "sm_90a") // which has most kernels
      pairs.push_back({spec, &arch});
  }
  // Sums of dP in FP16, of every precision and form on some architecture, split and fused.
  for (size_t turn = 0; turn < 2 * std::size(kArchs); ++turn) {
    const Arch& arch = find_arch(kArchs[turn % std::size(kArchs)]);
    AttentionSpec spec;
    spec.dp_sums = DpSums::fp16;
    spec.head_dim = turn % 5 == 4 ? 56 : turn % 2 ? 64 : 128;
    spec.precision = std::begin(Words<Precision>::all)[turn % 4].first;
    spec.granularity = turn % 3 == 1 ? Granularity::block : Granularity::row;
    spec.causal = turn / 2 % 2 ? Causal::top_left : Causal::none;
    spec.packed = turn % 3 == 2;
    spec.dtype = turn % 7 < 3 ? DType::fp16 : DType::bf16;
    spec.deterministic = turn % 4 < 2;
    if (arch.name != "sm_90a") // whose own families have none
      pairs.push_back({spec, &arch});
  }
  // Lists of blocks, of every size, precision and granularity on some architecture.
  for (size_t turn = 0; turn < 2 * std::size(kArchs); ++turn) {
    const Arch& arch = find_arch(kArchs[turn % std::size(kArchs)]);
    AttentionSpec spec;
    spec.head_dim = turn % 2 ? 64 : 128;
    spec.precision = std::begin(Words<Precision>::all)[turn / 2 % 4].first;
    spec.granularity = turn % 3 == 1 ? Granularity::block : Granularity::row;
    spec.sparse_q = turn % 5 == 2 && turn % 3 != 1 ? 64 : 128;
    spec.sparse_kv = turn % 4 == 3 ? 128 : 64;
    spec.causal = turn % 4 < 2 ? Causal::top_left : Causal::none;
    if (turn % 7 == 6 && arch.name != "sm_90a")
      spec.dp_sums = DpSums::fp16;
    pairs.push_back({spec, &arch});
  }
  // Keys with intervals, of every number, precision and granularity on some architecture; on the
  // second turn masks and score functions that are expressions.
  for (size_t turn = 0; turn < 2 * std::size(kArchs); ++turn) {
    const Arch& arch = find_arch(kArchs[turn % std::size(kArchs)]);
    AttentionSpec spec;
    spec.head_dim = turn % 2 ? 128 : turn % 3 == 2 && fits_wide(arch) ? 256 : 64;
    spec.precision = std::begin(Words<Precision>::all)[(turn + turn / 4) % 4].first;
    const bool block = turn % 5 == 4 && spec.head_dim <= 128; // mma.sync lacks some of wide heads
    spec.granularity = block ? Granularity::block : Granularity::row;
    spec.causal = turn % 3 ? Causal::top_left : Causal::none;
    if (turn < std::size(kArchs))
      spec.intervals = turn % 3 == 2 ? 1 : turn % 3 == 0 && turn % 2 ? 4 : 2;
    else if (turn % 2 || block || spec.head_dim > 128)
      spec.mask = "doc[b, q] == doc[b, k] & q - k < 512";
    else
      spec.score = "30.0 * tanh(s / 30.0)";
    if (turn < std::size(kArchs) || arch.name != "sm_90a") // which has most kernels
      pairs.push_back({spec, &arch});
  }
  // Wide heads, wherever their gradients fit.
  for (const char* name : kArchs)
    for (Causal causal : {Causal::none, Causal::top_left}) {
      AttentionSpec spec;
      spec.head_dim = 256, spec.causal = causal;
      if (const Arch& arch = find_arch(name); fits_wide(arch))
        pairs.push_back({spec, &arch});
    }
  // Very wide heads: on each architecture both precisions, with and without each mask, packing, a
  // sink and channels behind the caller's.
  for (const char* name : kArchs)
    for (int form = 0; form < 8; ++form) {
      AttentionSpec spec;
      spec.head_dim = form & 1 ? 320 : 512;
      spec.precision = form & 2 ? Precision::gradients16 : Precision::six_of_seven;
      spec.causal = form & 4 ? Causal::top_left : Causal::none;
      spec.dtype = form % 3 ? DType::bf16 : DType::fp16;
      spec.packed = form == 1 || form == 2 || form == 4 || form == 7;
      spec.window_left = form == 0 || form == 3 || form == 4 || form == 7 ? 100 : kNoWindow;
      spec.sink_keys = form == 5 ? 0 : -1;
      spec.rotate = form != 5, spec.smooth_k = form != 6;
      pairs.push_back({spec, &find_arch(name)});
    }
  // Lists of blocks of wide heads, some of which do not fill the width.
  for (size_t turn = 0; turn < 2 * std::size(kArchs); ++turn)
    if (const Arch& arch = find_arch(kArchs[turn % std::size(kArchs)]); fits_wide(arch))
      for (int keys : {64, 128}) {
        AttentionSpec spec;
        spec.head_dim = turn % 3 == 2 ? 160 : 256;
        spec.precision = std::begin(Words<Precision>::all)[(turn + keys / 128) % 4].first;
        spec.granularity = turn % 5 == 1 ? Granularity::block : Granularity::row;
        spec.sparse_q = turn % 2 && turn % 5 != 1 ? 64 : 128, spec.sparse_kv = keys;
        spec.causal = turn % 4 < 2 ? Causal::none : Causal::top_left;
        spec.dtype = turn % 7 < 3 ? DType::fp16 : DType::bf16;
        pairs.push_back({spec, &arch});
      }
  // Lists of heads that do not fill 128 channels, where registers are shortest.
  AttentionSpec shortest;
  shortest.head_dim = 80, shortest.causal = Causal::top_left;
  shortest.precision = Precision::qk16, shortest.granularity = Granularity::block;
  shortest.sparse_q = 128, shortest.sparse_kv = 64;
  pairs.push_back({shortest, &find_arch("sm_90a")});
  // Heads that do not fill a width, of each precision, some with a window.
  for (size_t turn = 0; turn < std::size(kArchs); ++turn)
    for (const auto& [precision, word] : Words<Precision>::all) {
      const Arch& arch = find_arch(kArchs[turn]);
      const size_t form = turn + static_cast<size_t>(precision);
      AttentionSpec spec;
      spec.head_dim = form % 3 == 0 ? 56 : form % 3 == 1 || !fits_wide(arch) ? 120 : 248;
      spec.dtype = form % 2 ? DType::fp16 : DType::bf16;
      spec.causal = form % 4 < 2 ? Causal::top_left : Causal::none;
      spec.precision = precision;
      spec.window_left = form % 2 ? 100 : kNoWindow;
      spec.packed = form % 5 == 0;
      pairs.push_back({spec, &arch});
    }
  // Pairs of warpgroups, with a sum that starts from zeros too.
  for (Precision precision : {Precision::six_of_seven, Precision::gradients16})
    for (Causal causal : {Causal::none, Causal::top_left})
      for (int sink_keys : {-1, 0}) {
        AttentionSpec spec;
        spec.head_dim = 256, spec.precision = precision, spec.causal = causal;
        spec.dtype = sink_keys == 0 ? DType::fp16 : DType::bf16, spec.sink_keys = sink_keys;
        spec.window_left = sink_keys == 0 && causal == Causal::top_left ? 100 : kNoWindow;
        spec.packed = (sink_keys == 0) == (causal == Causal::none);
        pairs.push_back({spec, &find_arch("sm_90a")});
      }
  // Packed sequences in the specialised family's kernels with 16-bit gradients.
  for (int head_dim : {64, 128}) {
    AttentionSpec spec;
    spec.head_dim = head_dim, spec.precision = Precision::gradients16, spec.packed = true;
    pairs.push_back({spec, &find_arch("sm_90a")});
  }
  // The fused backward, wherever it is mma's default.
  for (const char* name : kArchs)
    for (int head_dim : {64, 128})
      for (const auto& [precision, word] : Words<Precision>::all) {
        AttentionSpec spec;
        spec.precision = precision, spec.deterministic = false, spec.head_dim = head_dim;
        spec.causal = pairs.size() % 2 ? Causal::top_left : Causal::none;
        const Arch& arch = find_arch(name);
        if (default_fused_tile(resolved(spec), arch, Family::mma))
          pairs.push_back({spec, &arch});
      }
  return pairs;
}

std::vector<AttentionSpec> covering_sums() {
  std::vector<AttentionSpec> specs;
  for (int bits = 0; bits < 8; ++bits)
    for (int form = 0; form < kForms; ++form) {
      if ((__builtin_popcount(static_cast<unsigned>(bits)) + form) % 2) // any three fields meet
        continue;
      AttentionSpec spec;
      spec.precision = Precision::gradients16, spec.deterministic = false;
      spec.dq_sums = DqSums::fp16;
      spec.head_dim = bits & 1 ? 128 : 64;
      spec.dtype = bits & 2 ? DType::fp16 : DType::bf16;
      spec.causal = bits & 4 ? Causal::top_left : Causal::none;
      spec.granularity = form == block ? Granularity::block : Granularity::row;
      spec.sink_keys = form == row ? 0 : -1, spec.smooth_k = form != row;
      specs.push_back(spec);
    }
  return specs;
}

std::vector<AttentionSpec> covering_quantize(const Arch& arch) {
  // Sixteen specs by four bits: head dimension and precision take two each, and every other field
  // a sum of bits of both, so that any two fields take all their pairs of values. Architectures
  // differ in what the sums start from.
  const int head_dims[4][2] = {
      {64, 56}, {128, 120}, {fits_wide(arch) ? 256 : 104, fits_wide(arch) ? 248 : 40}, {32, 96}};
  int turn = 0;
  for (const char* name : kArchs)
    if (name != arch.name)
      ++turn;
    else
      break;
  std::vector<AttentionSpec> specs;
  for (int bits = 0; bits < 16; ++bits) {
    const auto sum = [&](int of, int field) {
      return (__builtin_popcount(static_cast<unsigned>(bits & of)) ^ turn >> field) & 1;
    };
    const int form = 2 * sum(0b1010, 0) + sum(0b0101, 1);
    AttentionSpec s;
    s.head_dim = head_dims[bits >> 2][turn & 1];
    s.precision = static_cast<Precision>(bits & 3);
    s.granularity = form == 3 ? Granularity::block : Granularity::row;
    if (s.head_dim > 128 && s.precision == Precision::qk16 && form == 3)
      s.head_dim = turn & 1 ? 40 : 104; // mma.sync has no backward of these
    s.sink_keys = form == 1 ? 0 : -1;
    s.dtype = sum(0b1001, 0) ? DType::fp16 : DType::bf16;
    s.smooth_k = sum(0b1011, 1);
    s.rotate = sum(0b0110, 2);
    s.deterministic = sum(0b0111, 0);
    s.packed = sum(0b1110, 1) && s.granularity == Granularity::row;
    s.smooth_q = sum(0b1101, 2) && !s.packed && which_int8(s.precision).s;
    s.smooth_v = !sum(0b1101, 2); // no other sum is left
    specs.push_back(s);
  }
  return specs;
}

std::map<std::string, KernelSpec> covering_kernels(const Arch& arch) {
  std::map<std::string, KernelSpec> kernels;
  const auto add_with = [&](const AttentionSpec& spec, const Tiles& tiles, auto wanted) {
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& kernel : Operation(resolved(spec), arch, tiles).kernels(pass))
        if (wanted(kernel.kind) && (!spec.max_logits || kernel.kind == KernelKind::forward) &&
            (!spec.smooth_v || pass == Pass::forward))
          kernels.emplace(std::string(arch.name) + " " + kernel_name(kernel), kernel);
    if (hides_anywhere(spec)) {
      const KernelSpec bits =
          kernel_of(has_intervals(spec) ? KernelKind::interval_bits : KernelKind::mask_bits,
                    Pass::forward, resolved(spec), arch, {});
      kernels.emplace(std::string(arch.name) + " " + kernel_name(bits), bits);
    }
  };
  const auto add = [&](const AttentionSpec& spec, auto wanted) {
    add_with(spec, spec.deterministic ? Tiles() : default_tiles(resolved(spec), arch, Family::mma),
             wanted);
  };
  for (const auto& [spec, of, usual] : covering_pairs())
    if (*of == arch)
      add(spec, [&, usual = usual](KernelKind kind) {
        return usual || kind == KernelKind::key_mean ||
               (kind != KernelKind::quantize && !is_twin(arch.name));
      });
  if (!is_twin(arch.name))
    for (const AttentionSpec& spec : covering_quantize(arch))
      add(spec, [](KernelKind kind) { return kind == KernelKind::quantize; });
  if (arch.name == "sm_90a")
    for (const AttentionSpec& spec : covering_sums())
      add_with(spec, {}, [](KernelKind) { return true; });
  return kernels;
}

} // namespace sagebwd::test
