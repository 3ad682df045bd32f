//===- shared_dout_test.cpp - Exact attention's share of dO, quantised ------===//
//
// Beside linear attention the pre-pass multiplies dO by each query's alpha. All that it makes must
// be, bit by bit, what the pre-pass of a call without linear attention makes of the product.
//
//===----------------------------------------------------------------------===//
#include "generator/definition.h"
#include "generator/operation.h"
#include "tests/gpu/case.h"
#include "tests/gpu/launched.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Values = std::vector<float>;

struct SharedCase {
  const char* name;
  const char* spec;
  Problem problem;
  Layout layout;
  int tokens; ///< that share an alpha
  bool of_rest = false;
};

class SharedDout : public OnGpu, public testing::WithParamInterface<SharedCase> {
protected:
  const SharedCase& of_case = GetParam();
  const AttentionSpec given_spec = parse_spec(of_case.spec);
  const Problem p = of_case.problem;
  const int64_t d = given_spec.head_dim, heads = p.batch * p.heads;
  const int64_t lists = list_blocks(Tokens::queries, given_spec, p);
  const int64_t blocks = list_blocks(Tokens::keys, given_spec, p);
  const int64_t words = list_words(given_spec, p), shares = ceil_div(p.seq_q, of_case.tokens);
  std::mt19937 draw{7};
  Values q, k, v, out, dout, lse, alpha;
  std::vector<uint32_t> bits;

  Values drawn(int64_t count) {
    std::normal_distribution<float> normal;
    Values values(static_cast<size_t>(count));
    for (float& x : values)
      x = reference::round_to(given_spec.dtype, normal(draw));
    return values;
  }

  void SetUp() override {
    OnGpu::SetUp();
    q = drawn(heads * p.seq_q * d), out = drawn(heads * p.seq_q * d);
    k = drawn(p.batch * p.heads_kv * p.seq_kv * d), v = drawn(p.batch * p.heads_kv * p.seq_kv * d);
    dout = drawn(heads * p.seq_q * d), lse = drawn(heads * p.seq_q);
    for (int64_t i = 0; i < heads * p.seq_q * d; ++i)
      dout[i] = reference::round_to(given_spec.dtype,
                                    std::ldexp(dout[i], static_cast<int>(i / d * 7 % 13) - 8));
    std::uniform_real_distribution<float> octaves(-6, 0);
    alpha.resize(static_cast<size_t>(heads * shares));
    for (float& x : alpha)
      x = of_case.of_rest ? octaves(draw) + 3 : std::exp2(octaves(draw));
    bits.resize(static_cast<size_t>(heads * lists * words));
    for (int64_t list = 0; list < heads * lists; ++list) {
      // A scale block of the first head lists nothing and takes the head's magnitude, the last head
      // lists nothing at all, and one list of each head is of all blocks and one is invalid.
      const int64_t head = list / lists, in_head = list % lists;
      const bool nothing = head == heads - 1 || (head == 0 && in_head * given_spec.sparse_q < 256);
      for (int64_t block = 0; block < blocks && !nothing; ++block)
        if (in_head == lists - 1 || draw() % 3 == 0)
          bits[list * words + block / 32] |= 1u << block % 32;
      if (in_head == lists - 2)
        bits[(list + 1) * words - 1] |= 1u << 31;
    }
  }

  /// The share of a query's output that exact attention has.
  double share_of(int64_t head, int64_t query) const {
    const uint32_t* list = &bits[(head * lists + query / given_spec.sparse_q) * words];
    int64_t listed = 0;
    for (int64_t block = 0; block < blocks; ++block)
      listed += list[block / 32] >> block % 32 & 1;
    if (listed == 0 || list[words - 1] >> 31)
      return 0;
    if (listed == blocks && given_spec.linear == LinearKeys::complement)
      return 1;
    const double given = alpha[head * shares + query / of_case.tokens];
    return of_case.of_rest ? 1 / (1 + std::exp(given - lse[head * p.seq_q + query])) : given;
  }

  /// What the pre-pass of such a call writes, by operands.
  std::map<Operand, std::vector<std::byte>> copies(const ResolvedSpec& spec,
                                                   const Values& of_dout) {
    const Buffer workspace(workspace_bytes(Pass::backward, spec, p));
    OperandValues values{};
    place_workspace(Pass::backward, spec, p, workspace.pointer(), values);
    set(values, Operand::softmax_scale, 0.125f);
    std::vector<std::unique_ptr<DeviceTensor>> tensors;
    for (const auto& [operand, x] : {std::pair<Operand, const Values*>{Operand::q, &q},
                                     {Operand::k, &k},
                                     {Operand::v, &v},
                                     {Operand::dout, &of_dout},
                                     {Operand::out, &out}}) {
      const bool of_keys = operand == Operand::k || operand == Operand::v;
      tensors.push_back(
          std::make_unique<DeviceTensor>(spec->dtype, p.batch, of_keys ? p.heads_kv : p.heads,
                                         of_keys ? p.seq_kv : p.seq_q, d, of_case.layout, kPoison));
      tensors.back()->upload(*x);
      const Tensor& view = tensors.back()->view();
      set_tensor(values, operand, reinterpret_cast<uint64_t>(view.data),
                 {view.stride_b, view.stride_h, view.stride_s});
    }
    Buffer lses(lse.size() * 4), alphas(alpha.size() * 4), row_bits(bits.size() * 4);
    lses.upload(lse), alphas.upload(alpha), row_bits.upload(bits);
    set_tensor(values, Operand::alpha, alphas.pointer(), {p.heads * shares, shares, 1});
    const auto put = [&](Operand operand, uint64_t value) { set(values, operand, value); };
    put(Operand::lse, lses.pointer()), put(Operand::row_bits, row_bits.pointer());
    put(Operand::alpha_tokens, static_cast<uint64_t>(of_case.tokens));
    put(Operand::alpha_of_rest, of_case.of_rest);
    put(Operand::row_stride_b, static_cast<uint64_t>(p.heads * lists * words));
    put(Operand::row_stride_h, static_cast<uint64_t>(lists * words));
    const driver::DeviceInfo info = driver::device_info(0);
    const Arch& arch = arch_for_capability(info.major, info.minor);
    const Tiles tiles = sums_dp_in_fp16(spec) ? mma_tiles(spec) : Tiles();
    std::vector<KernelSpec> kernels = Operation(spec, arch, tiles).kernels(Pass::backward);
    std::erase_if(kernels, [](const KernelSpec& kernel) {
      return kernel.kind != KernelKind::key_mean && kernel.kind != KernelKind::quantize;
    });
    EXPECT_EQ(kernels.size(), spec->smooth_k || sums_dp_in_fp16(spec) ? 2u : 1u);
    launch_alone(kernels, p, values, workspace);

    const auto all = workspace.download<std::byte>();
    const int64_t rows = heads * get(values, Operand::padded_q);
    const int64_t units_q = units(Tokens::queries, channel_tokens_q(spec), spec, p);
    std::map<Operand, std::vector<std::byte>> found;
    for (const auto& [operand, bytes] : {std::pair{Operand::dot8, rows * d},
                                         {Operand::dot8_scale, heads * units_q * 8 * d},
                                         {Operand::dout_rows, rows * d * 2},
                                         {Operand::q_rows, rows * 16},
                                         {Operand::half_dout, rows * d * 2},
                                         {Operand::dp_factor, rows * 4},
                                         {Operand::sparse_dout, heads * p.seq_q * d * 2}})
      if (const uint64_t address = get(values, operand); address != 0) {
        const auto from = all.begin() + static_cast<int64_t>(address - workspace.pointer());
        found[operand].assign(from, from + bytes);
      }
    return found;
  }

  Values decoded(const std::vector<std::byte>& bytes) const {
    Values values(bytes.size() / 2);
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t code;
      std::memcpy(&code, &bytes[2 * i], 2);
      values[i] = reference::decode(given_spec.dtype, code);
    }
    return values;
  }
};

TEST_P(SharedDout, ItsCopiesAreThoseOfTheProduct) {
  AttentionSpec as_it_comes = given_spec;
  as_it_comes.precision = Precision::gradients16;
  const Values product = decoded(copies(resolved(as_it_comes), dout).at(Operand::sparse_dout));
  ASSERT_EQ(product.size(), dout.size());
  for (size_t i = 0; i < dout.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / d;
    const double exact = dout[i] * share_of(row / p.seq_q, row % p.seq_q);
    if (of_case.of_rest) // the GPU's exponential, and a rounding
      ASSERT_NEAR(product[i], exact, 0.005 * std::fabs(exact)) << row << " " << i % d;
    else
      ASSERT_EQ(product[i], reference::round_to(given_spec.dtype, static_cast<float>(exact)))
          << row << " " << i % d;
  }
  // This tries each pair of these options' values, not each three, if there are two granularities.
  const bool by_pairs = given_spec.sparse_q == 128;
  for (Granularity granularity : {Granularity::row, Granularity::block})
    for (const auto& [precision, name] : sagebwd::Words<Precision>::all)
      for (DpSums dp_sums : {DpSums::fp32, DpSums::fp16}) {
        AttentionSpec s = given_spec;
        s.granularity = granularity, s.precision = precision, s.dp_sums = dp_sums;
        const int odd = (static_cast<int>(precision) + (granularity == Granularity::block) +
                         (dp_sums == DpSums::fp16)) %
                        2;
        if (by_pairs ? odd != 0 : granularity == Granularity::block)
          continue;
        const ResolvedSpec spec = resolved(s);
        SCOPED_TRACE(to_string(*spec));
        auto found = copies(spec, dout);
        const auto expected = copies(spec.without_linear(), product);
        // Only where rows have scales of their own nobody reads the product itself.
        EXPECT_EQ(found.contains(Operand::sparse_dout), !scales_dout(s));
        found.erase(Operand::sparse_dout);
        ASSERT_EQ(found.size(), expected.size());
        for (const auto& [operand, bytes] : expected)
          EXPECT_TRUE(found.at(operand) == bytes) << name_of(operand);
        if (HasFailure())
          return; // the other specs would say the same
      }
}

const SharedCase kSharedCases[] = {
    {"D64", "d64 sparse_q=64 sparse_kv=64 linear=complement", {2, 2, 1, 700, 300}, {true, 8}, 64},
    {"D128_all_fp16", "d128 fp16 sparse_q=128 sparse_kv=64 linear=all", {1, 3, 3, 600, 200}, {}, 1},
    {"D64_rest",
     "d64 sparse_q=128 sparse_kv=64 linear=complement",
     {2, 2, 1, 650, 2100},
     {false, 16},
     1,
     /*of_rest=*/true},
};
INSTANTIATE_TEST_SUITE_P(Gpu, SharedDout, testing::ValuesIn(kSharedCases),
                         [](const auto& info) { return std::string(info.param.name); });

} // namespace
