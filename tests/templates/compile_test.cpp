//===- compile_test.cpp - Default kernels compile without spills ------------===//
//
// A subset of (spec, architecture) pairs: on every architecture every value of every field meets
// every value of every other; not the full product, which takes half an hour. Kernels that pairs
// share are compiled once.
//
// Whether a kernel spills depends on ptxas' version: the kernels are laid out for that of
// CUDA 13.0. With another one spills are reported, not failed.
//
//===----------------------------------------------------------------------===//

#include "generator/space.h"
#include "tests/templates/nvrtc_fixture.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

using namespace sagebwd;

namespace {

constexpr const char* kArchs[] = {"sm_80",  "sm_86",  "sm_89",  "sm_90a", "sm_100",
                                  "sm_103", "sm_110", "sm_120", "sm_121"};

bool supports(const Nvrtc& nvrtc, std::string_view arch) {
  const std::vector<std::string> known = nvrtc.supported_archs();
  const std::string plain(arch.substr(0, arch.find_last_not_of("a") + 1));
  return std::find(known.begin(), known.end(), plain) != known.end();
}

/// Granularity and sink together: a sink is of `row` alone.
enum Form { row_with_sink, row, block, kForms };

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

struct Pair {
  AttentionSpec spec;
  const Arch* arch;
};

std::vector<Pair> covering_pairs() {
  std::vector<Pair> pairs;
  for (size_t turn = 0; turn < std::size(kArchs); ++turn)
    for (const AttentionSpec& spec : covering_specs(static_cast<int>(turn)))
      pairs.push_back({spec, &find_arch(kArchs[turn])});
  // What most will use, on every architecture: six of seven, smoothed and rotated.
  for (const char* arch : kArchs)
    for (int head_dim : {64, 128}) {
      AttentionSpec spec;
      spec.head_dim = head_dim, spec.causal = Causal::top_left;
      pairs.push_back({spec, &find_arch(arch)});
      if (head_dim == 64) // 128 channels leave the fewest registers
        continue;
      spec.causal = Causal::none;
      pairs.push_back({spec, &find_arch(arch)});
      spec.granularity = Granularity::block;
      pairs.push_back({spec, &find_arch(arch)});
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
  // Wide heads, wherever their gradients fit.
  for (const char* name : kArchs)
    for (Causal causal : {Causal::none, Causal::top_left}) {
      AttentionSpec spec;
      spec.head_dim = 256, spec.causal = causal;
      if (const Arch& arch = find_arch(name); arch.max_shared_bytes > 128 * 1024)
        pairs.push_back({spec, &arch});
    }
  // Heads that do not fill a width, of each precision, some with a window.
  for (size_t turn = 0; turn < std::size(kArchs); ++turn)
    for (const auto& [precision, word] : Words<Precision>::all) {
      const Arch& arch = find_arch(kArchs[turn]);
      const size_t form = turn + static_cast<size_t>(precision);
      const bool fits_wide = arch.max_shared_bytes > 128 * 1024;
      AttentionSpec spec;
      spec.head_dim = form % 3 == 0 ? 56 : form % 3 == 1 || !fits_wide ? 120 : 248;
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

/// Sums of dQ in FP16: each head dimension, dtype, mask and, as quantize and round_dq differ by
/// them, sinks, smoothing and granularity.
std::map<std::string, KernelSpec> kernels_with_fp16_sums() {
  std::map<std::string, KernelSpec> kernels;
  for (int head_dim : {64, 128})
    for (DType dtype : {DType::bf16, DType::fp16})
      for (Causal causal : {Causal::none, Causal::top_left})
        for (int form = 0; form < kForms; ++form) {
          AttentionSpec spec;
          spec.precision = Precision::gradients16, spec.deterministic = false;
          spec.dq_sums = DqSums::fp16;
          spec.head_dim = head_dim, spec.dtype = dtype, spec.causal = causal;
          spec.granularity = form == block ? Granularity::block : Granularity::row;
          spec.sink_keys = form == row ? 0 : -1, spec.smooth_k = form != row;
          for (const KernelSpec& kernel :
               kernels_of(Pass::backward, resolved(spec), find_arch("sm_90a")))
            kernels.emplace(kernel_name(kernel), kernel);
        }
  return kernels;
}

/// Each kernel once, with the first pair it is of.
std::map<std::string, KernelSpec> kernels_of_pairs(const std::vector<Pair>& pairs) {
  std::map<std::string, KernelSpec> kernels;
  for (const auto& [spec, arch] : pairs)
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& kernel : kernels_of(
               pass, resolved(spec), *arch,
               spec.deterministic ? Tiles() : default_tiles(resolved(spec), *arch, Family::mma))) {
        // Zeros for the sums of dQ beside its copies in INT8 cost quantize up to 16 bytes.
        const bool tolerated = kernel.kind == KernelKind::quantize && !spec.deterministic &&
                               which_int8(spec.precision).dq;
        if (!tolerated)
          kernels.emplace(std::string(arch->name) + " " + kernel_name(kernel), kernel);
      }
  return kernels;
}

class CompileTest : public test::WithNvrtc {};

TEST_F(CompileTest, DefaultKernelsHaveNeitherSpillsNorWarnings) {
  Nvrtc& nvrtc = Nvrtc::instance();
  const bool laid_out_for = nvrtc.version_major() == 13 && nvrtc.version_minor() == 0;
  const std::vector<Pair> pairs = covering_pairs();
  ASSERT_LE(pairs.size(), 230u); // in minutes
  std::vector<std::pair<std::string, KernelSpec>> work;
  std::set<std::string> unknown;
  for (const auto& [label, kernel] : kernels_of_pairs(pairs))
    if (supports(nvrtc, kernel.arch.name))
      work.emplace_back(label, kernel);
    else
      unknown.insert(std::string(kernel.arch.name));
  for (const std::string& arch : unknown)
    std::cout << nvrtc.identity() << " does not know " << arch << ": its kernels are left out\n";
  ASSERT_FALSE(work.empty());

  std::atomic<size_t> next = 0;
  std::mutex mutex; // of what is below, and of GoogleTest's output
  int spilling = 0;
  const auto worker = [&] {
    for (size_t i = next++; i < work.size(); i = next++) {
      const auto& [label, kernel] = work[i];
      try {
        const Compilation compilation = test::compile(kernel, /*want_ptx=*/false);
        std::lock_guard lock(mutex);
        const bool spills = compilation.spill_bytes != 0;
        spilling += spills;
        if (spills && !laid_out_for)
          std::cout << label << " spills " << compilation.spill_bytes << " bytes with "
                    << nvrtc.path() << "\n";
        else
          EXPECT_EQ(compilation.spill_bytes, 0) << label;
        // An array whose places are found at run time costs as much as a spill.
        EXPECT_TRUE(spills || compilation.log.find(" 0 bytes stack frame") != std::string::npos)
            << label << " keeps arrays in memory:\n"
            << compilation.log;
        for (const std::string& warning : compile_warnings(compilation.log))
          if (warning.find("spill") == std::string::npos)
            ADD_FAILURE() << label << ": " << warning;
        // More would not fit the launch bounds.
        EXPECT_LE(compilation.registers, 255) << label;
      } catch (const std::exception& error) {
        std::lock_guard lock(mutex);
        ADD_FAILURE() << label << ": " << error.what();
      }
    }
  };
  std::thread second(worker);
  worker();
  second.join();
  std::cout << work.size() << " kernels of " << pairs.size() << " specs and architectures, "
            << spilling << " with spills\n";
}

TEST_F(CompileTest, SumsOfDqInFp16HaveNeitherSpillsNorWarnings) {
  Nvrtc& nvrtc = Nvrtc::instance();
  if (!supports(nvrtc, "sm_90a"))
    GTEST_SKIP() << nvrtc.identity() << " does not know sm_90a";
  const bool laid_out_for = nvrtc.version_major() == 13 && nvrtc.version_minor() == 0;
  for (const auto& [name, kernel] : kernels_with_fp16_sums()) {
    const Compilation compilation = test::compile(kernel, /*want_ptx=*/false);
    if (compilation.spill_bytes != 0 && !laid_out_for)
      std::cout << name << " spills " << compilation.spill_bytes << " bytes\n";
    else
      EXPECT_EQ(compilation.spill_bytes, 0) << name;
    for (const std::string& warning : compile_warnings(compilation.log))
      if (warning.find("spill") == std::string::npos)
        ADD_FAILURE() << name << ": " << warning;
    EXPECT_LE(compilation.registers, 255) << name;
  }
}

TEST(CoveringPairs, EveryTwoValuesMeetOnEveryArchitecture) {
  constexpr int kValues[] = {2, kForms, std::size(Words<Precision>::all), 2, 2, 2};
  constexpr int kFields = std::size(kValues);
  const auto fields = [](const AttentionSpec& s) {
    const bool blockwise = s.granularity == Granularity::block;
    return std::array<int, kFields>{s.head_dim == 128,
                                    blockwise          ? block
                                    : s.sink_keys == 0 ? row
                                                       : row_with_sink,
                                    static_cast<int>(s.precision),
                                    s.dtype == DType::fp16,
                                    s.causal == Causal::top_left,
                                    s.smooth_k};
  };
  std::map<std::string, std::set<std::array<int, 4>>> meetings; // by architecture
  for (const auto& [spec, arch] : covering_pairs()) {
    const auto f = fields(spec);
    for (int i = 0; i < kFields; ++i)
      for (int j = i + 1; j < kFields; ++j)
        meetings[std::string(arch->name)].insert({i, f[i], j, f[j]});
  }
  size_t all = 0;
  for (int i = 0; i < kFields; ++i)
    for (int j = i + 1; j < kFields; ++j)
      all += static_cast<size_t>(kValues[i] * kValues[j]);
  ASSERT_EQ(meetings.size(), std::size(kArchs));
  for (const auto& [arch, found] : meetings)
    EXPECT_EQ(found.size(), all) << arch;
}

} // namespace
