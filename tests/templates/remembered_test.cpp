//===- remembered_test.cpp - Kernels that an earlier run of the tests compiled ===//
//
// A remembered kernel must be the one that would be compiled now: a test that reads another
// kernel's report sees nothing.
//
//===----------------------------------------------------------------------===//

#include "tests/templates/nvrtc_fixture.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <unistd.h>

namespace fs = std::filesystem;
using namespace sagebwd;

namespace {

class RememberedTest : public test::WithNvrtc {
protected:
  void SetUp() override {
    WithNvrtc::SetUp();
    if (const char* given = std::getenv("SAGEBWD_TEST_KERNELS"))
      before_ = given;
    ::setenv("SAGEBWD_TEST_KERNELS", folder_.c_str(), 1);
  }
  void TearDown() override {
    if (before_)
      ::setenv("SAGEBWD_TEST_KERNELS", before_->c_str(), 1);
    else
      ::unsetenv("SAGEBWD_TEST_KERNELS");
    fs::remove_all(folder_);
  }
  size_t files() const {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(folder_))
      count += entry.is_regular_file();
    return count;
  }

  const fs::path folder_ =
      fs::temp_directory_path() / ("sagebwd-remembered-" + std::to_string(::getpid()));
  std::optional<std::string> before_;
};

std::string writes(const std::string& what) {
  return "extern \"C\" __global__ void k(float* p) { *p = " + what + "; }";
}

TEST_F(RememberedTest, IsWhatWasCompiledFromTheSame) {
  const auto compile = [](const std::string& text, const char* arch = "sm_90a",
                          std::vector<std::string> options = {},
                          bool ptx = true) { return test::compile("k", text, arch, ptx, options); };
  const test::Compiled first = compile(writes("1")), again = compile(writes("1"));
  EXPECT_EQ(files(), 1u);
  EXPECT_NE(first.ptx.find("st.global"), std::string::npos);
  EXPECT_EQ(first.ptx, again.ptx);
  EXPECT_EQ(first.log, again.log);
  EXPECT_EQ(first.registers, again.registers);

  EXPECT_NE(compile(writes("2")).ptx, first.ptx);
  EXPECT_NE(compile(writes("1"), "sm_80").ptx, first.ptx);
  EXPECT_NE(compile(writes("VALUE"), "sm_90a", {"-DVALUE=1"}).ptx,
            compile(writes("VALUE"), "sm_90a", {"-DVALUE=2"}).ptx);
  EXPECT_TRUE(compile(writes("1"), "sm_90a", {}, false).ptx.empty());
  EXPECT_EQ(files(), 6u);
}

TEST_F(RememberedTest, IsCompiledAgainWhereItsFileIsDamaged) {
  const test::Compiled first = test::compile("k", writes("1"), "sm_90a", true, {});
  const fs::path file = fs::directory_iterator(folder_)->path();
  for (const char* damage : {"", "nothing", "a line\nand another\n"}) {
    std::ofstream(file, std::ios::binary) << damage;
    EXPECT_EQ(test::compile("k", writes("1"), "sm_90a", true, {}).ptx, first.ptx);
  }
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(80).put('#');
  const test::Compiled again = test::compile("k", writes("1"), "sm_90a", true, {});
  EXPECT_EQ(again.log.find('#'), std::string::npos) << again.log;
  EXPECT_EQ(again.registers, first.registers);
}

TEST_F(RememberedTest, IsNoKernelThatDoesNotCompile) {
  for (int time = 0; time < 2; ++time)
    EXPECT_THROW(test::compile("k", writes("nothing"), "sm_90a", false, {}), CompileError);
}

TEST_F(RememberedTest, IsNothingWithoutAFolder) {
  ::setenv("SAGEBWD_TEST_KERNELS", "", 1);
  EXPECT_GT(test::compile("k", writes("1"), "sm_90a", false, {}).registers, 0);
  EXPECT_FALSE(fs::exists(folder_));
}

} // namespace
