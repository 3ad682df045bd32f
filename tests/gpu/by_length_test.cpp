//===- by_length_test.cpp - One or two kernels of the gradients, by length --===//
#include "generator/operation.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class ByLength : public OnGpu {};

/// A call has the bits of a spec that names its kernels.
TEST_F(ByLength, ShortCallsHaveTheGradientsOfTwoKernelsWhereTheseAreFaster) {
  AttentionSpec spec;
  spec.head_dim = 64;
  Attention attention(spec);
  const ResolvedSpec& asked = attention.spec();
  const auto as = [&](Backward kernels, const reference::Inputs& in) {
    AttentionSpec named = spec;
    named.gradient_kernels = kernels;
    Attention other(named);
    return run(other, in);
  };
  const bool binds = split_may_be_faster(asked, attention.arch());
  for (int64_t tokens : {130, 960}) {
    const Problem problem = {1, 1, 1, tokens, tokens};
    const bool is_short = split_is_faster(asked, attention.arch(), problem);
    EXPECT_EQ(is_short, binds && tokens == 130);
    const auto in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 11);
    const auto got = run(attention, in);
    const auto named = as(binds && !is_short ? Backward::fused : Backward::split, in);
    EXPECT_EQ(got.o, named.o);
    EXPECT_EQ(got.dq, named.dq);
    EXPECT_EQ(got.dk, named.dk);
    EXPECT_EQ(got.dv, named.dv);
    if (binds && !is_short) { // otherwise bits would not tell
      EXPECT_NE(got.dq, as(Backward::split, in).dq);
    }
  }
}

} // namespace
