//===- products_test.cpp - Six products in INT8, one in 16 bits -------------===//
//
// SageBwd's claim, read off the machine: of attention's seven products (S and O = P V forward; S
// again for dQ and for dK and dV, dP likewise, and dV, dK, dQ backward) all but dP run on INT8
// tensor cores. The matrix instructions of each kernel's loop over tiles are counted in its PTX and
// compared with what the tile sizes imply.
//
//===----------------------------------------------------------------------===//

#include "generator/plan.h"
#include "tests/templates/nvrtc_fixture.h"
#include "tests/templates/ptx_loops.h"

using namespace sagebwd;
using test::LoopProducts;
using test::Products;

namespace {

constexpr KernelKind kAttention[] = {KernelKind::forward, KernelKind::backward_dq,
                                     KernelKind::backward_dkv};

/// Tokens the kernel's loop goes over in one pass.
int walked(const KernelSpec& k) {
  return k.kind == KernelKind::backward_dkv ? 64 : k.attention.group_kv;
}

/// Instructions per warp (mma) or warpgroup (wgmma) and pass over `walked` tokens. One gives
/// `width` columns of results for all its rows and sums 32 bytes.
Products implied(const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const int width = k.tile.family == Family::wgmma ? 64 : 8;
  const int tokens = walked(k), d = s.head_dim;
  const int scores8 = tokens / width * (d / 32); // rows x tokens, summed over channels
  const int scores16 = tokens / width * (d / 16);
  const int outputs8 = d / width * (tokens / 32); // rows x channels, summed over tokens
  Products n;
  (s.precision == Precision::qk16 ? n.float16 : n.s8) +=
      s.precision == Precision::qk16 ? scores16 : scores8;
  switch (k.kind) {
  case KernelKind::forward:
    n.u8 += outputs8; // P V
    break;
  case KernelKind::backward_dq:
    n.float16 += scores16; // dP
    n.s8 += outputs8;      // dS K
    break;
  default:
    n.float16 += scores16; // dP
    n.u8 += outputs8;      // P^T dO
    n.s8 += outputs8;      // dS^T Q
  }
  return n;
}

/// How many whole products of rows x walked x HEAD_DIM the instructions amount to: in INT8 and in
/// 16 bits. -1 where they are no whole number.
std::pair<int, int> whole_products(const Products& n, const KernelSpec& k) {
  const int rows = k.tile.family == Family::wgmma ? 64 : 16;
  const int width = k.tile.family == Family::wgmma ? 64 : 8;
  const int one = rows * walked(k) * k.attention.head_dim;
  const int macs8 = (n.s8 + n.u8) * rows * width * 32, macs16 = n.float16 * rows * width * 16;
  return {macs8 % one ? -1 : macs8 / one, macs16 % one ? -1 : macs16 / one};
}

class ProductsTest : public test::WithNvrtc {
protected:
  static void check(const KernelSpec& k) {
    SCOPED_TRACE(kernel_name(k) + " for " + std::string(k.arch.name));
    const std::string element = k.attention.dtype == DType::bf16 ? "bf16" : "f16";
    const LoopProducts found = test::count_products(test::compile(k, /*want_ptx=*/true).ptx,
                                                    k.tile.family == Family::wgmma, element);
    EXPECT_EQ(found.objection, "");
    EXPECT_EQ(found.loops, 1);
    EXPECT_EQ(found.outside, Products{});
    EXPECT_EQ(found.per_pass, implied(k));

    const bool qk16 = k.attention.precision == Precision::qk16;
    const int all = k.kind == KernelKind::forward ? 2 : k.kind == KernelKind::backward_dq ? 3 : 4;
    const int in_16_bits = (k.kind != KernelKind::forward) + qk16; // dP; S under qk16
    EXPECT_EQ(whole_products(found.per_pass, k), std::pair(all - in_16_bits, in_16_bits));
  }
  static void check_all(const char* arch, AttentionSpec spec) {
    for (int head_dim : {64, 128})
      for (Granularity granularity : {Granularity::row, Granularity::block}) {
        spec.head_dim = head_dim, spec.granularity = granularity;
        for (Pass pass : {Pass::forward, Pass::backward})
          for (const KernelSpec& kernel :
               kernels_of(pass, resolved(spec, find_arch(arch)), find_arch(arch)))
            if (kernel.kind >= KernelKind::forward)
              check(kernel);
      }
  }
};

AttentionSpec with(Precision precision, DType dtype, Causal causal) {
  AttentionSpec spec;
  spec.precision = precision, spec.dtype = dtype, spec.causal = causal;
  return spec;
}

TEST_F(ProductsTest, OfTheMmaFamilySixAreInt8) {
  check_all("sm_80", with(Precision::six_of_seven, DType::bf16, Causal::none));
}
TEST_F(ProductsTest, OfTheMmaFamilyUnderQk16FiveAreInt8) {
  check_all("sm_80", with(Precision::qk16, DType::fp16, Causal::top_left));
}
TEST_F(ProductsTest, OfTheWgmmaFamilySixAreInt8) {
  check_all("sm_90a", with(Precision::six_of_seven, DType::fp16, Causal::top_left));
}
TEST_F(ProductsTest, OfTheWgmmaFamilyUnderQk16FiveAreInt8) {
  check_all("sm_90a", with(Precision::qk16, DType::bf16, Causal::none));
}

// Two stages, larger blocks, and loops that are unrolled in part (sm_100, `block`, 128 channels).
TEST_F(ProductsTest, DoNotDependOnTheTile) {
  AttentionSpec spec;
  spec.granularity = Granularity::block;
  check(
      kernels_of(Pass::backward, resolved(spec, find_arch("sm_100")), find_arch("sm_100")).back());
  const Tiles tiles = {{KernelKind::forward, parse_tile("mma 128x64 w8 s2 b1")},
                       {KernelKind::backward_dq, parse_tile("mma 128x64 w8 s2 b1")},
                       {KernelKind::backward_dkv, parse_tile("mma 64x128 w8 s2 b1")}};
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel :
         kernels_of(pass, resolved(AttentionSpec(), find_arch("sm_80")), find_arch("sm_80"), tiles))
      if (kernel.kind >= KernelKind::forward)
        check(kernel);
}

TEST(CountProducts, FollowsBranchesAndNestedLoops) {
  const std::string s8 = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {};\n";
  const std::string bf16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {};\n";
  const std::string arms =
      "@%p1 bra $L_else;\n" + s8 + "bra.uni $L_join;\n$L_else:\n" + s8 + "$L_join:\n";
  const std::string nested = "mov.u32 %r1, -4;\n$L_inner:\n" + bf16 +
                             "add.s32 %r1, %r1, 2;\nsetp.ne.s32 %p2, %r1, 4;\n"
                             "@%p2 bra $L_inner;\n";
  const auto count = [](const std::string& text) {
    return test::count_products(".entry k\n" + text + "ret;\n", false, "bf16");
  };
  const std::string back = "@%p3 bra $L_tiles;\n";
  LoopProducts found = count("$L_tiles:\n" + arms + nested + back);
  EXPECT_EQ(found.loops, 1);
  EXPECT_EQ(found.per_pass, (Products{.s8 = 1, .float16 = 4}));
  EXPECT_EQ(found.outside, Products{});
  EXPECT_EQ(found.objection, "");

  found = count(s8 + "$L_tiles:\n@%p1 bra $L_skip;\n" + bf16 + "$L_skip:\n" + back);
  EXPECT_EQ(found.outside, Products{.s8 = 1});
  EXPECT_NE(found.objection, "");
  EXPECT_EQ(count("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {};\n").outside,
            Products{.other = 1});
}

// The compiler's own size of the parameter against what the runtime packs.
TEST_F(ProductsTest, ParametersAreAsLargeAsThePlanPacksThem) {
  AttentionSpec spec;
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel :
         kernels_of(pass, resolved(spec, find_arch("sm_80")), find_arch("sm_80"))) {
      std::byte params[512];
      const size_t bytes = pack_params(fields_of(kernel), {}, params);
      const std::string declared = "_param_0[" + std::to_string(bytes) + "]";
      EXPECT_NE(test::compile(kernel, true).ptx.find(declared), std::string::npos)
          << kernel_name(kernel) << " has no " << declared;
    }
}

} // namespace
