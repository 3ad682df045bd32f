//===- pointwise_test.cpp - Specs with a mask or a score function -----------===//

#include "generator/choice.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/pointwise.h"
#include "tests/generator/specs.h"

#include <gtest/gtest.h>

using namespace sagebwd;
using test::expect_refusal;

namespace {

AttentionSpec with_mask(const std::string& mask) {
  AttentionSpec spec;
  spec.mask = mask;
  return spec;
}
AttentionSpec with_score(const std::string& score) {
  AttentionSpec spec;
  spec.score = score;
  return spec;
}

TEST(Pointwise, TextsAreCanonicalAndReadAgain) {
  AttentionSpec given = with_mask("(q >= (k)) & ( q-k<512 )");
  given.score = "(30.0*tanh((s)/30))";
  const ResolvedSpec spec = resolved(given);
  EXPECT_EQ(spec->mask, "q>=k&q-k<512");
  EXPECT_EQ(spec->score, "30.0*tanh(s/30.0)");
  const std::string line = to_string(*spec);
  EXPECT_NE(line.find(" mask=q>=k&q-k<512 score=30.0*tanh(s/30.0) "), line.npos) << line;
  EXPECT_EQ(*resolved(parse_spec(line)), *spec);
  EXPECT_EQ(resolved(parse_spec("d64 mask=q>=k"))->mask, "q>=k");
  EXPECT_EQ(resolved(*spec), spec);
}

TEST(Pointwise, AMaskHasBlocksAndNoFirstKeyOfItsOwn) {
  const ResolvedSpec spec = resolved(with_mask("q >= k"));
  EXPECT_EQ(spec->sparse_q, kMaskBlock);
  EXPECT_EQ(spec->sparse_kv, kMaskBlock);
  EXPECT_EQ(spec->sink_keys, 0);
  EXPECT_TRUE(hides_anywhere(spec));
  EXPECT_EQ(resolved(with_score("s + 1.0"))->sparse_q, 0);
  EXPECT_EQ(resolved(with_score("s + 1.0"))->sink_keys, 0);
}

TEST(Pointwise, TablesAreTheMasksAndThenTheScores) {
  AttentionSpec spec = with_mask("doc[b, q] == doc[b, k] | k < length[h]");
  spec.score = "s + slope[h] * (k - q)";
  const std::vector<TableOfSpec> tables = tables_of(resolved(spec));
  ASSERT_EQ(tables.size(), 3u);
  EXPECT_EQ(tables[0].name, "doc");
  EXPECT_EQ(tables[0].indices, 2);
  EXPECT_EQ(tables[1].name, "length");
  EXPECT_FALSE(tables[1].of_score);
  EXPECT_EQ(tables[2].name, "slope");
  EXPECT_TRUE(tables[2].of_score);
  EXPECT_TRUE(mask_depends_on_batch(resolved(spec)));
  EXPECT_TRUE(mask_depends_on_head(resolved(spec)));
  EXPECT_FALSE(mask_depends_on_batch(resolved(with_mask("q >= k"))));
}

TEST(Pointwise, AScoreBendsUnlessItIsAShift) {
  EXPECT_FALSE(bends_scores(resolved(with_score("s + slope[h] * (k - q)"))));
  EXPECT_TRUE(bends_scores(resolved(with_score("tanh(s)"))));
  EXPECT_TRUE(bends_scores(resolved(with_score("2.0 * s"))));
  EXPECT_FALSE(bends_scores(resolved(AttentionSpec())));
}

/// Whoever reads nothing of an expression is the same kernel for all of them.
TEST(Pointwise, KernelsThatDoNotAskAreShared) {
  const Arch& arch = find_arch("sm_80");
  const auto name = [&](KernelKind kind, Pass pass, const AttentionSpec& spec) {
    return kernel_name(kernel_of(kind, pass, resolved(spec), arch, {}));
  };
  using enum KernelKind;
  EXPECT_EQ(name(quantize, Pass::forward, with_mask("q >= k")),
            name(quantize, Pass::forward, with_mask("q > k")));
  EXPECT_EQ(name(quantize, Pass::forward, with_score("tanh(s)")),
            name(quantize, Pass::forward, with_score("s * 2.0")));
  EXPECT_NE(name(quantize, Pass::forward, with_score("tanh(s)")),
            name(quantize, Pass::forward, with_score("s + 2.0")));
  EXPECT_NE(name(mask_bits, Pass::forward, with_mask("q >= k")),
            name(mask_bits, Pass::forward, with_mask("q > k")));
  EXPECT_EQ(name(transpose_bits, Pass::backward, with_mask("q >= k")),
            name(transpose_bits, Pass::backward, with_mask("q > k")));
}

/// A letter that C++ would read as something else does not reach the compiler.
TEST(Pointwise, SourcesHaveWhatWasParsed) {
  const Operation operation(resolved(with_mask("doc[q] == doc[k]")), find_arch("sm_80"));
  for (const KernelSpec& kernel : operation.kernels(Pass::forward))
    if (kernel.kind == KernelKind::forward) {
      const std::string text = emit(kernel).text;
      EXPECT_NE(text.find("return read_doc(q) == read_doc(k);"), text.npos);
      EXPECT_NE(text.find("const int* table_0;"), text.npos);
    }
  expect_refusal([] { resolved(with_mask("q >= k; asm(\"\")")); }, {"column 7", "';'"});
}

TEST(Pointwise, WhatExcludesThem) {
  const auto refused = [](AttentionSpec spec, auto change,
                          std::initializer_list<const char*> parts) {
    change(spec);
    expect_refusal([&] { resolved(spec); }, parts);
  };
  const AttentionSpec mask = with_mask("q >= k"), score = with_score("tanh(s)");
  refused(mask, [](auto& s) { s.intervals = 2; }, {"intervals = 2", "with a mask"});
  refused(mask, [](auto& s) { s.packed = true; }, {"mask = q>=k", "let a mask say where they end"});
  refused(mask, [](auto& s) { s.window_left = 3; }, {"mask = q>=k", "with a window"});
  refused(mask, [](auto& s) { s.smooth_q = true; }, {"mask = q>=k", "with smooth_q"});
  refused(mask, [](auto& s) { s.linear = LinearKeys::all; }, {"mask = q>=k", "linear = all"});
  refused(mask, [](auto& s) { s.sink_keys = 1; }, {"sink_keys = 1", "with a mask"});
  refused(score, [](auto& s) { s.granularity = Granularity::block; },
          {"score = tanh(s)", "under 'block'", "take 'row'"});
  refused(score, [](auto& s) { s.smooth_q = true; }, {"score = tanh(s)", "with smooth_q"});
  refused(score, [](auto& s) { s.dp_sums = DpSums::fp16; }, {"score = tanh(s)", "dp_sums = fp16"});
  refused(score, [](auto& s) { s.sink_keys = 1; }, {"sink_keys = 1", "with a score function"});
  refused(score, [](auto& s) { s.gradient_kernels = Backward::fused; },
          {"gradient_kernels = fused", "with a score function"});
  refused(score, [](auto& s) { s.score = "where(q >= k, s, -inf)"; }, {"with inf in it", "mask"});
  refused(score, [](auto& s) { s.score = "q >= k"; }, {"column", "float"});
  refused(mask, [](auto& s) { s.mask = "s > 0.0"; }, {"column"});
  AttentionSpec many = with_mask("a[q] == b1[q] & c[q] == d[q] & e[q] == f[q]");
  many.score = "s + x[q] + y[q] + z[q]";
  expect_refusal([&] { resolved(many); }, {"both read 9 tensors", "8 are the most"});
}

} // namespace
