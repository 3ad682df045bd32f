//===- packed_test.cpp - Packed sequences are as if each were alone -------===//
#include "generator/operation.h"
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <cmath>
#include <limits>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Lengths = std::vector<std::pair<int, int>>;

constexpr int kPackedHeads = 4, kPackedHeadsKv = 2;
/// Within a tile, over several and over units of channel scales; without queries, without keys.
const Lengths kLengths = {{70, 70}, {0, 40}, {300, 300}, {33, 0}, {1, 1}, {200, 350}, {129, 64}};

Problem totals(const Lengths& lengths) {
  Problem p{1, kPackedHeads, kPackedHeadsKv, 0, 0};
  for (const auto& [queries, keys] : lengths)
    p.seq_q += queries, p.seq_kv += keys;
  return p;
}

/// Some tokens of each head of (heads, tokens, channels).
template <typename T>
std::vector<T> slice(const std::vector<T>& x, int64_t heads, int64_t first, int64_t count) {
  const int64_t head = static_cast<int64_t>(x.size()) / heads;
  std::vector<T> found;
  for (int64_t h = 0; h < heads; ++h)
    found.insert(found.end(), x.begin() + h * head + first, x.begin() + h * head + first + count);
  return found;
}

/// One sequence of all, whose tokens lie from these on.
struct Part {
  int64_t first_query, first_key, queries, keys;

  reference::Inputs of(const reference::Inputs& in) const {
    reference::Inputs part = in;
    const int64_t d = in.head_dim;
    part.problem.seq_q = queries, part.problem.seq_kv = keys;
    part.q = slice(in.q, kPackedHeads, first_query * d, queries * d);
    part.dout = slice(in.dout, kPackedHeads, first_query * d, queries * d);
    part.k = slice(in.k, kPackedHeadsKv, first_key * d, keys * d);
    part.v = slice(in.v, kPackedHeadsKv, first_key * d, keys * d);
    if (!in.dlse.empty())
      part.dlse = slice(in.dlse, kPackedHeads, first_query, queries);
    return part;
  }
  reference::Outputs<float> of(const reference::Outputs<float>& all, int64_t d) const {
    reference::Outputs<float> part;
    part.o = slice(all.o, kPackedHeads, first_query * d, queries * d);
    part.lse = slice(all.lse, kPackedHeads, first_query, queries);
    part.dq = slice(all.dq, kPackedHeads, first_query * d, queries * d);
    part.dk = slice(all.dk, kPackedHeadsKv, first_key * d, keys * d);
    part.dv = slice(all.dv, kPackedHeadsKv, first_key * d, keys * d);
    return part;
  }
};

class Packed : public CaseTest {
protected:
  void start(const Arch& arch) override {
    AttentionSpec spec = GetParam().spec;
    spec.packed = true;
    attention.emplace(spec, 0, GetParam().tiles);
    // Another tile sums in another order.
    Tiles tiles;
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& k :
           Operation(resolved(spec), arch, GetParam().tiles.value_or(Tiles{})).kernels(pass))
        if (k.tile.warps)
          tiles[k.kind] = k.tile;
    alone.emplace(GetParam().spec, 0, tiles);
  }

  reference::Inputs inputs(const Lengths& lengths) const {
    auto in = reference::random_inputs(totals(lengths), attention->spec()->head_dim,
                                       attention->spec()->dtype, 1, 11);
    in.dlse.resize(kPackedHeads * in.problem.seq_q);
    for (size_t i = 0; i < in.dlse.size(); ++i)
      in.dlse[i] = std::sin(static_cast<float>(i));
    return in;
  }
  reference::Outputs<float> run_packed(const reference::Inputs& in, const Lengths& lengths) {
    return run(*attention, in, {.layout = {.bshd = true}, .lengths = lengths});
  }
  /// A sequence gives what it gives alone, bit for bit; without keys or queries, zeros.
  void expect_alone(const Part& part, const reference::Inputs& in,
                    const reference::Outputs<float>& all) {
    auto got = part.of(all, in.head_dim);
    if (part.queries == 0 || part.keys == 0) {
      const auto zeros = [](const std::vector<float>& x) {
        return std::all_of(x.begin(), x.end(), [](float value) { return value == 0; });
      };
      EXPECT_TRUE(zeros(got.o) && zeros(got.dq) && zeros(got.dk) && zeros(got.dv));
      for (float lse : got.lse)
        EXPECT_EQ(lse, -INFINITY);
      return;
    }
    const auto expected = run(*alone, part.of(in), {.layout = {.bshd = true}});
    if (!alone->spec()->deterministic) {
      EXPECT_LE(distance(got.dq, expected.dq).relative(), 1e-3);
      got.dq = expected.dq;
    }
    expect_identical(got, expected);
  }

  std::optional<Attention> alone; ///< of the same tiles, for one sequence
};

TEST_P(Packed, EachSequenceIsAsIfAlone) {
  const auto in = inputs(kLengths);
  const auto got = run_packed(in, kLengths);
  Part part{};
  for (const auto& [queries, keys] : kLengths) {
    SCOPED_TRACE(std::to_string(queries) + " queries, " + std::to_string(keys) + " keys");
    part.queries = queries, part.keys = keys;
    expect_alone(part, in, got);
    part.first_query += queries, part.first_key += keys;
  }
}

TEST_P(Packed, WhatIsNotFiniteStaysInItsSequence) {
  const Lengths lengths = {{100, 100}, {70, 90}, {65, 33}};
  auto in = inputs(lengths);
  const auto clean = run_packed(in, lengths);
  const int64_t d = in.head_dim;
  for (auto* x : {&in.q, &in.dout, &in.k, &in.v}) {
    const bool of_queries = x == &in.q || x == &in.dout;
    const int64_t heads = of_queries ? kPackedHeads : kPackedHeadsKv, first = 100 * d;
    const int64_t head = static_cast<int64_t>(x->size()) / heads,
                  count = (of_queries ? 70 : 90) * d;
    for (int64_t h = 0; h < heads; ++h)
      std::fill_n(x->begin() + h * head + first, count, std::numeric_limits<float>::quiet_NaN());
  }
  const auto got = run_packed(in, lengths);
  for (const Part& part : {Part{0, 0, 100, 100}, Part{170, 190, 65, 33}}) {
    auto of_got = part.of(got, d);
    const auto of_clean = part.of(clean, d);
    if (!attention->spec()->deterministic) {
      EXPECT_LE(distance(of_got.dq, of_clean.dq).relative(), 1e-3);
      of_got.dq = of_clean.dq;
    }
    expect_identical(of_got, of_clean);
  }
  EXPECT_TRUE(std::isnan(got.o[100 * d]));
}

TEST_P(Packed, TokensBehindTheUsedOnesAreNeitherReadNorWritten) {
  const Lengths lengths = {{100, 100}, {70, 90}, {65, 200}};
  const Lengths used = {{100, 80}, {64, 90}, {40, 1}};
  const auto in = inputs(lengths);
  Faults faults;
  const auto got = run_on_gpu(
      *attention, 0, in, {.layout = {.bshd = true}, .lengths = lengths, .used = used}, &faults);
  const int64_t d = in.head_dim, queries = 31 * kPackedHeads, keys = 219 * kPackedHeadsKv;
  const auto unwritten = [](int64_t count, const char* of) {
    return std::to_string(count) + " elements of " + of + " were not written";
  };
  EXPECT_EQ(faults, (Faults{unwritten(queries * d, "out"), unwritten(queries * d, "dq"),
                            unwritten(keys * d, "dk"), unwritten(keys * d, "dv"),
                            unwritten(queries, "lse")}));
  Part part{};
  for (size_t i = 0; i < lengths.size(); ++i) {
    part.queries = used[i].first, part.keys = used[i].second;
    expect_alone(part, in, got);
    part.first_query += lengths[i].first, part.first_key += lengths[i].second;
  }
}

TEST_P(Packed, SequencesOfABatchAreAsIfCutToWhatIsUsed) {
  const Lengths used = {{100, 80}, {0, 90}, {40, 1}};
  const Problem batch{3, kPackedHeads, kPackedHeadsKv, 100, 90};
  const auto in =
      reference::random_inputs(batch, attention->spec()->head_dim, attention->spec()->dtype, 1, 12);
  for (bool bshd : {false, true}) {
    Faults faults;
    const auto got = run_on_gpu(
        *attention, 0, in,
        {.layout = {.bshd = bshd}, .lengths = Lengths(3, {100, 90}), .used = used, .apart = true},
        &faults);
    EXPECT_EQ(faults.size(), 5u); // what is not used is not written, of each output
    for (size_t b = 0; b < used.size(); ++b) {
      const auto of_sequence = [&](const std::vector<float>& x) {
        const auto size = static_cast<std::ptrdiff_t>(x.size() / 3),
                   i = static_cast<std::ptrdiff_t>(b);
        return std::vector<float>(x.begin() + i * size, x.begin() + (i + 1) * size);
      };
      reference::Inputs one = in;
      one.problem.batch = 1;
      for (auto* x : {&one.q, &one.k, &one.v, &one.dout})
        *x = of_sequence(*x);
      auto of_got = got;
      for (auto* x : {&of_got.o, &of_got.lse, &of_got.dq, &of_got.dk, &of_got.dv})
        *x = of_sequence(*x);
      expect_alone({0, 0, used[b].first, used[b].second}, one, of_got);
    }
  }
}

TEST_P(Packed, GradientsOfKeysAreZeroWhereNoSequenceHasQueries) {
  const Problem batch{3, kPackedHeads, kPackedHeadsKv, 100, 90};
  const auto in =
      reference::random_inputs(batch, attention->spec()->head_dim, attention->spec()->dtype, 1, 12);
  Faults faults;
  const auto got = run_on_gpu(*attention, 0, in,
                              {.layout = {.bshd = true},
                               .lengths = Lengths(3, {100, 90}),
                               .used = Lengths{{0, 90}, {0, 90}, {0, 90}},
                               .apart = true},
                              &faults);
  EXPECT_FALSE(faults.empty()); // outputs of queries are not written
  for (const auto* x : {&got.dk, &got.dv})
    EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](float value) { return value == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Gpu, Packed,
                         testing::ValuesIn(cases_named({"D128_bf16_Row",
                                                        "D128_fp16_Row_BottomRight",
                                                        "D64_bf16_Row_TopLeft",
                                                        "D64_fp16_Dv16",
                                                        "D128_bf16_Qk16",
                                                        "D128_bf16_Row_Unsmoothed",
                                                        "D128_bf16_Row64",
                                                        "D64_fp16_Gradients16",
                                                        "Wgmma8Warps_D64_bf16_Row128",
                                                        "Mma_D128_bf16_Row64",
                                                        "Mma_D64_fp16_Row_TopLeft",
                                                        "Mma_D64_bf16_Dv16",
                                                        "Fused_D64_bf16",
                                                        "Ordered_D64_bf16_TopLeft",
                                                        "FusedWs_D64_bf16",
                                                        "FusedWs_D128_fp16_TopLeft",
                                                        "Fp16Sums_D64_bf16",
                                                        "HalfDp_D64_bf16",
                                                        "HalfDp_D128_fp16_Gradients16",
                                                        "HalfDp_D72_bf16_Dv16_TopLeft",
                                                        "HalfDp_Fused_D64_bf16_TopLeft",
                                                        "D256_bf16_Row",
                                                        "D512_bf16_Row",
                                                        "D320_fp16_Gradients16_TopLeft",
                                                        "Team_D512_bf16_Row_TopLeft",
                                                        "D256_fp16_Gradients16",
                                                        "Wgmma_D256_bf16_Row_TopLeft",
                                                        "Mma_D256_bf16_Row_TopLeft",
                                                        "D72_fp16_Dv16_Unsmoothed",
                                                        "D160_bf16_Row",
                                                        "Window_D64_bf16",
                                                        "Window_D128_fp16_TopLeft",
                                                        "Window_D128_fp16_Qk16_NarrowLeft",
                                                        "Window_Mma_D128_fp16",
                                                        "Window_D256_fp16_Gradients16",
                                                        "Window_FusedWs_D128_bf16"})),
                         case_name);

} // namespace
