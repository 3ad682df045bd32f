//===- mask_test.cpp - Masks that are expressions ---------------------------===//
#include "tests/gpu/listed.h"

#include "generator/pointwise.h"

#include <functional>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using reference::Inputs;
using reference::TableOfNumbers;

/// Who sees whom, as C++ says it, and not as the expression does.
using Sees = std::function<bool(int64_t b, int64_t h, int64_t q, int64_t k)>;

struct NamedMask {
  std::string text;
  std::vector<TableOfNumbers> tables;
  Sees sees;
};

/// Numbers of documents, of rising length, for each sequence's tokens.
TableOfNumbers documents(const Problem& p, int64_t tokens) {
  TableOfNumbers table{p.batch, tokens, {}};
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < tokens; ++i)
      table.numbers.push_back(static_cast<int32_t>(i / (90 + 40 * b)));
  return table;
}

NamedMask mask_named(const std::string& name, const Problem& p) {
  if (name == "Window")
    return {"q >= k & q - k < 150", {}, [](auto, auto, int64_t q, int64_t k) {
              return q >= k && q - k < 150;
            }};
  if (name == "Documents") {
    const TableOfNumbers table = documents(p, std::max(p.seq_q, p.seq_kv));
    return {"doc[b, q] == doc[b, k] & q >= k", {table}, [=](int64_t b, auto, int64_t q, int64_t k) {
              return q / (90 + 40 * b) == k / (90 + 40 * b) && q >= k;
            }};
  }
  if (name == "Prefix") // of another length in each head, and no key for some queries
    return {"k < length[h] | q > k + 70",
            {{1, 3, {40, 0, 200}}}, // heads beyond have the last
            [](auto, int64_t h, int64_t q, int64_t k) {
              return k < std::array{40, 0, 200}[static_cast<size_t>(std::min<int64_t>(h, 2))] ||
                     q > k + 70;
            }};
  if (name == "Tiles") // a video's neighbours: some blocks are whole
    return {"abs(q // 128 - k // 128) <= 1 & (q + k) % 5 != 0 | q // 64 == 3",
            {},
            [](auto, auto, int64_t q, int64_t k) {
              return (std::abs(q / 128 - k / 128) <= 1 && (q + k) % 5 != 0) || q / 64 == 3;
            }};
  return {"q < 128 | k >= 256", {}, [](auto, auto, int64_t q, int64_t k) {
            return q < 128 || k >= 256; // no score of a block of 64 x 64 is alone
          }};
}

std::vector<uint8_t> dense(const Problem& p, const Sees& sees) {
  std::vector<uint8_t> seen;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t q = 0; q < p.seq_q; ++q)
        for (int64_t k = 0; k < p.seq_kv; ++k)
          seen.push_back(sees(b, h, q, k));
  return seen;
}

Inputs inputs_under(const NamedMask& mask, const AttentionSpec& spec, const Problem& p) {
  Inputs in = reference::random_inputs(p, spec.head_dim, spec.dtype, 1, 7);
  in.tables = mask.tables;
  in.seen = dense(p, mask.sees);
  return in;
}

/// Names end with that of their mask.
std::vector<Case> mask_cases() {
  using enum DType;
  using enum Granularity;
  using enum Precision;
  constexpr Causal none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  const struct {
    const char* name;
    AttentionSpec spec;
    int queries = 0, keys = 0; ///< of a block of scores that may be left out
  } all[] = {
      {"D64_bf16_Window", {64, bf16, none, row}},
      {"D64_bf16_Ws_Tiles", {64, bf16, none, row}},
      {"D64_fp16_Mma_TopLeft_Documents", {64, fp16, top, row}},
      {"D64_bf16_64x64_Mma_Tiles", {64, bf16, none, row}, 64, 64},
      {"D64_bf16_128x64_Prefix", {64, bf16, none, row}, 128, 64},
      {"D64_bf16_Gradients16_Prefix", {64, bf16, none, row, gradients16}},
      {"D64_fp16_Qk16_BottomRight_Tiles", {64, fp16, bottom, row, qk16}},
      {"D64_bf16_Dv16_Mma_Documents", {64, bf16, none, row, dv16}},
      {"D64_bf16_Block_Window", {64, bf16, none, block}},
      {"D128_bf16_Documents", {128, bf16, none, row}},
      {"D128_bf16_Mma_Prefix", {128, bf16, none, row}},
      {"D128_fp16_Gradients16_Tiles", {128, fp16, none, row, gradients16}},
      {"D72_fp16_Window", {72, fp16, none, row}},
      {"D256_bf16_Documents", {256, bf16, none, row}},
  };
  std::vector<Case> cases;
  for (const auto& given : all) {
    Case c{given.name, given.spec, {}};
    c.spec.mask = mask_named(c.name.substr(c.name.rfind('_') + 1), {1, 1, 1, 1, 1}).text;
    c.spec.sparse_q = given.queries, c.spec.sparse_kv = given.keys;
    if (c.name.find("Mma") != std::string::npos)
      c.tiles = mma_tiles(c.spec);
    if (c.name.find("Ws") != std::string::npos)
      c.tiles = family_tiles(c.spec, Family::ws);
    cases.push_back(c);
  }
  return cases;
}

class WithMask : public CaseTest {
protected:
  const AttentionSpec& spec() const { return attention->spec(); }
  NamedMask mask(const Problem& p) const {
    return mask_named(GetParam().name.substr(GetParam().name.rfind('_') + 1), p);
  }
};

TEST_P(WithMask, NearExactAndEmulated) {
  for (const Problem& p : {Problem{1, 4, 2, 400, 500}, Problem{2, 2, 2, 330, 300}}) {
    const Inputs in = inputs_under(mask(p), spec(), p);
    expect_close(spec(), in, run(*attention, in));
  }
}

TEST_P(WithMask, OddLengths) {
  for (const auto& [m, n] : {std::pair{1, 63}, {65, 129}, {300, 65}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    const Problem p = {1, 2, 1, m, n};
    const Inputs in = inputs_under(mask(p), spec(), p);
    expect_close(spec(), in, run(*attention, in), /*few=*/true);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, WithMask, testing::ValuesIn(mask_cases()), case_name);

/// The expression says the same to the CPU, whose evaluator verify and the tools use.
TEST(MaskEvaluated, IsWhatThePredicateSays) {
  for (const char* name : {"Window", "Documents", "Prefix", "Tiles", "Whole"}) {
    const Problem p = {2, 4, 2, 150, 210};
    const NamedMask mask = mask_named(name, p);
    AttentionSpec spec;
    spec.mask = mask.text;
    EXPECT_EQ(reference::seen_by_mask(*resolved(spec), p, mask.tables), dense(p, mask.sees))
        << name;
  }
}

class MaskBits : public OnGpu {};

/// Which blocks are listed, and in which some scores are hidden, counted from the dense mask.
TEST_F(MaskBits, SayWhichBlocksAreSeen) {
  const Problem p = {2, 2, 2, 260, 4200};
  for (const char* name : {"Window", "Documents", "Prefix", "Tiles", "Whole"}) {
    SCOPED_TRACE(name);
    const NamedMask mask = mask_named(name, p);
    AttentionSpec spec{.head_dim = 64, .mask = mask.text};
    Attention attention(spec, 0);
    const AttentionSpec& resolved = attention.spec();
    Inputs in = inputs_under(mask, resolved, p);
    Operands operands(attention, in);
    const auto words = operands.row_bits->download<uint32_t>();

    const Problem of = {mask_depends_on_batch(resolved) ? p.batch : 1,
                        mask_depends_on_head(resolved) ? p.heads : 1, 1, p.seq_q, p.seq_kv};
    std::vector<uint32_t> expected;
    for (int64_t b = 0; b < of.batch; ++b)
      for (int64_t h = 0; h < of.heads; ++h)
        for (int64_t q = 0; q < p.seq_q; q += resolved.sparse_q) {
          std::vector<uint32_t> row(static_cast<size_t>(list_words(resolved, p)));
          for (int64_t block = 0; block * resolved.sparse_kv < p.seq_kv; ++block) {
            int64_t seen = 0, all = 0;
            for (int64_t i = q; i < std::min(p.seq_q, q + resolved.sparse_q); ++i)
              for (int64_t k = block * resolved.sparse_kv;
                   k < std::min(p.seq_kv, (block + 1) * resolved.sparse_kv); ++k, ++all)
                seen += mask.sees(b, h, i, k);
            row[static_cast<size_t>(block / 32 * 2)] |= uint32_t{seen > 0} << block % 32;
            row[static_cast<size_t>(block / 32 * 2 + 1)] |= uint32_t{seen > 0 && seen < all}
                                                            << block % 32;
          }
          expected.insert(expected.end(), row.begin(), row.end());
        }
    EXPECT_EQ(words, expected);
  }
}

} // namespace
