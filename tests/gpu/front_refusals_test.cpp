//===- front_refusals_test.cpp - What norm and RoPE do not take -------------===//
#include "runtime/front_end.h"
#include "tests/gpu/device.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class FrontOf : public OnGpu {};

TEST_F(FrontOf, WrongArgumentsAreRefused) {
  if (IsSkipped())
    return;
  const Attention attention({.head_dim = 64}, 0);
  const auto at = [](uint64_t address) { return reinterpret_cast<float*>(address); };
  const auto tensor = [&](uint64_t address) { return Tensor{at(address), 16384, 8192, 64}; };
  const FrontGradientsCall sound{
      .of =
          {.problem = {1, 2, 2, 128, 128},
           .q = {.x = tensor(0x100000), .y = tensor(0x200000), .normed = true, .gain = at(0x1000)},
           .k = {.x = tensor(0x300000), .y = tensor(0x400000)},
           .rope_channels = 64},
      .q = {.dx = tensor(0x500000), .dgain = at(0x2000), .gain_parts = at(0x700000)},
      .k = {.dx = tensor(0x600000)}};
  const auto refused = [&](const std::string& why, const auto& change,
                           const Attention* by = nullptr) {
    FrontGradientsCall changed = sound;
    change(changed);
    try {
      front_gradients(changed, by ? *by : attention);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  using G = FrontGradientsCall;
  refused("q.x: the address is null", [](G& a) { a.of.q.x.data = nullptr; });
  refused("k.dx: the address is not", [&](G& a) { a.k.dx.data = at(0x600008); });
  refused("the token stride is 68", [](G& a) { a.of.k.y.stride_s = 68; });
  refused("q.dx: the head stride is 32", [](G& a) { a.q.dx.stride_h = 32; });
  refused("k.gain: it is given without a norm", [&](G& a) { a.of.k.gain = at(0x1000); });
  refused("q.inv_rms: the address is not", [&](G& a) { a.of.q.inv_rms = at(0x1002); });
  refused("q.dinv_rms: it is given, and inv_rms is not", [&](G& a) { a.q.dinv_rms = at(0x9000); });
  refused("k.dgain: it is given, and gain is not",
          [&](G& a) { a.k.dgain = at(0x9000), a.k.gain_parts = at(0xa000); });
  refused("pass both or neither", [](G& a) { a.q.gain_parts = nullptr; });
  refused("one of cos and sin", [&](G& a) { a.of.k.rope.cos = at(0x5000); });
  const auto with_rope = [&](G& a) { a.of.q.rope = {at(0x5000), at(0x8000), 0, 32}; };
  refused("q.rope.cos: the token stride is 33",
          [&](G& a) { with_rope(a), a.of.q.rope.stride_s = 33; });
  refused("rope_channels = 60", [&](G& a) { with_rope(a), a.of.rope_channels = 60; });
  refused("rope_begin = 2", [&](G& a) { with_rope(a), a.of.rope_begin = 2; });
  refused("rope_begin = 4 with 64", [&](G& a) { with_rope(a), a.of.rope_begin = 4; });
  refused("norm_eps = -1", [](G& a) { a.of.norm_eps = -1; });
  refused("share memory", [](G& a) { a.q.dx.data = a.of.q.x.data; });
  refused("heads = 0", [](G& a) { a.of.problem.heads = 0; });
  const Attention packed({.head_dim = 64, .packed = true}, 0);
  refused(
      "of packed sequences", [](G&) {}, &packed);
}

} // namespace
