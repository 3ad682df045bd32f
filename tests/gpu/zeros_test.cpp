//===- zeros_test.cpp - Padding beside small numbers -----------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <cmath>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// Tokens that are padded, or that no loss is of, are zeros beside others that are small: whole
/// units of a tensor and parts of them. Sums that pass through such a unit must lose nothing by its
/// scale, be it beside what integer products are too large by or at the next unit's, nor small rows
/// by the zeros among them.
class Zeros : public OnGpu, public testing::WithParamInterface<Case> {};

constexpr float kSmall = 0x1p-14f;
/// And far from 1: sums must not be lost beside an absolute limit, nor overflow at it.
constexpr float kFar[] = {0x1p-90f, 0x1p90f};
/// Keys of zeros have equal scores: where P is halfway between two integers, as 65 / 130 of 255 is,
/// it is so for all of them, and rounds either way.
constexpr double kToEmulation = 0.02;
/// `block` alone has up to .074 here, whatever tensor holds zeros.
constexpr double kToExact = 0.1;

struct Tensor {
  const char* name;
  std::vector<float> reference::Inputs::*values;
  std::vector<float> reference::Inputs::*partner; ///< what keeps scores as they were
};
constexpr Tensor kTensors[] = {{"q", &reference::Inputs::q, &reference::Inputs::k},
                               {"k", &reference::Inputs::k, &reference::Inputs::q},
                               {"v", &reference::Inputs::v, nullptr},
                               {"dout", &reference::Inputs::dout, nullptr}};

void multiply(std::vector<float>& x, float factor) {
  for (float& value : x)
    value *= factor; // a power of two
}

using Span = std::pair<int64_t, int64_t>; ///< its first token, and the one behind its last

/// A run of a tensor's tokens is zeros, and the others are of some magnitude.
struct Zeroed {
  const Tensor& tensor;
  Span run;
};

void expect_no_loss(Attention& attention, const AttentionSpec& spec, const Problem& problem,
                    float magnitude, std::initializer_list<Zeroed> all) {
  auto in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 5);
  std::string what;
  for (const auto& [tensor, run] : all) {
    what += std::string(tensor.name) + " of " + std::to_string(std::log2(magnitude)) +
            " octaves is zeros from token " + std::to_string(run.first) + " to " +
            std::to_string(run.second) + "; ";
    std::vector<float>& values = in.*tensor.values;
    multiply(values, magnitude);
    if (tensor.partner)
      multiply(in.*tensor.partner, 1 / magnitude);
    std::fill(values.begin() + run.first * spec.head_dim,
              values.begin() + run.second * spec.head_dim, 0.0f);
  }
  SCOPED_TRACE(what);
  const auto got = run(attention, in);
  const auto exact = reference::exact(in, attention.spec());
  const auto emulated = emulate_like(attention.spec(), in, got);
  const auto expect_near = [&](const char* name, const auto& x, const auto& fp64, const auto& cpu) {
    EXPECT_LE(distance(x, fp64).relative(), kToExact) << name;
    EXPECT_LE(distance(x, cpu).relative(), kToEmulation) << name;
  };
  expect_near("out", got.o, exact.o, emulated.o);
  expect_near("dq", got.dq, exact.dq, emulated.dq);
  expect_near("dk", got.dk, exact.dk, emulated.dk);
  expect_near("dv", got.dv, exact.dv, emulated.dv);
}

TEST_P(Zeros, BesideATensorChangeNoErrors) {
  AttentionSpec spec = GetParam().spec;
  spec.dtype = DType::bf16; // which has small numbers too
  Attention attention(spec, 0, GetParam().tiles);
  const int64_t unit =
      std::max(channel_tokens_q(*resolved(spec)), channel_tokens_kv(*resolved(spec)));
  const int64_t tokens = 2 * unit + 72;
  const Span runs[] = {
      {0, unit}, {unit, 2 * unit}, {2 * unit, tokens}, {unit / 5, unit + unit / 3}};
  // Sums that pass through units of queries are dK's and dV's, of any keys. Those over units of
  // keys are of any queries that see all of them.
  const Problem of_queries = {1, 1, 1, tokens, 200};
  const bool all_see = spec.causal == Causal::none;
  const Problem of_keys = {1, 1, 1, all_see ? 200 : tokens, tokens};
  const auto& [q, k, v, dout] = kTensors;
  for (size_t i = 0; i < std::size(runs); ++i) { // of two tensors other tokens are zeros
    const Span& run = runs[i];
    const Span& other = runs[(i + 1) % std::size(runs)];
    expect_no_loss(attention, spec, of_queries, kSmall, {{q, run}, {dout, other}});
    expect_no_loss(attention, spec, of_keys, kSmall, {{k, run}, {v, other}});
  }
  for (float magnitude : kFar) { // products of two such tensors would overflow
    for (const Tensor* tensor : {&q, &dout})
      expect_no_loss(attention, spec, of_queries, magnitude, {{*tensor, runs[1]}});
    for (const Tensor* tensor : {&k, &v})
      expect_no_loss(attention, spec, of_keys, magnitude, {{*tensor, runs[1]}});
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, Zeros,
                         testing::ValuesIn(cases_named({"D128_bf16_Row",
                                                        "D64_bf16_Row_TopLeft",
                                                        "D64_bf16_Block",
                                                        "D128_bf16_Block_Plain",
                                                        "D64_bf16_Row_TopLeft_NoSink",
                                                        "D128_bf16_Dv16_TopLeft",
                                                        "D256_bf16_Row",
                                                        "D512_bf16_Row",
                                                        "D320_fp16_Gradients16_TopLeft",
                                                        "Team_D264_bf16_Row",
                                                        "D256_bf16_Gradients16_TopLeft",
                                                        "Mma_D128_bf16_Row64",
                                                        "HalfDp_D64_bf16",
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
