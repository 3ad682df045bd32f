//===- listed_tiles_test.cpp - Tiles of kernels that walk over lists --------===//
//
// A tile is not offered if a walk over lists leaves it too few registers, and a caller who gives it
// is told so. tests/generator/space_test.cpp goes over the whole space by the rule; here tiles that
// were once offered, or given, are compiled.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/compile_kernel.h"
#include "runtime/error.h"
#include "tests/templates/nvrtc_fixture.h"

#include <algorithm>

using namespace sagebwd;

namespace {

using enum KernelKind;

class ListedTilesTest : public test::WithNvrtc {};

struct Given {
  KernelKind kind;
  const char *spec, *tile;
};

/// On sm_90a.
const Given kTooFew[] = {
    {backward_dkv, "d128 fp16 gradients16 sparse_q=64 sparse_kv=64", "mma 64x64 w4 s2 b3"},
    {backward_dkv, "d128 dv16 causal=top-left sparse_q=128 sparse_kv=64", "mma 64x64 w4 s1 b3"},
    {forward, "d128 causal=top-left sparse_q=64 sparse_kv=128", "mma 64x128 w4 s1 b3"},
    {backward_dq, "d128 dv16 causal=top-left sparse_q=128 sparse_kv=128", "mma 64x128 w4 s2 b3"},
    {backward_dq, "d256 gradients16 causal=top-left sparse_q=128 sparse_kv=128",
     "wgmma 128x128 w8 s1 b3"},
    {forward, "d64 sparse_q=128 sparse_kv=64", "wgmma 128x64 w8 s1 b3"},
    {backward_dkv, "d128 dv16 sparse_q=128 sparse_kv=64", "mma 64x64 w4 s2 b3"},
    {backward_dkv, "d64 fp16 dv16 block sparse_q=128 sparse_kv=64", "wgmma 64x64 w4 s2 b3"},
    {backward_dkv, "d64 qk16 causal=top-left sparse_q=64 sparse_kv=64", "wgmma 64x64 w4 s2 b3"},
    {forward, "d64 causal=top-left sparse_q=128 sparse_kv=64", "mma 64x64 w4 s2 b6"},
};

AttentionSpec spec_of(const Given& given) {
  AttentionSpec spec = parse_spec(given.spec);
  spec.deterministic = false; // any family may be given
  return spec;
}

KernelSpec kernel_of(const Given& given, const Arch& arch) {
  const Tiles tiles = {{given.kind, parse_tile(given.tile)}};
  const Pass pass = given.kind == forward ? Pass::forward : Pass::backward;
  for (const KernelSpec& kernel : Operation(resolved(spec_of(given)), arch, tiles).kernels(pass))
    if (kernel.kind == given.kind)
      return kernel;
  throw std::logic_error("the operation has no such kernel");
}

TEST_F(ListedTilesTest, WithTooFewRegistersAreNotOfferedAndSayWhatToDo) {
  const Arch& arch = find_arch("sm_90a");
  int compiled = 0;
  for (const Given& given : kTooFew) {
    SCOPED_TRACE(std::string(given.spec) + " " + given.tile);
    const ResolvedSpec spec = resolved(spec_of(given));
    const TileConfig tile = parse_tile(given.tile);
    const std::vector<TileConfig> offered = tiles_worth_trying(given.kind, spec, arch);
    EXPECT_EQ(std::find(offered.begin(), offered.end(), tile), offered.end());
    if (const std::string why = objection(given.kind, spec, tile, arch); !why.empty()) {
      EXPECT_NE(why.find("blocks of"), why.npos) << why;
      EXPECT_NE(why.find("take fewer blocks per SM"), why.npos) << why;
      continue;
    }
    const KernelSpec kernel = kernel_of(given, arch);
    ++compiled;
    try {
      compile_kernel(emit(kernel), kernel, /*allow_spills=*/false);
    } catch (const CompileError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("is not usable: with the tile '" + to_string(tile) +
                          "' the registers of a thread do not suffice. Take one with fewer blocks"),
                what.npos)
          << what;
      EXPECT_EQ(what.find("defect"), what.npos) << what;
    }
  }
  EXPECT_GT(compiled, 2);
}

int spills_of_default(const char* spec) {
  const Arch& arch = find_arch("sm_90a");
  for (const KernelSpec& kernel :
       Operation(resolved(parse_spec(spec)), arch).kernels(Pass::backward))
    if (kernel.kind == backward_dkv)
      return compile_kernel(emit(kernel), kernel, /*allow_spills=*/true).entry.spill_bytes;
  throw std::logic_error("the operation has no dK/dV kernel");
}

/// With a third block and two stages these defaults spilled 8 to 124 bytes.
TEST_F(ListedTilesTest, DefaultsOf16BitProductsHardlySpill) {
  for (const char* none : {"d64 fp16 block dv16 sparse_q=128 sparse_kv=64",
                           "d56 causal=top-left block dv16 sparse_q=128 sparse_kv=128",
                           "d64 block qk16 sparse_q=128 sparse_kv=64",
                           "d64 fp16 causal=top-left block qk16 sparse_q=128 sparse_kv=128"})
    EXPECT_EQ(spills_of_default(none), 0) << none;
  // 10 % faster than what does not spill (generator/choice.cpp).
  for (const char* few : {"d64 dv16 sparse_q=128 sparse_kv=64",
                          "d64 fp16 dv16 causal=top-left sparse_q=64 sparse_kv=64"})
    EXPECT_LE(spills_of_default(few), 16) << few;
}

/// Those that leave least registers among the tiles that are offered beside the default.
const Given kEnough[] = {
    {forward, "d64 causal=top-left sparse_q=128 sparse_kv=64", "mma 64x64 w4 s1 b4"},
    {forward, "d128 causal=top-left sparse_q=64 sparse_kv=128", "mma 64x128 w4 s1 b2"},
    {backward_dq, "d64 dv16 causal=top-left sparse_q=128 sparse_kv=64", "wgmma 64x64 w4 s2 b3"},
    {backward_dkv, "d128 dv16 sparse_q=128 sparse_kv=64", "mma 64x64 w4 s2 b2"},
    {backward_dkv, "d64 fp16 dv16 sparse_q=128 sparse_kv=64", "wgmma 64x64 w4 s2 b2"},
};

TEST_F(ListedTilesTest, ThatAreOfferedCanBeUsed) {
  const Arch& arch = find_arch("sm_90a");
  for (const Given& given : kEnough) {
    SCOPED_TRACE(std::string(given.spec) + " " + given.tile);
    const std::vector<TileConfig> offered =
        tiles_worth_trying(given.kind, resolved(spec_of(given)), arch);
    EXPECT_NE(std::find(offered.begin(), offered.end(), parse_tile(given.tile)), offered.end());
    const KernelSpec kernel = kernel_of(given, arch);
    EXPECT_NO_THROW(compile_kernel(emit(kernel), kernel, /*allow_spills=*/false));
  }
}

} // namespace
