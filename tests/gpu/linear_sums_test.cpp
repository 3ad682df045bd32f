//===- linear_sums_test.cpp - Sums over the blocks that lists leave out -----===//
//
// Each kernel alone, against sums in FP64. Lists are drawn anew for every case.
//
//===----------------------------------------------------------------------===//
#include "generator/plan.h"
#include "tests/gpu/beside_lists.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

constexpr double kSumRoundedOnce = 0.003; ///< to bf16
constexpr double kSummedInFp32 = 1e-5;    ///< in FP32

struct SumsCase {
  const char* name;
  int head_dim;
  int queries, keys; ///< of a block
  int64_t batch, heads, heads_kv;
  int64_t lists, blocks;               ///< of a head
  bool one_of_sequences, one_of_heads; ///< lists that are shared
  DType dtype = DType::bf16;
  /// The last blocks have fewer tokens than the others.
  Problem problem = {batch, heads, heads_kv, lists* queries - 3, blocks* keys - 5};
  Layout layout = {};
};

class LinearSums : public BesideLists<SumsCase> {
protected:
  const int64_t group = p.heads / p.heads_kv, elements = d * d;
  const int64_t words = blocks / 32 + 1;
  const int64_t listed_sequences = of_case.one_of_sequences ? 1 : p.batch;
  const int64_t listed_heads = of_case.one_of_heads ? 1 : p.heads;
  std::vector<bool> listed; ///< (listed_sequences, listed_heads, lists, blocks)

  bool lists_block(int64_t head, int64_t list, int64_t block) const {
    const int64_t of = head / p.heads % listed_sequences * listed_heads + head % listed_heads;
    return listed[(of * lists + list) * blocks + block];
  }
  int64_t kv_of(int64_t head) const { return head / p.heads * p.heads_kv + head % p.heads / group; }

  /// Gives lists of half of the blocks. Some are marked as wrong, one names no block, and one all.
  void give_lists() {
    const int64_t rows = listed_sequences * listed_heads * lists;
    std::vector<uint32_t> bits(rows * words);
    listed.assign(rows * blocks, false);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < blocks; ++block)
        if ((draw() & 1 || row % 11 == 5) && row % 11 != 4) {
          listed[row * blocks + block] = true;
          bits[row * words + block / 32] |= 1u << block % 32;
        }
      if (row % 3 == 1)
        bits[(row + 1) * words - 1] |= 1u << 31;
    }
    numbers(Operand::row_bits, bits.size(), &bits,
            {of_case.one_of_sequences ? 0 : listed_heads * lists * words,
             of_case.one_of_heads ? 0 : lists * words});
  }

  struct Results {
    const DeviceTensor& sums;
    const Buffer& norms;
  };
  /// `count` terms, and memory for `results` results.
  Results give_tensors(Operand terms, Operand norms, int64_t count, const Values& of_terms,
                       const Values& of_norms, Operand sums, Operand norm_sums, int64_t results) {
    give(terms, DType::bf16, 1, 1, count * d, &of_terms);
    numbers(norms, count * d, &of_norms);
    const DeviceTensor& to = give(sums, DType::bf16, 1, 1, results * d, nullptr);
    return {to, numbers(norm_sums, results * d)};
  }
  /// Compares with sums of what `takes(result, term)` says.
  template <typename Takes>
  void expect_sums(const Results& got, int64_t results, const Values& terms, const Values& norms,
                   const Takes& takes) {
    Exact sums(results * elements), norm_sums(results * d);
    const auto count = static_cast<int64_t>(norms.size()) / d;
    for (int64_t result = 0; result < results; ++result)
      for (int64_t term = 0; term < count; ++term) {
        if (!takes(result, term))
          continue;
        for (int64_t i = 0; i < elements; ++i)
          sums[result * elements + i] += terms[term * elements + i];
        for (int64_t c = 0; c < d; ++c)
          norm_sums[result * d + c] += norms[term * d + c];
      }
    Values sums_got = got.sums.download("sums", faults);
    EXPECT_EQ(faults, Faults());
    expect_near(sums_got, sums, kSumRoundedOnce, "sums");
    expect_near(got.norms.download<float>(), norm_sums, kSummedInFp32, "sums of vectors");
  }
};

TEST_P(LinearSums, OfBlocksOfKeys) {
  const int64_t count = heads_kv * blocks;
  const Values terms = drawn(count * elements, DType::bf16), norms = drawn(count * d, DType::bf16);
  for (const bool one : {false, true}) {
    SCOPED_TRACE(one ? "one sum" : "sums");
    given.clear();
    if (!one)
      give_lists();
    const int64_t results = one ? heads_kv : heads * lists;
    const Results got = give_tensors(Operand::key_states, Operand::key_norms, count, terms, norms,
                                     Operand::query_sums, Operand::query_norms, results);
    launch(KernelKind::linear_sums, one);
    expect_sums(got, results, terms, norms, [&](int64_t result, int64_t term) {
      if (one)
        return term / blocks == result;
      const int64_t head = result / lists;
      return term / blocks == kv_of(head) && !lists_block(head, result % lists, term % blocks);
    });
  }
}

TEST_P(LinearSums, OfBlocksOfQueries) {
  const int64_t count = heads * lists;
  const Values terms = drawn(count * elements, DType::bf16), norms = drawn(count * d, DType::bf16);
  for (const bool one : {false, true}) {
    SCOPED_TRACE(one ? "one sum" : "sums");
    given.clear();
    if (!one)
      give_lists();
    const int64_t results = one ? heads_kv : heads_kv * blocks;
    const Results got = give_tensors(Operand::query_dsums, Operand::query_dnorms, count, terms,
                                     norms, Operand::key_dsums, Operand::key_dnorms, results);
    launch(KernelKind::linear_dsums, one);
    expect_sums(got, results, terms, norms, [&](int64_t result, int64_t term) {
      const int64_t head = term / lists;
      if (one)
        return kv_of(head) == result;
      return kv_of(head) == result / blocks && !lists_block(head, term % lists, result % blocks);
    });
  }
}

const SumsCase kSumsCases[] = {
    {"D64_OneBlock", 64, 128, 64, 1, 2, 1, 1, 1, false, false},
    {"D64_31Blocks", 64, 64, 64, 2, 2, 2, 31, 31, false, false},
    {"D64_32Blocks_OneListOfHeads", 64, 128, 64, 2, 4, 2, 32, 32, false, true},
    {"D64_33Blocks_OneListOfAll", 64, 64, 128, 2, 2, 1, 33, 33, true, true},
    {"D64_70Blocks_fp16", 64, 128, 128, 1, 4, 2, 70, 70, true, false, DType::fp16},
    {"D64_LongLists", 64, 64, 64, 1, 1, 1, 2, 270, false, false},
    {"D64_ManyLists", 64, 64, 64, 1, 3, 1, 140, 33, false, false},
    {"D64_RunsOfTiles", 64, 128, 64, 2, 16, 8, 66, 35, false, false}, // for so many heads of keys
    {"D128_4Lists_8Blocks", 128, 128, 64, 1, 2, 1, 4, 8, false, false},
    {"D128_33Lists_70Blocks", 128, 128, 128, 1, 1, 1, 33, 70, false, false},
};
INSTANTIATE_TEST_SUITE_P(Gpu, LinearSums, testing::ValuesIn(kSumsCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(LinearSums, WrongCallsAreRefused) {
  const auto expect_refused = [&](bool one_sum, const std::string& why) {
    try {
      launch_linear({KernelKind::linear_sums, p, given, one_sum, nullptr}, *attention);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  given = {{Operand::key_states, 0x100}, {Operand::key_norms, 0x100}};
  expect_refused(false, "row_bits of linear_sums is missing");
  expect_refused(true, "query_sums of linear_sums is missing");
  given.push_back({Operand::row_bits, 0x102});
  expect_refused(false, "row_bits of linear_sums: the address is not a multiple of 4 bytes");
}

} // namespace
