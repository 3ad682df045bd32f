//===- products_test.cpp - Which products run in INT8, which in 16 bits -----===//
//
// SageBwd's claim, read off the machine: of attention's seven products (S and O = P V forward; S
// again for dQ and for dK and dV, dP likewise, and dV, dK, dQ backward) all but dP run on INT8
// tensor cores, or as many as another precision says. The matrix instructions of each kernel's loop
// over tiles are counted in its PTX and compared with what the tile sizes imply. Kernels that
// found_sound.txt lists are not compiled again.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"
#include "tests/templates/ptx_loops.h"

#include <sstream>

using namespace sagebwd;
using test::LoopProducts;
using test::Products;

namespace {

constexpr KernelKind kAttention[] = {KernelKind::forward, KernelKind::backward_dq,
                                     KernelKind::backward_dkv};

/// Tokens the kernel's loop goes over in one pass.
int walked(const KernelSpec& k) {
  if (k.kind == KernelKind::backward_dkv)
    return 64;
  if (k.kind == KernelKind::backward_dq && !which_int8(k.attention.precision).dq)
    return k.tile.family == Family::ws ? 128 : 64;
  return k.attention.group_kv;
}

/// Instructions per warp (mma) or warpgroup (wgmma) and pass over `walked` tokens. One gives
/// `width` columns of results for all its rows and sums 32 bytes.
bool of_warpgroups(const KernelSpec& k) {
  return k.tile.family.instruction() == Instruction::wgmma;
}
int width(const KernelSpec& k) { return of_warpgroups(k) ? 64 : 8; }
void add(Products& n, bool in_int8, int Products::*int8, int in_16_bits) {
  (in_int8 ? n.*int8 : n.float16) += in_int8 ? in_16_bits / 2 : in_16_bits;
}

/// Counts what is rows x tokens, summed over channels: S, in the backward with dP.
Products implied_scores(const KernelSpec& k) {
  const int count = walked(k) / width(k) * (k.attention.head_dim / 16);
  Products n;
  add(n, which_int8(k.attention.precision).s, &Products::s8, count);
  if (k.kind != KernelKind::forward) // sums in FP16 are none of the wanted type
    (sums_dp_in_fp16(k.attention) ? n.other : n.float16) += count;
  return n;
}

Products implied(const KernelSpec& k) {
  const int outputs = k.attention.head_dim / width(k) * (walked(k) / 16); // rows x channels
  const Int8Products int8 = which_int8(k.attention.precision);
  Products n = implied_scores(k);
  switch (k.kind) {
  case KernelKind::forward:
    add(n, int8.pv, &Products::u8, outputs);
    break;
  case KernelKind::backward_dq:
    add(n, int8.dq, &Products::s8, outputs);
    break;
  default:
    add(n, int8.dv, &Products::u8, outputs);
    add(n, int8.dk, &Products::s8, outputs);
  }
  return n;
}

/// A split backward of ws starts dP from -delta, a product of bf16 with 16 columns: one of as many
/// columns of results as tokens, which where the tensors are fp16 is none of the wanted type.
Products start_of_values(const KernelSpec& k) {
  const bool split = k.kind == KernelKind::backward_dq || k.kind == KernelKind::backward_dkv;
  if (!split || k.tile.family != Family::ws)
    return {};
  return k.attention.dtype == DType::bf16 ? Products{.float16 = walked(k) / 64}
                                          : Products{.other = 1};
}
/// Counts what is formed ahead of the loop over tiles, whose passes form the next one's.
Products ahead(const KernelSpec& k) {
  const Products scores = implied_scores(k);
  const bool dkv = k.kind == KernelKind::backward_dkv, ws = k.tile.family == Family::ws;
  if (dkv && ws && k.attention.head_dim == 128)
    return scores + start_of_values(k);
  if (ws && (dkv || k.kind == KernelKind::backward_dq))
    return {.s8 = scores.s8};
  if (dkv && of_warpgroups(k) && k.tile.stages > 1)
    return scores;
  return {};
}

/// How many of a kernel's products are INT8, and how many have 16-bit operands.
std::pair<int, int> products_of(const KernelSpec& k) {
  const Int8Products int8 = which_int8(k.attention.precision);
  const int in_int8 = int8.s + (k.kind == KernelKind::forward       ? int8.pv
                                : k.kind == KernelKind::backward_dq ? int8.dq
                                                                    : int8.dv + int8.dk);
  const int all = k.kind == KernelKind::forward ? 2 : k.kind == KernelKind::backward_dq ? 3 : 4;
  return {in_int8, all - in_int8};
}

/// How many whole products of rows x walked x HEAD_DIM the instructions amount to: in INT8 and in
/// 16 bits. -1 where they are no whole number.
std::pair<int, int> whole_products(const Products& n, const KernelSpec& k) {
  const int rows = of_warpgroups(k) ? 64 : 16;
  const int one = rows * walked(k) * k.attention.head_dim;
  const int macs8 = (n.s8 + n.u8) * rows * width(k) * 32, macs16 = n.float16 * rows * width(k) * 16;
  return {macs8 % one ? -1 : macs8 / one, macs16 % one ? -1 : macs16 / one};
}

class ProductsTest : public test::WithNvrtc {
protected:
  /// Says in words what is expected of a kernel.
  static std::string expectation(const KernelSpec& k) {
    const auto [in_int8, in_16_bits] = products_of(k);
    std::ostringstream text;
    text << kernel_name(k) << " " << of_warpgroups(k) << ahead(k) << implied(k)
         << start_of_values(k) << in_int8 << " " << in_16_bits;
    return text.str();
  }
  /// Not those that were found sound before.
  static void check_all(const std::vector<KernelSpec>& kernels) {
    ASSERT_FALSE(kernels.empty());
    test::FoundSound found_sound;
    found_sound.add_file("tests/templates/products_test.cpp");
    found_sound.add_file("tests/templates/ptx_loops.cpp");
    for (const KernelSpec& k : kernels) {
      found_sound.add(std::string(k.arch.name) + " " + expectation(k));
      found_sound.add(emit(k));
    }
    if (found_sound.is_listed())
      return;
    for (const KernelSpec& k : kernels)
      check(k);
    if (!HasFailure())
      found_sound.passed();
  }
  static void check(const KernelSpec& k) {
    SCOPED_TRACE(kernel_name(k) + " for " + std::string(k.arch.name));
    const std::string element = k.attention.dtype == DType::bf16 ? "bf16" : "f16";
    const LoopProducts found =
        test::count_products(test::compile(k, /*want_ptx=*/true).ptx, of_warpgroups(k), element);
    EXPECT_EQ(found.objection, "");
    EXPECT_TRUE(found.loops == 1 || found.loops == 2) << found.loops; // one of them with a mask
    EXPECT_EQ(found.outside, ahead(k));
    const Products start = start_of_values(k);
    EXPECT_EQ(found.per_pass, implied(k) + start);

    Products whole = found.per_pass;
    whole.float16 -= start.float16;
    if (sums_dp_in_fp16(k.attention))
      whole.float16 += whole.other;
    EXPECT_EQ(whole_products(whole, k), products_of(k));
  }
  /// `row` at 64 channels and `block` at 128, of both families.
  static void check_backward(Precision precision) {
    std::vector<KernelSpec> kernels;
    for (const char* arch : {"sm_80", "sm_90a"})
      for (int head_dim : {64, 128}) {
        AttentionSpec spec;
        spec.head_dim = head_dim, spec.precision = precision;
        spec.granularity = head_dim == 64 ? Granularity::row : Granularity::block;
        for (const KernelSpec& kernel :
             Operation(resolved(spec), find_arch(arch)).kernels(Pass::backward))
          if (kernel.kind >= KernelKind::forward)
            kernels.push_back(kernel);
      }
    check_all(kernels);
  }
  static void check_all(const char* arch, AttentionSpec spec) {
    std::vector<KernelSpec> kernels;
    for (int head_dim : {64, 128})
      for (Granularity granularity : {Granularity::row, Granularity::block}) {
        spec.head_dim = head_dim, spec.granularity = granularity;
        for (Pass pass : {Pass::forward, Pass::backward})
          for (const KernelSpec& kernel : Operation(resolved(spec), find_arch(arch)).kernels(pass))
            if (kernel.kind >= KernelKind::forward)
              kernels.push_back(kernel);
      }
    check_all(kernels);
  }
};

AttentionSpec with(Precision precision, DType dtype, Causal causal) {
  AttentionSpec spec;
  spec.precision = precision, spec.dtype = dtype, spec.causal = causal;
  return spec;
}

TEST_F(ProductsTest, OfOneKernelAreCountedEachTime) {
  for (const KernelSpec& kernel :
       Operation(resolved(AttentionSpec{.head_dim = 64}), find_arch("sm_80"))
           .kernels(Pass::forward))
    if (kernel.kind == KernelKind::forward)
      check(kernel);
}
TEST_F(ProductsTest, OfTheMmaFamilySixAreInt8) {
  check_all("sm_80", with(Precision::six_of_seven, DType::bf16, Causal::none));
}
TEST_F(ProductsTest, OfTheMmaFamilyUnderQk16FourAreInt8) {
  check_all("sm_80", with(Precision::qk16, DType::fp16, Causal::top_left));
}
TEST_F(ProductsTest, OfTheWgmmaFamilySixAreInt8) {
  check_all("sm_90a", with(Precision::six_of_seven, DType::fp16, Causal::top_left));
}
TEST_F(ProductsTest, OfTheWgmmaFamilyUnderQk16FourAreInt8) {
  check_all("sm_90a", with(Precision::qk16, DType::bf16, Causal::none));
}
// The forward of these is that of six in INT8.
TEST_F(ProductsTest, OfTheBackwardUnderDv16DvHas16Bits) { check_backward(Precision::dv16); }
TEST_F(ProductsTest, OfTheBackwardUnderGradients16SAloneIsInt8) {
  check_backward(Precision::gradients16);
}

TEST_F(ProductsTest, OfTheBackwardWithFp16SumsOfDpNoOtherChanges) {
  std::vector<KernelSpec> kernels;
  for (int head_dim : {64, 128})
    for (Precision precision : {Precision::six_of_seven, Precision::gradients16}) {
      AttentionSpec spec;
      spec.head_dim = head_dim, spec.precision = precision, spec.dp_sums = DpSums::fp16;
      spec.gradient_kernels = Backward::split;
      for (const KernelSpec& kernel :
           Operation(resolved(spec), find_arch("sm_89")).kernels(Pass::backward))
        if (kernel.kind >= KernelKind::forward)
          kernels.push_back(kernel);
    }
  check_all(kernels);
}

// Two stages, larger blocks, and loops that are unrolled in part (sm_100, `block`, 128 channels).
TEST_F(ProductsTest, DoNotDependOnTheTile) {
  AttentionSpec spec;
  spec.granularity = Granularity::block;
  std::vector<KernelSpec> kernels = {
      Operation(resolved(spec), find_arch("sm_100")).kernels(Pass::backward).back()};
  const Tiles tiles = {{KernelKind::forward, parse_tile("mma 128x128 w8 s2 b1")},
                       {KernelKind::backward_dq, parse_tile("mma 128x128 w8 s2 b1")},
                       {KernelKind::backward_dkv, parse_tile("mma 64x128 w8 s2 b1")}};
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel :
         Operation(resolved(AttentionSpec()), find_arch("sm_80"), tiles).kernels(pass))
      if (kernel.kind >= KernelKind::forward)
        kernels.push_back(kernel);
  check_all(kernels);
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
  std::vector<std::pair<KernelSpec, std::string>> declared;
  test::FoundSound found_sound;
  found_sound.add_file("tests/templates/products_test.cpp");
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel : Operation(resolved(spec), find_arch("sm_80")).kernels(pass)) {
      std::byte params[512];
      const size_t bytes = pack_params(fields_of(kernel), {}, params);
      declared.emplace_back(kernel, "_param_0[" + std::to_string(bytes) + "]");
      found_sound.add(declared.back().second);
      found_sound.add(emit(kernel));
    }
  const auto expect_declared = [](const auto& one) {
    EXPECT_NE(test::compile(one.first, true).ptx.find(one.second), std::string::npos)
        << kernel_name(one.first) << " has no " << one.second;
  };
  if (found_sound.is_listed())
    return expect_declared(declared.front()); // a small kernel
  for (const auto& one : declared)
    expect_declared(one);
  if (!HasFailure())
    found_sound.passed();
}

} // namespace
