//===- spec_enums_test.cpp - Values that no enum of a spec has --------------===//

#include "generator/definition.h"
#include "generator/kernel.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

TEST(Spec, AValueThatIsNoneOfItsEnumIsRefused) {
  const auto refused = [](auto change) {
    AttentionSpec spec;
    change(spec);
    try {
      resolved(spec);
      return std::string("not refused");
    } catch (const SpecError& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused([](AttentionSpec& s) { s.granularity = static_cast<Granularity>(9); }),
            "granularity = 9 is not supported: its values are row, block");
  for (std::string what :
       {refused([](AttentionSpec& s) { s.dtype = static_cast<DType>(9); }),
        refused([](AttentionSpec& s) { s.causal = static_cast<Causal>(9); }),
        refused([](AttentionSpec& s) { s.precision = static_cast<Precision>(9); }),
        refused([](AttentionSpec& s) { s.dq_sums = static_cast<DqSums>(9); }),
        refused([](AttentionSpec& s) { s.dp_sums = static_cast<DpSums>(9); })})
    EXPECT_NE(what.find("= 9 is not supported"), std::string::npos) << what;
}

TEST(Spec, AKindOfKernelThatThereIsNotIsRefused) {
  EXPECT_THROW(definition_of(static_cast<KernelKind>(99)), SpecError);
}

} // namespace
