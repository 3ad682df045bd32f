//===- two_nvrtcs_test.cpp - Entries of NVRTC 12 and 13 in one directory ---===//
//
// Needs both, no GPU. The second is libnvrtc.so.12 (12.8 or newer) by SAGEBWD_TEST_NVRTC12; ./run
// test takes it from pip. Each process is this executable again.
//
//===----------------------------------------------------------------------===//

#include "generator/operation.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fcntl.h>

using namespace sagebwd;
using test::ScopedVariable;
using test::TempDirectory;

namespace {

constexpr const char* kTest = "TwoNvrtcs.ShareADirectory";
constexpr const char* kNvrtcsReport = "SAGEBWD_TEST_REPORT";

/// A process says this of the kernels of one operation.
struct Report {
  size_t kernels = 0, cached = 0, of_nvrtc_12 = 0, of_nvrtc_13 = 0;
  int lowest_driver = 0; ///< of all of them
  uint64_t hits = 0, misses = 0, compiles = 0;
};

std::vector<KernelSpec> both_kernels() {
  AttentionSpec spec;
  spec.head_dim = 64;
  return Operation(resolved(spec), find_arch("sm_80")).distinct_kernels();
}

void build_and_write(const std::string& file) {
  Report report;
  for (const auto& kernel : build_all(both_kernels())) {
    ++report.kernels;
    report.cached += kernel->cached;
    report.of_nvrtc_12 += kernel->entry.compiler.rfind("nvrtc 12.", 0) == 0;
    report.of_nvrtc_13 += kernel->entry.compiler.rfind("nvrtc 13.", 0) == 0;
    report.lowest_driver = std::max(report.lowest_driver, kernel->entry.lowest_driver);
  }
  const CacheCounters& counters = user_store().counters();
  std::ofstream(file) << report.kernels << ' ' << report.cached << ' ' << report.of_nvrtc_12 << ' '
                      << report.of_nvrtc_13 << ' ' << report.lowest_driver << ' ' << counters.hits
                      << ' ' << counters.misses << ' ' << counters.compiles;
}

Report run_process(const std::string& nvrtc, bool recompile) {
  TempDirectory temp;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  EXPECT_EQ(test::finish(test::start([&] {
              ::setenv(kNvrtcsReport, (temp / "report").c_str(), 1);
              ::setenv("SAGEBWD_NVRTC", nvrtc.c_str(), 1);
              ::setenv("SAGEBWD_RECOMPILE", recompile ? "1" : "0", 1);
              const int output = ::open((temp / "output").c_str(), O_WRONLY | O_CREAT, 0600);
              ::dup2(output, STDOUT_FILENO);
              ::dup2(output, STDERR_FILENO);
              ::execl(self.c_str(), self.c_str(), (std::string("--gtest_filter=") + kTest).c_str(),
                      nullptr);
              return 127;
            })),
            0)
      << test::read_text(temp / "output");
  Report r;
  std::ifstream(temp / "report") >> r.kernels >> r.cached >> r.of_nvrtc_12 >> r.of_nvrtc_13 >>
      r.lowest_driver >> r.hits >> r.misses >> r.compiles;
  return r;
}

TEST(TwoNvrtcs, ShareADirectory) {
  if (const char* report = std::getenv(kNvrtcsReport))
    return build_and_write(report);
  const char* nvrtc_12 = std::getenv("SAGEBWD_TEST_NVRTC12");
  if (!nvrtc_12 || !*nvrtc_12)
    GTEST_SKIP() << "SAGEBWD_TEST_NVRTC12 names no libnvrtc.so.12";
  if (Nvrtc::instance().version_major() != 13)
    GTEST_SKIP() << "the NVRTC found here is no 13: " << Nvrtc::instance().path();
  const std::string nvrtc_13 = Nvrtc::instance().path();
  TempDirectory temp;
  ScopedVariable directory("SAGEBWD_CACHE_DIR", temp / "cache");

  const Report first = run_process(nvrtc_13, false);
  const size_t all = both_kernels().size();
  EXPECT_EQ(first.kernels, all);
  EXPECT_EQ(first.compiles, all);
  EXPECT_EQ(first.of_nvrtc_13, all);
  EXPECT_EQ(first.lowest_driver, 13000);

  const Report other = run_process(nvrtc_12, false);
  EXPECT_EQ(other.cached, all) << "another compiler's entries are hits";
  EXPECT_EQ(other.hits, all);
  EXPECT_EQ(other.compiles, 0u);
  EXPECT_EQ(other.of_nvrtc_13, all);
  EXPECT_EQ(other.lowest_driver, 13000);

  const Report recompiled = run_process(nvrtc_12, true);
  EXPECT_EQ(recompiled.cached, 0u) << "but misses where asked for";
  EXPECT_EQ(recompiled.hits, 0u);
  EXPECT_EQ(recompiled.misses, all);
  EXPECT_EQ(recompiled.compiles, all);
  EXPECT_EQ(recompiled.of_nvrtc_12, all);
  EXPECT_GE(recompiled.lowest_driver, 12000);
  EXPECT_LT(recompiled.lowest_driver, 13000);

  EXPECT_EQ(run_process(nvrtc_12, true).cached, all) << "its own entries are hits all the same";
  const Report again = run_process(nvrtc_13, false);
  EXPECT_EQ(again.cached, all);
  EXPECT_EQ(again.of_nvrtc_12, all) << "they took the others' place";
  EXPECT_EQ(test::files_in(temp / "cache").size(), all);
}

} // namespace
