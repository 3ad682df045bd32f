//===- sanitizer_test.cpp - Every kernel once, for compute-sanitizer -------===//
//
// bench/sanitize.py runs these under compute-sanitizer's tools. Memory is neither filled nor
// padded: initcheck must see what is read before it is written, memcheck the first byte too far.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <cstdio>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class Sanitizer : public CaseTest {};

TEST_P(Sanitizer, ForwardAndBackwardGiveFiniteResults) {
  const AttentionSpec& spec = attention->spec();
  // Places of units' scales are filled anew: those of keys from the fourth unit on, those of
  // queries from the sixth run of tiles, which begins with each head.
  const Problem problem{1, 6, 1, 70, 800};
  auto in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 1);
  in.dlse.assign(problem.heads * problem.seq_q, 0.5f);
  printf("spec: %s, %s\n", to_string(spec).c_str(),
         GetParam().tiles ? to_string(GetParam().tiles->begin()->second).c_str() : "default tiles");

  RunOptions bare{{}, nullptr, std::nullopt, std::nullopt};
  if (spec.packed)
    bare.lengths = {{30, 500}, {0, 100}, {33, 0}, {7, 200}};
  const auto got = run(*attention, in, bare);
  for (const auto* values : {&got.o, &got.lse, &got.dq, &got.dk, &got.dv})
    for (float x : *values)
      ASSERT_TRUE(std::isfinite(x) || (spec.packed && x == -INFINITY)); // lse without keys
}

INSTANTIATE_TEST_SUITE_P(Gpu, Sanitizer,
                         testing::ValuesIn(cases_named({"D128_bf16_Row",
                                                        "D64_bf16_Row_TopLeft",
                                                        "D128_bf16_Row64",
                                                        "D64_fp16_Block_TopLeft",
                                                        "D128_bf16_Qk16",
                                                        "D128_bf16_Row_Unsmoothed",
                                                        "Wgmma8Warps_D64_bf16_Row128",
                                                        "Mma_D128_bf16_Row64",
                                                        "Mma_D64_fp16_Row_TopLeft",
                                                        "Mma_D128_bf16_Block",
                                                        "D64_fp16_Gradients16",
                                                        "Mma_D64_bf16_Dv16",
                                                        "Fused_D64_bf16",
                                                        "Fused_D128_fp16_TopLeft",
                                                        "FusedWs_D64_bf16",
                                                        "FusedWs_D128_fp16_TopLeft",
                                                        "Fp16Sums_D64_bf16",
                                                        "HalfDp_D64_bf16",
                                                        "HalfDp_D160_bf16_Gradients16",
                                                        "HalfDp_Fused_D128_fp16",
                                                        "Fp16Sums_D128_fp16_TopLeft",
                                                        "D256_bf16_Row",
                                                        "D512_bf16_Row",
                                                        "D264_bf16_Row_TopLeft",
                                                        "Team_D264_bf16_Row",
                                                        "Team_D512_fp16_Gradients16_BottomRight",
                                                        "Team_Packed_D384_fp16_Gradients16",
                                                        "D320_fp16_Gradients16_TopLeft",
                                                        "D512_fp16_Gradients16",
                                                        "Window_D512_bf16",
                                                        "Packed_D512_bf16_Row_TopLeft",
                                                        "Packed_D320_fp16_Gradients16_Window",
                                                        "D256_fp16_Gradients16",
                                                        "D256_bf16_Gradients16_TopLeft",
                                                        "Wgmma_D256_bf16_Row_TopLeft",
                                                        "Mma_D256_bf16_Row_TopLeft",
                                                        "D40_bf16_Row_TopLeft",
                                                        "D72_fp16_Dv16_Unsmoothed",
                                                        "D160_bf16_Row",
                                                        "D112_bf16_Gradients16_TopLeft",
                                                        "Mma_D80_bf16_Row_TopLeft",
                                                        "FusedWs_D72_fp16_TopLeft",
                                                        "Wgmma_D112_bf16_Row_TopLeft",
                                                        "SmoothQ_D64_bf16_Row_TopLeft",
                                                        "SmoothV_D64_bf16_Row",
                                                        "SmoothV_D256_bf16_Gradients16",
                                                        "SmoothV_Mma_D128_bf16_Row_TopLeft",
                                                        "SmoothQ_D128_bf16_Block_BottomRight",
                                                        "SmoothQ_D256_bf16_Row",
                                                        "Turns_SmoothQ_D160_bf16",
                                                        "Window_D64_bf16",
                                                        "Window_D128_fp16_TopLeft",
                                                        "Window_D128_bf16_Gradients16_BottomRight",
                                                        "Window_D256_bf16_TopLeft",
                                                        "Window_D80_bf16_TopLeft",
                                                        "Window_FusedWs_D128_bf16",
                                                        "Window_Mma_D128_bf16_Block",
                                                        "Packed_D64_bf16_TopLeft",
                                                        "Packed_D128_fp16_Gradients16_BottomRight",
                                                        "Packed_D256_bf16_Window",
                                                        "Packed_Mma_D128_bf16_TopLeft"})),
                         case_name);

} // namespace
