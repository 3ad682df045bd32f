//===- kernels_process_test.cpp - A second process compiles nothing --------===//
//
// Needs libnvrtc, not a GPU. A new process is this executable again, running one test, which sees
// by a variable that it is the child and only builds and reports.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "generator/operation.h"
#include "runtime/compile_kernel.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tests/runtime/again.h"
#include "tests/runtime/spilling_kernel.h"

#include <algorithm>
#include <chrono>
#include <fstream>

using namespace sagebwd;
using test::ScopedVariable;
using test::TempDirectory;

namespace {

bool maps_nvrtc() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libnvrtc") != std::string::npos)
      return true;
  return false;
}

std::vector<KernelSpec> some_kernels() {
  return Operation(resolved(AttentionSpec()), find_arch("sm_80")).distinct_kernels();
}

void build_and_report() {
  std::vector<KernelSpec> specs = some_kernels();
  auto start = std::chrono::steady_clock::now();
  std::vector<std::shared_ptr<const BuiltKernel>> kernels;
  try {
    kernels = build_all(specs);
  } catch (const LibraryError& error) {
    std::printf("LibraryError %s\n", error.what());
    return;
  }
  std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  size_t cached = 0, bytes = 0;
  for (const auto& kernel : kernels) {
    cached += kernel->cached;
    bytes += kernel->entry.cubin.size();
  }
  std::printf("kernels %zu cached %zu nvrtc %d; %.2f ms, %zu bytes of cubins\n", kernels.size(),
              cached, maps_nvrtc(), time.count(), bytes);
}

std::string run_child() {
  return test::report_of_child("KernelsProcess.ASecondProcessReadsTheDiskAndOpensNoNvrtc", "build");
}

TEST(KernelsProcess, ASecondProcessReadsTheDiskAndOpensNoNvrtc) {
  if (test::child_task()) {
    test::report(build_and_report);
    return;
  }
  TempDirectory temp;
  ScopedVariable directory("SAGEBWD_CACHE_DIR", temp / "cache");
  ScopedVariable silent("SAGEBWD_LOG", "0"); // a busy machine would say that compiling takes long
  std::string all = std::to_string(some_kernels().size());
  std::string first = run_child();
  EXPECT_EQ(first.substr(0, first.find(';')), "kernels " + all + " cached 0 nvrtc 1");
  std::string second = run_child();
  EXPECT_EQ(second.substr(0, second.find(';')), "kernels " + all + " cached " + all + " nvrtc 0");
  std::printf("first:  %s\nsecond: %s\n", first.c_str(), second.c_str());

  ScopedVariable missing("SAGEBWD_NVRTC", "/nowhere/libnvrtc.so.13");
  std::string warm = run_child();
  EXPECT_EQ(warm.substr(0, warm.find(';')), "kernels " + all + " cached " + all + " nvrtc 0");
  for (const auto& file : std::filesystem::directory_iterator(temp / "cache"))
    std::filesystem::remove(file.path());
  std::string cold = run_child();
  EXPECT_TRUE(cold.starts_with("LibraryError SAGEBWD_NVRTC names no libnvrtc")) << cold;
}

TEST(CompileWithNvrtc, EqualInputsGiveEqualFiles) {
  KernelSpec spec = some_kernels().back();
  KernelSource source = emit(spec);
  CacheKey key = key_of(source, spec);
  EXPECT_TRUE(serialize(key, compile_with_nvrtc(source, spec).entry) ==
              serialize(key, compile_with_nvrtc(source, spec).entry));
}

TEST(CompileWithNvrtc, RefusesSpills) {
  KernelSource source{"spilling", test::kSpilling, 1024, 0};
  try {
    compile_kernel(source, some_kernels()[0], /*allow_spills=*/false);
    FAIL() << "spills passed";
  } catch (const CompileError& error) {
    std::string what = error.what();
    for (const char* part : {"spilling", "sm_80", "tile configuration", "bytes spill stores"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
    EXPECT_NE(error.log.find("spill"), std::string::npos);
    EXPECT_NE(error.numbered_source.find("    1  "), std::string::npos);
  }
}

TEST(CompileWithNvrtc, AllowedSpillsAreNotKept) {
  auto compiled = compile_kernel({"spilling", test::kSpilling, 1024, 0}, some_kernels()[0], true);
  EXPECT_FALSE(compiled.keep);
  EXPECT_GT(compiled.entry.spill_bytes, 0);
}

TEST(CompileWithNvrtc, FillsInTheEntry) {
  KernelSource source{"k",
                      "extern \"C\" __global__ void k(float* x) { __shared__ float s[32];\n"
                      "s[threadIdx.x] = *x; __syncthreads(); *x = s[1]; }\n",
                      32, 1000};
  auto compiled = compile_with_nvrtc(source, some_kernels()[0]);
  EXPECT_TRUE(compiled.keep);
  const CacheEntry& entry = compiled.entry;
  EXPECT_EQ(entry.kernel_name, "k");
  EXPECT_EQ(entry.arch, "sm_80");
  EXPECT_EQ(entry.compiler.substr(0, 6), "nvrtc ");
  EXPECT_EQ(entry.lowest_driver, 1000 * Nvrtc::instance().version_major());
  EXPECT_GT(entry.registers, 0);
  EXPECT_EQ(entry.spill_bytes, 0);
  EXPECT_EQ(entry.shared_bytes, 1000 + 128);
  EXPECT_GT(entry.compile_ms, 0);
}

} // namespace
