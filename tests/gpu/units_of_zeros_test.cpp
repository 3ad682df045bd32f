//===- units_of_zeros_test.cpp - Padding of zeros beside small numbers ------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// Tokens that are padded, or that no loss is of, are zeros: whole units of a tensor, before,
/// between and behind others that are small. Sums that pass through such a unit must lose nothing
/// by its scale, be it beside what integer products are too large by or at the next unit's.
class UnitsOfZeros : public OnGpu, public testing::WithParamInterface<Case> {};

constexpr float SMALL = 0x1p-14f;
/// From the emulation. Keys of zeros have equal scores: where P is halfway between two integers, as
/// 65 / 130 of 255 is, it is so for all of them, and rounds either way.
constexpr double kLimit = 0.02;

void multiply(std::vector<float>& x, float factor) {
  for (float& value : x)
    value *= factor; // a power of two
}

TEST_P(UnitsOfZeros, LoseNothing) {
  AttentionSpec spec = GetParam().spec;
  spec.dtype = DType::bf16; // which has small numbers too
  Attention attention(spec, 0, GetParam().tiles);
  const int64_t unit =
      std::max(channel_tokens_q(*resolved(spec)), channel_tokens_kv(*resolved(spec)));
  const int64_t tokens = 2 * unit + 72;
  const std::pair<const char*, std::vector<float> reference::Inputs::*> tensors[] = {
      {"q", &reference::Inputs::q},
      {"k", &reference::Inputs::k},
      {"v", &reference::Inputs::v},
      {"dout", &reference::Inputs::dout}};
  for (const auto& [name, tensor] : tensors)
    for (int64_t first = 0; first < tokens; first += unit) {
      SCOPED_TRACE(std::string(name) + " is zeros from token " + std::to_string(first));
      auto in =
          reference::random_inputs({1, 1, 1, tokens, tokens}, spec.head_dim, spec.dtype, 1, 5);
      multiply(in.*tensor, SMALL);
      if (name[0] == 'q' || name[0] == 'k') // of scores as they were
        multiply(name[0] == 'q' ? in.k : in.q, 1 / SMALL);
      const auto begin = (in.*tensor).begin();
      std::fill(begin + first * spec.head_dim,
                begin + std::min(first + unit, tokens) * spec.head_dim, 0.0f);
      const auto got = run(attention, in);
      const auto emulated = emulate_like(attention.spec(), in, got);
      EXPECT_LE(distance(got.o, emulated.o).relative(), kLimit);
      EXPECT_LE(distance(got.dq, emulated.dq).relative(), kLimit);
      EXPECT_LE(distance(got.dk, emulated.dk).relative(), kLimit);
      EXPECT_LE(distance(got.dv, emulated.dv).relative(), kLimit);
    }
}

INSTANTIATE_TEST_SUITE_P(Gpu, UnitsOfZeros,
                         testing::ValuesIn(cases_named({"D128_bf16_Row",
                                                        "D64_bf16_Row_TopLeft",
                                                        "D64_bf16_Block",
                                                        "D128_bf16_Block_Plain",
                                                        "D64_bf16_Row_TopLeft_NoSink",
                                                        "D128_bf16_Dv16_TopLeft",
                                                        "D256_bf16_Row",
                                                        "D256_bf16_Gradients16_TopLeft",
                                                        "Mma_D128_bf16_Row64",
                                                        "Mma_D64_fp16_Row_TopLeft",
                                                        "Mma_D128_bf16_Block",
                                                        "Mma_D128_fp16_Qk16_BottomRight",
                                                        "Mma_D64_bf16_Dv16",
                                                        "Mma_D128_bf16_Gradients16_TopLeft",
                                                        "Mma_D256_bf16_Row_TopLeft",
                                                        "Mma_D256_fp16_Block_Gradients16",
                                                        "Fused_D64_bf16_SixOfSeven_TopLeft",
                                                        "Fused_D64_bf16",
                                                        "Fused_D128_bf16_Block_4Warps",
                                                        "FusedWs_D64_bf16",
                                                        "SmoothQ_D64_bf16_Row_TopLeft",
                                                        "SmoothQ_D128_bf16_Block_BottomRight"})),
                         case_name);

} // namespace
