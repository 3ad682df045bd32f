//===- found_sound_test.cpp - What compile tests need not compile again -------===//

#include "generator/emit.h"
#include "tests/cache/temp_directory.h"
#include "tests/templates/covering.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class FoundSoundTest : public test::WithNvrtc {};

TEST_F(FoundSoundTest, IsOfThisSetOfThisTestAndOfNoOther) {
  const test::TempDirectory temp;
  const std::string file = temp / "found_sound.txt";
  test::write_text(file, "# a comment\n");
  const auto kernels = test::covering_kernels(find_arch("sm_89"));
  const auto known = [&](const std::map<std::string, KernelSpec>& set, const char* name) {
    test::FoundSound found(name, file);
    found.add(set);
    return found;
  };
  {
    const test::ScopedVariable unset("SAGEBWD_UPDATE_GOLDEN", std::nullopt);
    known(kernels, "Spills.None").passed();
    EXPECT_FALSE(known(kernels, "Spills.None").is_listed()) << "nobody asked for it";
  }
  const test::ScopedVariable set("SAGEBWD_UPDATE_GOLDEN", "1");
  known(kernels, "Spills.None").passed();
  EXPECT_TRUE(known(kernels, "Spills.None").is_listed());
  EXPECT_FALSE(known(kernels, "Products.Six").is_listed()) << "another test found it sound";

  auto fewer = kernels;
  fewer.erase(fewer.begin());
  EXPECT_FALSE(known(fewer, "Spills.None").is_listed());
  auto other = kernels; // one kernel in another's place
  other.begin()->second = other.rbegin()->second;
  EXPECT_FALSE(known(other, "Spills.None").is_listed());

  known(kernels, "Products.Six").passed();
  known(other, "Spills.None").passed(); // in place of what was listed of that test
  EXPECT_TRUE(known(other, "Spills.None").is_listed());
  EXPECT_FALSE(known(kernels, "Spills.None").is_listed());
  EXPECT_TRUE(known(kernels, "Products.Six").is_listed());
}

/// Each thing that is added counts, and which part of a text stands where.
TEST_F(FoundSoundTest, DependsOnEveryTextOptionAndFile) {
  const test::TempDirectory temp;
  const std::string file = temp / "found_sound.txt";
  test::write_text(file, "# a comment\n");
  const test::ScopedVariable set("SAGEBWD_UPDATE_GOLDEN", "1");
  const auto of = [&](const KernelSource& source, const char* path) {
    test::FoundSound found("A.Test", file);
    found.add(source);
    found.add_file(path);
    return found;
  };
  const KernelSource source = {.name = "k", .text = "text", .options = {"-a", "-b"}};
  of(source, "templates/base.cuh").passed();
  EXPECT_TRUE(of(source, "templates/base.cuh").is_listed());
  EXPECT_FALSE(of(source, "templates/tile/memory/ring.cuh").is_listed());
  EXPECT_FALSE(of(source, "templates/tile").is_listed());
  for (const KernelSource& other : {KernelSource{.text = "Text", .options = {"-a", "-b"}},
                                    KernelSource{.text = "text", .options = {"-a", "-c"}},
                                    KernelSource{.text = "text", .options = {"-a"}},
                                    KernelSource{.text = "text-a", .options = {"-b"}}})
    EXPECT_FALSE(of(other, "templates/base.cuh").is_listed());
}

/// By its whole name.
TEST_F(FoundSoundTest, IsOfTheRunningTest) {
  const test::FoundSound by_hand("FoundSoundTest.IsOfTheRunningTest", "none");
  const auto said = [](const test::FoundSound& found) {
    const test::ScopedVariable unset("SAGEBWD_UPDATE_GOLDEN", std::nullopt);
    testing::internal::CaptureStdout();
    found.passed();
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_EQ(said({}), said(by_hand));
}

} // namespace
