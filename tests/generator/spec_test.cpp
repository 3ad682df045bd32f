//===- spec_test.cpp - Parsing, printing and checking specs ---------------===//

#include "generator/nearest.h"
#include "tests/generator/specs.h"

#include <array>

using namespace sagebwd;
using test::expect_refusal;

namespace {

TEST(Spec, NamesAreReadBack) {
  for (DType x : {DType::bf16, DType::fp16})
    EXPECT_EQ(parse_word<DType>(to_string(x)), x);
  for (Causal x : {Causal::none, Causal::top_left, Causal::bottom_right})
    EXPECT_EQ(parse_word<Causal>(to_string(x)), x);
  for (Granularity x : {Granularity::row, Granularity::block})
    EXPECT_EQ(parse_word<Granularity>(to_string(x)), x);
  for (const auto& [x, word] : Words<Precision>::all)
    EXPECT_EQ(parse_word<Precision>(word), x);
  for (const auto& [x, word] : Words<DqSums>::all)
    EXPECT_EQ(parse_word<DqSums>(word), x);
}

TEST(Spec, UnknownNamesAreRefusedWithTheKnownOnes) {
  expect_refusal([] { parse_word<DType>("fp8"); }, {"dtype", "'fp8'", "bf16, fp16"});
  expect_refusal([] { parse_word<Causal>("left"); },
                 {"causal mask", "'left'", "none, top-left, bottom-right"});
  expect_refusal([] { parse_word<Granularity>("tensor"); },
                 {"granularity", "'tensor'", "row, block"});
  expect_refusal([] { parse_word<Precision>("int4"); },
                 {"precision", "'int4'", "six-of-seven, qk16, dv16, gradients16"});
  expect_refusal([] { parse_word<DqSums>("bf16"); },
                 {"format of dQ's sums", "'bf16'", "fp32, fp16"});
  expect_refusal([] { parse_word<DType>(""); }, {"''", "bf16"});
  expect_refusal([] { parse_word<DType>("BF16"); }, {"'BF16'"});
}

TEST(Spec, ResolvingFillsInWhatTheGranularityDecides) {
  for (int head_dim : {64, 128, 256})
    for (const auto& [precision, word] : Words<Precision>::all) {
      AttentionSpec s;
      s.head_dim = head_dim, s.precision = precision;
      const auto decided = [&](Granularity granularity) {
        s.granularity = granularity;
        const ResolvedSpec full = resolved(s);
        return std::array{full->group_q, full->group_kv, full->sink_keys};
      };
      EXPECT_EQ(decided(Granularity::row), (std::array{64, 128, 1})) << word;
      EXPECT_EQ(decided(Granularity::block), (std::array{128, 64, 0})) << word;
    }
}

TEST(Spec, ChannelsShareScalesInUnitsOfTheirOwnOrOfGroups) {
  AttentionSpec s = *resolved(AttentionSpec());
  EXPECT_EQ(channel_tokens_q(s), 256);
  EXPECT_EQ(channel_tokens_kv(s), 256);
  s = {};
  s.granularity = Granularity::block;
  EXPECT_EQ(channel_tokens_q(resolved(s)), 128);
  EXPECT_EQ(channel_tokens_kv(resolved(s)), 64);
}

TEST(Spec, RowsOfDoutAreScaledWhereDvIsInt8AndScalesAreOfRows) {
  AttentionSpec s;
  for (const auto& [precision, word] : Words<Precision>::all) {
    s.precision = precision;
    s.granularity = Granularity::row;
    EXPECT_EQ(scales_dout(s), precision == Precision::six_of_seven || precision == Precision::qk16)
        << word;
    s.granularity = Granularity::block;
    EXPECT_FALSE(scales_dout(s)) << word;
  }
}

TEST(Spec, PrecisionsTellHowManyOfTheSevenProductsAreInt8) {
  const std::pair<Precision, int> counts[] = {{Precision::six_of_seven, 6},
                                              {Precision::qk16, 4},
                                              {Precision::dv16, 5},
                                              {Precision::gradients16, 3}};
  EXPECT_EQ(std::size(counts), std::size(Words<Precision>::all));
  for (const auto& [precision, count] : counts)
    EXPECT_EQ(which_int8(precision).count(), count) << to_string(precision);
}

TEST(Spec, ResolvingTwiceChangesNothing) {
  for (const AttentionSpec& spec : test::all_specs()) {
    const ResolvedSpec once = resolved(spec);
    EXPECT_EQ(resolved(once), once);
    AttentionSpec rest = *once; // groups and sinks alone are filled in
    rest.group_q = spec.group_q, rest.group_kv = spec.group_kv, rest.sink_keys = spec.sink_keys;
    EXPECT_EQ(rest, spec);
  }
}

TEST(Spec, WhatIsNotBuiltIsRefused) {
  for (int head_dim : {-64, 0, 1, 24, 84, 100, 250, 260, 520, 1024}) {
    AttentionSpec s;
    s.head_dim = head_dim;
    expect_refusal([&] { resolved(s); }, {("dimension " + std::to_string(head_dim)).c_str(),
                                          "multiples of 8 from 32 to 512"});
  }
  const auto with_groups = [](Granularity granularity, int q, int kv) {
    AttentionSpec s;
    s.granularity = granularity, s.group_q = q, s.group_kv = kv;
    return [s] { resolved(s); };
  };
  using enum Granularity;
  expect_refusal(with_groups(row, 128, 0), {"group_q = 128", "'row'", "it is 64", "leave it out"});
  expect_refusal(with_groups(row, -1, 0), {"group_q = -1"});
  expect_refusal(with_groups(row, 0, 32), {"group_kv = 32", "'row'", "64 or 128", "leave it out"});
  expect_refusal(with_groups(row, 0, -64), {"group_kv = -64"});
  expect_refusal(with_groups(block, 64, 0), {"group_q = 64", "'block'", "it is 128"});
  expect_refusal(with_groups(block, 0, 128), {"group_kv = 128", "'block'", "it is 64"});
  const auto with_sinks = [](Granularity granularity, int sink_keys) {
    AttentionSpec s;
    s.granularity = granularity, s.sink_keys = sink_keys;
    return [s] { resolved(s); };
  };
  EXPECT_NO_THROW(with_sinks(row, 0)());
  expect_refusal(with_sinks(row, 2),
                 {"sink_keys = 2", "'row'", "1 computes the first key separately"});
  expect_refusal(with_sinks(row, -2), {"sink_keys = -2", "leave it out"});
  expect_refusal(with_sinks(block, 1), {"sink_keys = 1", "'block'", "pass 0"});
}

TEST(Spec, SumsOfDqInFp16AreOfOneKernelForAllGradientsIn16Bits) {
  for (int head_dim : {64, 128}) {
    AttentionSpec s = test::with_fp16_sums();
    s.head_dim = head_dim;
    EXPECT_NO_THROW(resolved(s));
    EXPECT_TRUE(may_fuse_backward(s));
  }
  AttentionSpec s = test::with_fp16_sums();
  s.deterministic = true;
  expect_refusal([&] { resolved(s); },
                 {"dq_sums = fp16", "under 'deterministic'",
                  "it needs an H100 or H200 (sm_90a), a spec without 'deterministic'",
                  "leave dq_sums out for fp32"});
  s.precision = Precision::dv16, s.head_dim = 256; // each of them is a cause
  expect_refusal([&] { resolved(s); },
                 {"under 'deterministic', which adds up dQ in one order and for head dimension 256 "
                  "and under precision 'dv16'"});
  s = test::with_fp16_sums(), s.head_dim = 256;
  expect_refusal([&] { resolved(s); }, {"dq_sums = fp16", "head dimension 256", "at most 128",
                                        "leave dq_sums out for fp32"});
  s = test::with_fp16_sums();
  for (Precision precision : {Precision::six_of_seven, Precision::qk16, Precision::dv16}) {
    s.precision = precision;
    expect_refusal([&] { resolved(s); },
                   {"dq_sums = fp16", ("under precision '" + value_text(precision) + "'").c_str(),
                    "precision 'gradients16'"});
  }
}

TEST(Spec, QueriesAreSmoothedWhereTheyAreQuantisedAndNotPacked) {
  AttentionSpec s;
  s.smooth_q = true;
  for (Precision precision : {Precision::six_of_seven, Precision::dv16, Precision::gradients16}) {
    s.precision = precision;
    EXPECT_TRUE(resolved(s)->smooth_q);
    EXPECT_TRUE(parse_spec(to_string(*resolved(s))).smooth_q);
  }
  s.precision = Precision::qk16;
  expect_refusal([&] { resolved(s); },
                 {"smooth_q", "under precision 'qk16'", "take 'six-of-seven'", "leave it out"});
  s.precision = Precision::six_of_seven, s.packed = true;
  expect_refusal([&] { resolved(s); },
                 {"smooth_q", "packed sequences", "a call for each", "leave it out"});
  EXPECT_EQ(to_string(AttentionSpec()).find("smooth_q"), std::string::npos);
}

TEST(ResolvedSpec, OfWindows) {
  AttentionSpec s;
  s.window_left = 100;
  EXPECT_EQ(resolved(s)->sink_keys, 0); // few queries see the first key
  EXPECT_EQ(to_string(*resolved(s)),
            "d128 bf16 causal=none row 64x128 sink_keys=0 six-of-seven smooth_k rotate "
            "deterministic window_left=100 numerics=5");
  EXPECT_EQ(parse_spec(to_string(*resolved(s))), *resolved(s));
  s.sink_keys = 1;
  expect_refusal([&] { resolved(s); }, {"sink_keys = 1", "with a window", "leave it out"});
  s = {};
  s.window_right = 8;
  EXPECT_EQ(resolved(s)->sink_keys, 1);
  s.causal = Causal::top_left; // which hides as many
  EXPECT_EQ(resolved(s)->window_right, kNoWindow);
  s.window_left = -2;
  expect_refusal([&] { resolved(s); }, {"window_left = -2", "0 or more", "leave it out"});
}

TEST(Spec, SumsOfDqAreToldWhereTheyAreNotFp32) {
  const std::string plain = to_string(*resolved(AttentionSpec()));
  EXPECT_EQ(plain.find("dq_sums"), std::string::npos);
  const AttentionSpec s = *resolved(test::with_fp16_sums());
  EXPECT_EQ(to_string(s), "d128 bf16 causal=none row 64x128 sink_keys=1 gradients16 smooth_k "
                          "rotate dq_sums=fp16 numerics=5");
  EXPECT_EQ(parse_spec(to_string(s)), s);
  AttentionSpec read = s; // of a line without it
  ASSERT_TRUE(parse_line(plain, read));
  EXPECT_EQ(read.dq_sums, DqSums::fp32);
  std::string told = to_string(s);
  told.replace(told.find("=fp16"), 5, "=fp32"); // as nobody prints it
  EXPECT_EQ(parse_spec(told).dq_sums, DqSums::fp32);
  expect_refusal(
      [&] {
        parse_spec("d128 bf16 causal=none row 64x128 sink_keys=1 gradients16 "
                   "smooth_k rotate dq_sums=fp8 numerics=5");
      },
      {"cannot read spec"});
}

TEST(Spec, SumsOfDpAreToldWhereTheyAreNotFp32) {
  const AttentionSpec s = *resolved(test::with_half_dp());
  EXPECT_EQ(to_string(s), "d128 bf16 causal=none row 64x128 sink_keys=1 six-of-seven smooth_k "
                          "rotate deterministic dp_sums=fp16 numerics=5");
  EXPECT_EQ(parse_spec(to_string(s)), s);
  EXPECT_EQ(parse_spec("dp_sums=fp16"), test::with_half_dp());
  EXPECT_EQ(to_string(*resolved(AttentionSpec())).find("dp_sums"), std::string::npos);
}

TEST(Spec, SumsOfDpInFp16GoWithEverythingElseThanSumsOfDqInFp16) {
  for (const auto& [precision, word] : Words<Precision>::all)
    for (Granularity granularity : {Granularity::row, Granularity::block})
      for (int head_dim : {32, 64, 72, 256}) {
        AttentionSpec s = test::with_half_dp(head_dim);
        s.precision = precision, s.granularity = granularity;
        s.packed = granularity == Granularity::row;
        EXPECT_TRUE(sums_dp_in_fp16(resolved(s)));
      }
  AttentionSpec s = test::with_fp16_sums();
  s.dp_sums = DpSums::fp16;
  expect_refusal([&] { resolved(s); }, {"dp_sums = fp16", "with dq_sums = fp16", "family 'ws'",
                                        "family 'mma'", "leave one of the two out"});
}

TEST(Spec, OtherVersionsOfTheNumericsAreRefused) {
  for (int version : {0, kNumerics - 1, kNumerics + 1}) {
    AttentionSpec s;
    s.numerics = version;
    expect_refusal([&] { resolved(s); },
                   {("numerics = " + std::to_string(version)).c_str(),
                    ("which is " + std::to_string(kNumerics)).c_str(), "build with the version"});
  }
}

TEST(Spec, IsPrintedOnOneLineAndNoTwoAlike) {
  AttentionSpec s;
  EXPECT_EQ(to_string(*resolved(s)),
            "d128 bf16 causal=none row 64x128 sink_keys=1 six-of-seven smooth_k rotate "
            "deterministic numerics=5");
  s = {64,    DType::fp16, Causal::bottom_right, Granularity::block, Precision::qk16, false,
       false, false};
  EXPECT_EQ(to_string(*resolved(s)),
            "d64 fp16 causal=bottom-right block 128x64 sink_keys=0 qk16 numerics=5");

  std::map<std::string, AttentionSpec> printed;
  for (const AttentionSpec& spec : test::all_specs()) {
    const AttentionSpec full = *resolved(spec);
    const auto& [text, other] = *printed.emplace(to_string(full), full).first;
    EXPECT_EQ(other, full) << text;
  }
}

TEST(Spec, ItsLineIsReadBack) {
  for (const AttentionSpec& spec : test::all_specs())
    for (bool deterministic : {false, true}) {
      AttentionSpec s = spec;
      s.deterministic = deterministic;
      EXPECT_EQ(parse_spec(to_string(s)), s) << to_string(s);
      EXPECT_EQ(parse_spec(to_string(*resolved(s))), *resolved(s));
    }
}

TEST(Spec, OtherLinesAreRefusedWithAnExample) {
  const std::string line = to_string(*resolved(AttentionSpec()));
  for (const std::string& text :
       {std::string(), line + " ", line + "x", " " + line, line.substr(1),
        std::string("d128 fp8 causal=none row 64x64 sink_keys=1 six-of-seven numerics=5"),
        std::string("d128 d64"), std::string("d128 causal=left"), std::string("d128  bf16"),
        std::string("d128 rotate no-rotate"), std::string("d128 64x"), std::string("d128 no-bf16"),
        std::string("d128 numerics=5"),
        std::string("d128 bf16 causal=none row 64x64 sink_keys=1 six-of-seven rotate smooth_k "
                    "numerics=5"),
        std::string("d99999999999 bf16 causal=none row 64x64 sink_keys=1 six-of-seven "
                    "numerics=5")})
    expect_refusal([&] { parse_spec(text); }, {("'" + text + "'").c_str(), line.c_str()});
}

TEST(Spec, WrongWordsAreNamedWithTheNearestKnownOnes) {
  const struct {
    const char *line, *said;
  } kWrong[] = {
      {"d64 no-rotat", "'no-rotat' is no word of a spec (did you mean 'no-rotate'?)."},
      {"d64 casual=top-left", "'casual=top-left' is no word of a spec (did you mean 'causal=top-"},
      {"d64 window_lef=7", "(did you mean 'window_left=7'?)"},
      {"gradient16", "(did you mean 'gradients16'?)"},
      {"d128 bf16 causal=none row 64x128 sink_keys=1 six-of-sven smooth_k rotate numerics=5",
       "'six-of-sven' is no word of a spec (did you mean 'six-of-seven'?)"},
      // Python's spellings.
      {"head_dim=64", "(did you mean 'd64'?)"},
      {"dtype=fp16", "(did you mean 'fp16'?)"},
      {"rotate=no", "(did you mean 'no-rotate'?)"},
      {"d64 rotate=True", "(did you mean 'rotate'?)"},
      {"causal=left", "unknown causal mask 'left': supported are none, top-left, bottom-right"},
      {"dq_sums=fp8", "unknown format of dQ's sums 'fp8'"},
      {"xyzzyxyzzy", "'xyzzyxyzzy' is no word of a spec: the words are dN bf16|fp16 "
                     "causal=none|top-left|bottom-right row|block NxN sink_keys=N "},
      {"d64 window=3",
       " [no-]smooth_q [no-]smooth_v [no-]rotate [no-]deterministic dq_sums=fp32|fp16 "},
      {"D64", " window_left=N window_right=N sparse_q=N sparse_kv=N linear=none|complement|all "
              "intervals=N mask=EXPRESSION score=EXPRESSION "
              "[no-]packed [no-]max_logits. A spec is"},
      {"64", "'64' is no word of a spec"},
      {"d64 causal", "'causal' lacks its value: causal=none, causal=top-left, causal=bottom-right"},
      {"window_left", "'window_left' lacks its value: window_left=N, where N is a number"},
      {"rotate no-rotate", "'no-rotate' sets what another word sets as well"},
      {"d64  bf16", "a single space separates two words"},
      {"", "it is empty"},
      {"d128 numerics=5", "Leave numerics= out to name only some"},
  };
  for (const auto& [line, said] : kWrong)
    expect_refusal([&] { parse_spec(line); },
                   {("cannot read spec '" + std::string(line)).c_str(), said});
  for (const char* line : {"d64\n", "d64\tbf16", "d64\rx"})
    expect_refusal([&] { parse_spec(line); }, {"cannot read spec 'd64...': a line break, a tab"});
}

TEST(Spec, AWholeLineIsExactAndAPartialOneHasDefaults) {
  const std::string exact = "d64 bf16 causal=none row 64x128 sink_keys=1 six-of-seven numerics=5";
  EXPECT_FALSE(parse_spec(exact).rotate);
  EXPECT_FALSE(parse_spec(exact).smooth_k);
  EXPECT_TRUE(parse_spec("d64 bf16 six-of-seven").rotate);
  EXPECT_TRUE(parse_spec("d64 bf16 six-of-seven").smooth_k);
}

TEST(Nearest, IsNearAndNotAnything) {
  const std::vector<std::string> known = {"rotate", "no-rotate", "row", "block"};
  EXPECT_EQ(nearest("rotat", known), "rotate");
  EXPECT_EQ(nearest("rtoate", known), "rotate"); // two letters swapped
  EXPECT_EQ(nearest("blok", known), "block");
  EXPECT_EQ(nearest("no-", known), "no-rotate"); // a prefix
  EXPECT_EQ(nearest("granularity", known), "");
  EXPECT_EQ(nearest("", {"row"}), "");
  EXPECT_EQ(nearest(std::string(1000, 'r'), known), "");
}

TEST(Spec, WordsThatALineLeavesOutHaveTheirDefaults) {
  AttentionSpec s;
  s.head_dim = 64;
  EXPECT_EQ(parse_spec("d64"), s);
  s.causal = Causal::top_left;
  s.rotate = false;
  EXPECT_EQ(parse_spec("no-rotate causal=top-left d64"), s);
  s.dtype = DType::fp16;
  s.group_q = 64, s.group_kv = 128;
  s.smooth_k = false;
  s.window_left = 7;
  s.precision = Precision::gradients16;
  EXPECT_EQ(parse_spec("d64 fp16 causal=top-left row 64x128 gradients16 no-rotate no-smooth-k "
                       "window_left=7"),
            s);
}

TEST(Spec, ALineWithoutItsVersionIsToldIt) {
  const std::string line = to_string(*resolved(AttentionSpec()));
  expect_refusal([&] { parse_spec(line.substr(0, line.rfind(' '))); },
                 {"does not say the version of its numerics", "ends with 'numerics=5'. Add that"});
}

TEST(Spec, FieldsAreSetByNameFromText) {
  AttentionSpec s;
  visit_fields(*resolved({64, DType::fp16, Causal::bottom_right, Granularity::block,
                          Precision::qk16, false, false, false}),
               [&](const Label& label, const auto& value) {
                 EXPECT_TRUE(set_field(s, label.name, value_text(value))) << label.name;
               });
  EXPECT_EQ(to_string(s), "d64 fp16 causal=bottom-right block 128x64 sink_keys=0 qk16 numerics=5");
  EXPECT_FALSE(set_field(s, "headdim", "64"));
  expect_refusal([&] { set_field(s, "head_dim", "64x"); }, {"head_dim", "'64x'", "whole number"});
  expect_refusal([&] { set_field(s, "rotate", "maybe"); }, {"rotate", "'maybe'", "yes or no"});
}

TEST(Spec, DifferencesAreTheFieldsThatDiffer) {
  AttentionSpec s;
  s.rotate = false, s.group_kv = 128;
  std::string seen;
  visit_differences(s, AttentionSpec(), [&](const Label& label, const auto& value) {
    seen += std::string(label.name) + "=" + value_text(value) + " ";
  });
  EXPECT_EQ(seen, "group_kv=128 rotate=no ");
}

} // namespace
