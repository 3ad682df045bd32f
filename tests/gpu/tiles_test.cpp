//===- tiles_test.cpp - Under `deterministic` no tile changes a bit ---------===//
//
// Every tile that a tuner may choose against the default's: sums in another order differ in their
// last bits, of which a rounded result shows few. So elements are fp16, whose roundings show eight
// times as many as bf16's, lengths are no multiples of any block, heads share keys, and masks end
// and begin within blocks.
//
//===----------------------------------------------------------------------===//
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/error.h"
#include "tests/gpu/operation.h"

#include <string_view>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

struct TileCase {
  std::string name;
  AttentionSpec spec;
  Problem problem = {1, 2, 1, 700, 700};
};

AttentionSpec spec_of(int head_dim, Causal causal, Precision precision = Precision::six_of_seven) {
  AttentionSpec spec;
  spec.head_dim = head_dim;
  spec.dtype = DType::fp16;
  spec.causal = causal;
  spec.precision = precision;
  return spec;
}

AttentionSpec windowed(AttentionSpec spec, int left, int right) {
  spec.window_left = left, spec.window_right = right;
  return spec;
}

const std::vector<TileCase>& cases() {
  using enum Precision;
  constexpr auto none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  static const std::vector<TileCase> list = {
      {"D64", spec_of(64, none)},
      {"D64_TopLeft", spec_of(64, top)},
      {"D64_BottomRight", spec_of(64, bottom), {1, 4, 1, 700, 970}},
      {"D64_Window", windowed(spec_of(64, none), 300, 90)},
      {"D64_Qk16_TopLeft", spec_of(64, top, qk16)},
      {"D64_Dv16_BottomRight", spec_of(64, bottom, dv16), {1, 4, 1, 700, 970}},
      {"D64_Gradients16_TopLeft", spec_of(64, top, gradients16)},
      {"D128_TopLeft", spec_of(128, top)},
      {"D128_BottomRight", spec_of(128, bottom), {1, 4, 1, 700, 970}},
      {"D256_TopLeft", spec_of(256, top), {1, 2, 1, 600, 600}},
  };
  return list;
}

/// These are the bits of a forward alone.
void expect_forward_gives(const reference::Outputs<float>& expected, Attention& attention,
                          const reference::Inputs& in) {
  driver::DeviceScope scope(0);
  Operands operands(attention, in);
  attention.forward(operands.forward);
  driver::synchronize();
  Faults faults;
  EXPECT_EQ(operands.out.download("out", faults), expected.o);
  operands.lse.check_guards("lse", faults);
  operands.forward_workspace.check_guards("the forward workspace", faults);
  EXPECT_EQ(operands.lse.download<float>(), expected.lse);
  for (const std::string& fault : faults)
    ADD_FAILURE() << fault;
}

class AnyTile : public OnGpu, public testing::WithParamInterface<TileCase> {};

TEST_P(AnyTile, GivesTheDefaultsBits) {
  const ResolvedSpec spec = resolved(GetParam().spec);
  const driver::DeviceInfo info = driver::device_info(0);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  const reference::Inputs in =
      reference::random_inputs(GetParam().problem, spec->head_dim, spec->dtype, 1.0, 3);
  Attention by_default(spec, 0, Tiles{});
  const reference::Outputs<float> expected = run(by_default, in);
  int others = 0;
  for (KernelKind kind : Operation(spec, arch).tunable_kernels())
    for (const TileConfig& tile : tiles_worth_trying(kind, spec, arch)) {
      if (tile == default_tile(kind, spec, arch))
        continue;
      SCOPED_TRACE(std::string(to_string(kind)) + " " + to_string(tile));
      try {
        Attention attention(spec, 0, Tiles{{kind, tile}});
        if (kind == KernelKind::forward) // a backward behind the same bits gives the same
          expect_forward_gives(expected, attention, in);
        else
          expect_identical(run(attention, in), expected);
        ++others;
      } catch (const CompileError& error) { // one that spills is refused, and dropped by the tuner
        EXPECT_NE(std::string_view(error.what()).find("is not usable"), std::string_view::npos)
            << error.what();
      } catch (const DriverError& error) { // no kernel can be launched after it
        FAIL() << error.what();
      }
    }
  EXPECT_GT(others, 0) << "there is nothing to compare";
}

INSTANTIATE_TEST_SUITE_P(Gpu, AnyTile, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

} // namespace
