//===- found_sound_test.cpp - Sets of kernels that compile tests need not compile again ===//

#include "tests/cache/temp_directory.h"
#include "tests/templates/covering.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class FoundSoundTest : public test::WithNvrtc {};

TEST_F(FoundSoundTest, IsOfThisSetAndOfNoOther) {
  const test::TempDirectory temp;
  const std::string file = temp / "found_sound.txt";
  test::write_text(file, "# a comment\n");
  const auto kernels = test::covering_kernels(find_arch("sm_89"));
  const auto known = [&](const std::map<std::string, KernelSpec>& set, const char* arch) {
    return test::FoundSound(set, arch, file);
  };
  {
    const test::ScopedVariable unset("SAGEBWD_UPDATE_GOLDEN", std::nullopt);
    known(kernels, "sm_89").passed();
    EXPECT_FALSE(known(kernels, "sm_89").is_listed()) << "nobody asked for it";
  }
  const test::ScopedVariable set("SAGEBWD_UPDATE_GOLDEN", "1");
  known(kernels, "sm_89").passed();
  EXPECT_TRUE(known(kernels, "sm_89").is_listed());
  EXPECT_FALSE(known(kernels, "sm_86").is_listed());

  auto fewer = kernels;
  fewer.erase(fewer.begin());
  EXPECT_FALSE(known(fewer, "sm_89").is_listed());
  auto other = kernels; // one kernel in another's place
  other.begin()->second = other.rbegin()->second;
  EXPECT_FALSE(known(other, "sm_89").is_listed());

  known(kernels, "sm_86").passed();
  known(other, "sm_89").passed(); // in place of what was listed of sm_89
  EXPECT_TRUE(known(other, "sm_89").is_listed());
  EXPECT_FALSE(known(kernels, "sm_89").is_listed());
  EXPECT_TRUE(known(kernels, "sm_86").is_listed());
}

} // namespace
