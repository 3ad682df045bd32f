//===- plans_test.cpp - Which plans can be compared on an architecture ------===//

#include "runtime/plans.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

std::vector<std::string> names_on(const char* arch, const AttentionSpec& spec,
                                  std::vector<std::string>& left_out, int64_t tokens = 8192) {
  std::vector<std::string> names;
  for (const AttentionSpec& plan :
       plans_on(find_arch(arch), spec, {1, 8, 8, tokens, tokens}, left_out))
    names.push_back(name_of(PlanFigures{.precision = plan.precision,
                                        .gradient_kernels = plan.gradient_kernels,
                                        .int8_products = 0,
                                        .forward_ms = 0,
                                        .backward_ms = 0,
                                        .o = {},
                                        .dq = {},
                                        .dk = {},
                                        .dv = {}}));
  return names;
}

TEST(Plans, HaveBothBackwardsWhereBothExistTheDefaultFirst) {
  std::vector<std::string> left_out;
  const std::vector<std::string> names = names_on("sm_89", {}, left_out);
  EXPECT_EQ(names, (std::vector<std::string>{"six-of-seven, fused", "six-of-seven, split",
                                             "qk16, split", "dv16, split", "gradients16, split"}));
  EXPECT_EQ(left_out, std::vector<std::string>());
  EXPECT_EQ(names_on("sm_90a", {}, left_out)[0], "six-of-seven, split");
  EXPECT_EQ(names_on("sm_89", {}, left_out, 512)[0], "six-of-seven, split"); // of short calls
}

TEST(Plans, HaveTheBackwardThatIsAskedFor) {
  AttentionSpec spec;
  spec.gradient_kernels = Backward::split;
  std::vector<std::string> left_out;
  for (const std::string& name : names_on("sm_89", spec, left_out))
    EXPECT_NE(name.find(", split"), std::string::npos) << name;
}

TEST(Plans, LeaveOutWhatAnArchitectureCannotBuildAndSayWhy) {
  AttentionSpec wide;
  wide.head_dim = 256;
  std::vector<std::string> left_out;
  const std::vector<std::string> names = names_on("sm_89", wide, left_out);
  EXPECT_EQ(names, (std::vector<std::string>{"six-of-seven, split", "gradients16, split"}));
  ASSERT_EQ(left_out.size(), 2u);
  EXPECT_TRUE(left_out[0].starts_with("qk16: no tile of forward fits d256")) << left_out[0];
  EXPECT_TRUE(left_out[1].starts_with("dv16: no tile of backward_dkv fits d256")) << left_out[1];
}

} // namespace
