//===- nvrtc_compile_test.cpp - The run-time compiler ----------------------===//
//
// Needs libnvrtc, not a GPU.
//
//===----------------------------------------------------------------------===//

#include "runtime/nvrtc/library.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/nvrtc/ptxas_report.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/spilling_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

using namespace sagebwd;
using test::ScopedVariable;

namespace {

constexpr const char* kDouble = R"(extern "C" __global__ void twice(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = 2 * s[63 - threadIdx.x];
}
)";

TEST(Nvrtc, CompilesForEveryArchitectureItKnowsOfOurList) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::vector<std::string> known = nvrtc.supported_archs();
  int compiled = 0;
  for (const char* arch : {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103",
                           "sm_110", "sm_120", "sm_121"}) {
    std::string plain(arch);
    if (plain.back() == 'a')
      plain.pop_back();
    if (std::find(known.begin(), known.end(), plain) == known.end())
      continue;
    SCOPED_TRACE(arch);
    Compilation result = nvrtc.compile("twice", kDouble, arch);
    EXPECT_EQ(result.cubin.substr(0, 4), "\x7f"
                                         "ELF");
    EXPECT_GT(result.registers, 0);
    EXPECT_EQ(result.static_shared_bytes % 1024, 256); // sm_90 and later reserve 1 KB
    EXPECT_EQ(result.spill_bytes, 0);
    EXPECT_GT(result.compile_ms, 0);
    EXPECT_EQ(compile_warnings(result.log), std::vector<std::string>());
    EXPECT_EQ(result.ptx, "");
    ++compiled;
  }
  EXPECT_GE(compiled, 4); // the oldest NVRTC supported, 12.0, knows 80, 86, 87, 89 and 90
}

TEST(Nvrtc, TheSameSourceGivesTheSameCubin) {
  Nvrtc& nvrtc = Nvrtc::instance();
  EXPECT_EQ(nvrtc.compile("twice", kDouble, "sm_80").cubin,
            nvrtc.compile("twice", kDouble, "sm_80").cubin);
}

TEST(Nvrtc, GivesPtxWhereAskedFor) {
  Compilation result = Nvrtc::instance().compile("twice", kDouble, "sm_90a", /*want_ptx=*/true);
  EXPECT_NE(result.ptx.find(".target sm_90a"), std::string::npos);
  EXPECT_NE(result.ptx.find(".visible .entry twice"), std::string::npos);
  EXPECT_EQ(result.ptx.find('\0'), std::string::npos);
}

TEST(Nvrtc, NamesItselfByVersionAndBuild) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::string identity = nvrtc.identity();
  std::string prefix = "nvrtc " + std::to_string(nvrtc.version_major()) + "." +
                       std::to_string(nvrtc.version_minor()) + " build ";
  ASSERT_EQ(identity.substr(0, prefix.size()), prefix);
  std::string build = identity.substr(prefix.size());
  EXPECT_GE(build.size(), 6u);
  EXPECT_EQ(build.find_first_not_of("0123456789"), std::string::npos) << build;
  EXPECT_TRUE(std::filesystem::is_regular_file(nvrtc.path())) << nvrtc.path();
}

TEST(Nvrtc, ReportsSpillsInsteadOfHidingThem) {
  Compilation result = Nvrtc::instance().compile("spilling", test::kSpilling, "sm_80");
  EXPECT_GT(result.spill_bytes, 0);
  EXPECT_EQ(result.registers, 32);
  ASSERT_EQ(compile_warnings(result.log).size(), 1u) << result.log;
  EXPECT_NE(compile_warnings(result.log)[0].find("spill stores"), std::string::npos);
}

TEST(Nvrtc, ACompileErrorCarriesLogAndNumberedSource) {
  std::string source = "extern \"C\" __global__ void broken() {\n  int x = nothing_known;\n}\n";
  try {
    Nvrtc::instance().compile("broken", source, "sm_80");
    FAIL() << "it compiled";
  } catch (const CompileError& error) {
    EXPECT_NE(error.log.find("broken.cu(2)"), std::string::npos) << error.log;
    EXPECT_NE(error.log.find("nothing_known"), std::string::npos);
    EXPECT_EQ(error.numbered_source, "    1  extern \"C\" __global__ void broken() {\n"
                                     "    2    int x = nothing_known;\n"
                                     "    3  }\n");
    for (const char* part : {"broken", "sm_80", "NVRTC", "nothing_known"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Nvrtc, IncludesNothing) {
  EXPECT_THROW(Nvrtc::instance().compile("k", "#include <cuda_fp16.h>\n", "sm_80"), CompileError);
}

TEST(Nvrtc, RefusesAnArchitectureItDoesNotKnow) {
  for (const char* arch : {"sm_35", "sm_999", "hopper", ""})
    try {
      Nvrtc::instance().compile("twice", kDouble, arch);
      ADD_FAILURE() << "it compiled for " << arch;
    } catch (const LibraryError& error) {
      EXPECT_NE(std::string(error.what()).find("sm_80"), std::string::npos) << error.what();
    }
}

TEST(Nvrtc, CompilesOnSeveralThreads) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::string expected = nvrtc.compile("twice", kDouble, "sm_80").cubin;
  std::vector<std::string> cubins(4);
  std::vector<std::thread> threads;
  for (std::string& cubin : cubins)
    threads.emplace_back([&] { cubin = nvrtc.compile("twice", kDouble, "sm_80").cubin; });
  for (std::thread& thread : threads)
    thread.join();
  for (const std::string& cubin : cubins)
    EXPECT_EQ(cubin, expected);
}

TEST(NvrtcLibrary, AMissingLibraryListsEveryPlaceTried) {
  std::vector<nvrtc::Candidate> places = {
      {nvrtc::Candidate::loaded, "libnvrtc.so.1", "in this process"},
      {nvrtc::Candidate::file, "/nowhere/nvidia/cu13/lib/libnvrtc.so.13", "VIRTUAL_ENV"},
      {nvrtc::Candidate::search, "libnvrtc.so.1", "the dynamic linker"}};
  try {
    nvrtc::open_first(places);
    FAIL() << "it was found";
  } catch (const LibraryError& error) {
    std::string what = error.what();
    for (const char* part :
         {"in this process", "/nowhere/nvidia/cu13/lib", "VIRTUAL_ENV", "the dynamic linker",
          "pip install nvidia-cuda-nvrtc", "SAGEBWD_NVRTC"})
      EXPECT_NE(what.find(part), std::string::npos) << part << " is not in: " << what;
    // The tail of a log has the remedy.
    const std::string last = what.substr(what.rfind('\n') + 1);
    for (const char* part : {"`pip install nvidia-cuda-nvrtc` (for drivers of CUDA 13)",
                             "`pip install nvidia-cuda-nvrtc-cu12`", "SAGEBWD_NVRTC"})
      EXPECT_NE(last.find(part), std::string::npos) << part << " is not in: " << last;
  }
}

TEST(NvrtcLibrary, AFileThatIsNoLibraryIsNamed) {
  test::TempDirectory temp;
  test::write_text(temp / "libnvrtc.so.13", "no ELF");
  try {
    nvrtc::open_first(nvrtc::candidates(temp / "libnvrtc.so.13"));
    FAIL() << "it opened";
  } catch (const LibraryError& error) {
    EXPECT_NE(std::string(error.what()).find(temp / "libnvrtc.so.13"), std::string::npos);
  }
}

TEST(NvrtcLibrary, LooksInTheDocumentedOrder) {
  test::TempDirectory temp;
  std::filesystem::create_directories(temp / "venv/lib/python3.11/site-packages");
  ScopedVariable conda("CONDA_PREFIX", std::nullopt);
  ScopedVariable venv("VIRTUAL_ENV", temp / "venv");
  ScopedVariable home("CUDA_HOME", "/cuda-home"), path("CUDA_PATH", "/cuda-path");

  std::vector<nvrtc::Candidate> places = nvrtc::candidates("");
  auto position = [&](nvrtc::Candidate::Kind kind, const std::string& name) {
    auto same = [&](const nvrtc::Candidate& c) { return c.kind == kind && c.name == name; };
    auto found = std::find_if(places.begin(), places.end(), same);
    EXPECT_NE(found, places.end()) << name;
    return found - places.begin();
  };
  using enum nvrtc::Candidate::Kind;
  std::string site = temp / "venv/lib/python3.11/site-packages";
  std::vector<std::ptrdiff_t> order = {
      position(loaded, "libnvrtc.so.13"),
      position(loaded, "libnvrtc.so.12"),
      position(file, site + "/nvidia/cu13/lib/libnvrtc.so.13"),
      position(file, site + "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
      position(file, "/cuda-home/lib64/libnvrtc.so.13"),
      position(file, "/cuda-path/lib64/libnvrtc.so.13"),
      position(search, "libnvrtc.so.13"),
      position(file, "/usr/local/cuda/lib64/libnvrtc.so.13"),
  };
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));

  places = nvrtc::candidates("/given/libnvrtc.so");
  ASSERT_EQ(places.size(), 1u);
  EXPECT_EQ(places[0].name, "/given/libnvrtc.so");
}

// Two entry functions, as NVRTC 13.0 reports them.
constexpr const char* kLog =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'k2' for 'sm_80'\n"
    "ptxas info    : Function properties for k2\n"
    "ptxas         .     40 bytes stack frame, 44 bytes spill stores, 48 bytes spill loads\n"
    "ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size\n"
    "ptxas info    : Compile time = 15.613 ms\n"
    "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
    "ptxas info    : Function properties for k\n"
    "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 128 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]\n";

TEST(PtxasReport, ReadsRegistersSpillsAndSharedMemory) {
  std::optional<nvrtc::PtxasReport> report = nvrtc::parse_ptxas_report(kLog);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->registers, 128);
  EXPECT_EQ(report->spill_bytes, 92);
  EXPECT_EQ(report->static_shared_bytes, 256);
  EXPECT_FALSE(nvrtc::parse_ptxas_report(""));
  EXPECT_FALSE(nvrtc::parse_ptxas_report("ptxas info    : 0 bytes gmem\n"));
}

TEST(PtxasReport, WarningsAreSpillsAndAdvisoriesButC7519) {
  EXPECT_EQ(compile_warnings(kLog).size(), 1u);
  EXPECT_EQ(compile_warnings("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
                             "instructions are serialized due to ...\n")
                .size(),
            1u);
  EXPECT_EQ(compile_warnings("ptxas info    : (C7519) ...\n").size(), 0u);
  EXPECT_EQ(compile_warnings("ptxas warning : Stack size for entry function\n").size(), 1u);
  EXPECT_EQ(compile_warnings("k.cu(3): warning #177-D: variable was declared\n").size(), 0u);
}

TEST(PtxasReport, WithoutItTheRestOfTheLogStays) {
  std::string kept = "k.cu(3): warning #177-D: variable was declared\n"
                     "ptxas info    : (C7510) Potential Performance Loss\n";
  EXPECT_EQ(without_report(kLog + kept), kept);
}

} // namespace
