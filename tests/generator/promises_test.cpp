//===- promises_test.cpp - What pages promise is planned, on every GPU ------===//
//
// docs/supported.md and docs/algorithm.md say which options go together on which GPU.
// Every such combination has kernels and a workspace here, and those of the combinations that were
// once refused are emitted. Exceptions of a page are written down here, too, and are refused.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/plan.h"
#include "tests/generator/specs.h"

using namespace sagebwd;

namespace {

/// A mask, packed sequences or lists, which exclude each other.
struct Shape {
  const char* name;
  void (*set)(AttentionSpec&);
};

const Shape kShapes[] = {
    {"no mask", [](AttentionSpec&) {}},
    {"causal, top left", [](AttentionSpec& s) { s.causal = Causal::top_left; }},
    {"causal, bottom right", [](AttentionSpec& s) { s.causal = Causal::bottom_right; }},
    {"window", [](AttentionSpec& s) { s.window_left = 100, s.window_right = 20; }},
    {"causal window",
     [](AttentionSpec& s) { s.causal = Causal::bottom_right, s.window_left = 100; }},
    {"packed", [](AttentionSpec& s) { s.packed = true; }},
    {"packed, causal", [](AttentionSpec& s) { s.packed = true, s.causal = Causal::top_left; }},
    {"64 x 64", [](AttentionSpec& s) { s.sparse_q = 64, s.sparse_kv = 64; }},
    {"64 x 128", [](AttentionSpec& s) { s.sparse_q = 64, s.sparse_kv = 128; }},
    {"128 x 64", [](AttentionSpec& s) { s.sparse_q = 128, s.sparse_kv = 64; }},
    {"128 x 128, causal",
     [](AttentionSpec& s) { s.sparse_q = s.sparse_kv = 128, s.causal = Causal::top_left; }},
};
constexpr int kHeadDims[] = {32, 64, 72, 128, 136, 192, 256};

/// Knows what docs/supported.md excepts: `block` does not go with packed sequences, nor with lists
/// of 64 queries.
bool exists(const AttentionSpec& s) {
  return s.granularity == Granularity::row || !(s.packed || s.sparse_q == 64);
}
/// docs/supported.md: "on cards with 99 KB of shared memory per block (GeForce and professional
/// cards) gradients need row scales and six-of-seven or gradients16", and "qk16 above D128" has
/// further limits.
bool is_promised(Pass pass, const AttentionSpec& s, const Arch& arch) {
  if (s.head_dim <= 128)
    return true;
  const bool limited = s.precision == Precision::qk16 || s.granularity == Granularity::block;
  if (pass == Pass::forward || !test::is_small(arch))
    return !limited;
  return !limited && s.precision != Precision::dv16;
}

/// Every spec of these options, of both dtypes in turn.
template <typename Visit> void for_each_spec(const Visit& visit) {
  int turn = 0;
  for (int head_dim : kHeadDims)
    for (const auto& [precision, word] : Words<Precision>::all)
      for (Granularity granularity : {Granularity::row, Granularity::block})
        for (const Shape& shape : kShapes) {
          AttentionSpec s;
          s.head_dim = head_dim, s.precision = precision, s.granularity = granularity;
          s.dtype = ++turn % 2 ? DType::bf16 : DType::fp16;
          shape.set(s);
          if (exists(s))
            visit(s);
        }
}

void expect_kernels(Pass pass, const AttentionSpec& s, const Arch& arch) {
  SCOPED_TRACE(to_string(s) + " on " + std::string(arch.name));
  std::vector<KernelSpec> kernels;
  EXPECT_NO_THROW(kernels = Operation(resolved(s), arch).kernels(pass));
  EXPECT_FALSE(kernels.empty());
  EXPECT_GT(workspace_bytes(pass, resolved(s), {2, 4, 2, 300, 500}), 0u);
}

TEST(Promises, EveryPrecisionAndScaleHasKernelsUnderEveryMaskOnEveryGpu) {
  int planned = 0;
  for (const Arch& arch : all_archs())
    for_each_spec([&](const AttentionSpec& s) {
      for (Pass pass : test::kPasses)
        if (is_promised(pass, s, arch)) {
          expect_kernels(pass, s, arch);
          ++planned;
        }
    });
  EXPECT_GT(planned, 7000);
}

/// docs/algorithm.md: dp_sums="fp16" on every GPU except H100 and H200.
TEST(Promises, SumsOfDpInFp16AreThereWhereverThoseInFp32Are) {
  int planned = 0;
  for (const Arch& arch : all_archs())
    for_each_spec([&](AttentionSpec s) {
      s.dp_sums = DpSums::fp16;
      if (arch.has_wgmma()) {
        test::expect_refusal([&] { Operation(resolved(s), arch).kernels(Pass::backward); },
                             {"dp_sums", std::string(arch.name).c_str()});
      } else if (is_promised(Pass::backward, s, arch)) {
        expect_kernels(Pass::backward, s, arch);
        ++planned;
      }
    });
  EXPECT_GT(planned, 3000);
}

/// Kernels that no page excepts and that were refused for want of shared memory.
TEST(Promises, SumsOfDpInFp16OfWideHeadsAreEmittedFor99Kb) {
  int emitted = 0;
  for (const Arch& arch : all_archs())
    for (const Shape& shape : kShapes) {
      AttentionSpec s = test::with_half_dp(256);
      s.precision = Precision::gradients16;
      shape.set(s);
      if (!test::is_small(arch) || !exists(s))
        continue;
      SCOPED_TRACE(std::string(shape.name) + " on " + std::string(arch.name));
      for (const KernelSpec& kernel : Operation(resolved(s), arch).kernels(Pass::backward))
        if (kernel.kind == KernelKind::backward_dq || kernel.kind == KernelKind::backward_dkv) {
          const KernelSource source = emit(kernel);
          EXPECT_EQ(kernel.tile.stages, 0);
          EXPECT_LE(source.shared_bytes, arch.max_shared_bytes);
          EXPECT_NE(source.text.find("dP's sums are in FP16"), std::string::npos);
          ++emitted;
        }
    }
  EXPECT_EQ(emitted, 2 * 4 * static_cast<int>(std::size(kShapes)));
}

/// docs/algorithm.md, "One kernel for all gradients".
TEST(Promises, OneKernelForAllGradientsWhereThePageSaysSo) {
  using enum Precision;
  const auto is_there = [](const AttentionSpec& s, const Arch& arch) {
    if (s.precision == gradients16 ? s.deterministic
                                   : s.precision == dv16 || s.granularity == Granularity::block)
      return false;
    return !test::is_small(arch) || s.head_dim <= 64 || s.precision == six_of_seven;
  };
  for (const Arch& arch : all_archs())
    for (int head_dim : {32, 64, 72, 128})
      for (Granularity granularity : {Granularity::row, Granularity::block})
        for (const auto& [precision, word] : Words<Precision>::all)
          for (bool deterministic : {true, false}) {
            AttentionSpec s;
            s.head_dim = head_dim, s.precision = precision, s.granularity = granularity;
            s.deterministic = deterministic, s.gradient_kernels = Backward::fused;
            SCOPED_TRACE(to_string(s) + " on " + std::string(arch.name));
            if (is_there(s, arch))
              EXPECT_TRUE(Operation(resolved(s), arch).fused());
            else
              EXPECT_THROW(Operation(resolved(s), arch), SpecError);
          }
}

/// docs/supported.md and docs/algorithm.md: smooth_q, and dq_sums="fp16" on Hopper.
TEST(Promises, SmoothedQueriesAndSumsOfDqInFp16) {
  for (const Arch& arch : all_archs())
    for (int head_dim : kHeadDims)
      for (const auto& [precision, word] : Words<Precision>::all) {
        AttentionSpec s;
        s.head_dim = head_dim, s.precision = precision, s.smooth_q = true;
        for (Pass pass : test::kPasses)
          if (is_promised(pass, s, arch) && precision != Precision::qk16)
            expect_kernels(pass, s, arch);
        s = test::with_fp16_sums();
        s.head_dim = head_dim;
        if (arch.has_wgmma() && head_dim <= 128)
          expect_kernels(Pass::backward, s, arch);
      }
}

} // namespace
