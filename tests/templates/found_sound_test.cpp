//===- found_sound_test.cpp - Sets of kernels that compile tests need not compile again ===//

#include "tests/templates/found_sound.h"
#include "tests/templates/covering.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class FoundSoundTest : public test::WithNvrtc {};

TEST_F(FoundSoundTest, IsOfThisSetAndOfNoOther) {
  const auto kernels = test::covering_kernels(find_arch("sm_89"));
  const auto is_listed = [](const std::map<std::string, KernelSpec>& set, const char* arch) {
    return test::FoundSound(set, arch).is_listed();
  };
  if (Nvrtc::instance().identity() == "nvrtc 13.0 build 36424714") // whose lines the file has
    EXPECT_TRUE(is_listed(kernels, "sm_89"))
        << "kernels have changed: list them once they compile (found_sound.h)";
  EXPECT_FALSE(is_listed(kernels, "sm_86"));

  auto fewer = kernels;
  fewer.erase(fewer.begin());
  EXPECT_FALSE(is_listed(fewer, "sm_89"));

  auto other = kernels; // one kernel in another's place
  other.begin()->second = other.rbegin()->second;
  EXPECT_FALSE(is_listed(other, "sm_89"));
}

} // namespace
