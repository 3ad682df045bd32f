//===- attention_tiles_test.cpp - Which tiles an operation runs with -------===//
//
// On a fake driver (fake_libcuda.c), in a child process that is this executable again: GPUs nobody
// has seen, tuning records, modes, captures. NVRTC compiles kernels that are launched.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tests/runtime/again.h"
#include "tests/runtime/attention_tiles_scenarios.h"

#include <chrono>
#include <gtest/gtest.h>

#include <set>

using namespace sagebwd;
using test::ScopedVariable, test::tiles_scenarios, test::tiles_spec;

namespace {

class AttentionTiles : public testing::Test {
protected:
  static void SetUpTestSuite() {
    folder_ = new test::TempDirectory;
    if (!test::child_task())
      test::compile_fake_driver(folder_->path());
  }
  static void TearDownTestSuite() { delete folder_; }

  /// The lines of a scenario in a new process: those of the fake driver where `driver`.
  std::string run(const std::string& scenario, bool driver = false) {
    ScopedVariable path("LD_LIBRARY_PATH", folder_->path());
    ScopedVariable cache("SAGEBWD_CACHE_DIR", cache_ / "cache");
    ScopedVariable quiet("FAKE_QUIET", driver ? std::nullopt : std::optional<std::string>("1"));
    return test::report_of_child("AttentionTiles.AGpuNobodyHasSeenHasTheDefault", scenario);
  }
  static void expect_in(const std::string& output, const std::string& part) {
    EXPECT_NE(output.find(part), std::string::npos) << "'" << part << "' is not in:\n" << output;
  }

  inline static test::TempDirectory* folder_ = nullptr; ///< of the fake driver
  test::TempDirectory cache_;
  /// A test that says nothing else gets `value`; in the child, what the parent says stays.
  static std::optional<std::string> unless_child(const char* name, const char* value) {
    if (!test::child_task())
      return value;
    const char* given = std::getenv(name);
    return given ? std::optional<std::string>(given) : std::nullopt;
  }
  ScopedVariable log_{"SAGEBWD_LOG", unless_child("SAGEBWD_LOG", "0")}; // a loaded machine says so
  ScopedVariable mode_{"SAGEBWD_TUNE", unless_child("SAGEBWD_TUNE", "use")};
  ScopedVariable major_{"FAKE_MAJOR", unless_child("FAKE_MAJOR", "8")};
  ScopedVariable minor_{"FAKE_MINOR", unless_child("FAKE_MINOR", "0")};
  ScopedVariable sms_{"FAKE_SMS", unless_child("FAKE_SMS", "108")};
};

TEST(Arguments, AreTheTensorsThatTheirPassTakes) {
  const auto operands_of = [](const auto& args) {
    std::set<Operand> operands;
    visit_tensors(args, [&](Operand operand, const auto&) { operands.insert(operand); });
    return operands;
  };
  std::set<Operand> forward, backward;
  for (const CallerTensor& tensor : caller_tensors()) {
    if (tensor.in_backward)
      backward.insert(tensor.operand);
    if (tensor.in_forward)
      forward.insert(tensor.operand);
  }
  EXPECT_EQ(operands_of(ForwardArgs()), forward);
  EXPECT_EQ(operands_of(BackwardArgs()), backward);
}

TEST_F(AttentionTiles, AGpuNobodyHasSeenHasTheDefault) {
  if (const char* scenario = test::child_task()) {
    test::report(tiles_scenarios().at(scenario));
    return;
  }
  const auto on = [&](const char* major, const char* minor, const char* sms) {
    ScopedVariable a("FAKE_MAJOR", major), b("FAKE_MINOR", minor), c("FAKE_SMS", sms);
    ScopedVariable name("FAKE_NAME", "NVIDIA \xff Future 9000");
    return run("tiles");
  };
  for (const auto& [output, arch] : {std::pair(on("12", "5", "400"), "sm_121"),
                                     {on("8", "8", "17"), "sm_87"},
                                     {on("9", "0", "264"), "sm_90a"},
                                     {on("10", "7", "160"), "sm_103"}}) {
    std::string expected = std::string("arch: ") + arch + "\n";
    const ResolvedSpec spec = resolved(tiles_spec());
    const bool fused = Operation(spec, find_arch(arch)).fused();
    EXPECT_EQ(fused, output.starts_with("arch: sm_121"));
    for (KernelKind kind : tiled_kernels()) {
      const std::string name(to_string(kind));
      const bool launched = kind == KernelKind::forward || !fused;
      expected += name + ": " +
                  (launched ? to_string(default_tile(kind, spec, find_arch(arch)))
                            : "SpecError: " + name + " is not launched: the backward of " +
                                  to_string(*spec) + " is fused on " + arch) +
                  "\n";
    }
    EXPECT_EQ(output, expected);
  }
}

TEST_F(AttentionTiles, AFusedBackwardHasItsDefaultWhateverRecordsThereAre) {
  const std::string split =
      "backward_dkv is not launched: the backward of d64 bf16 causal=none row "
      "64x128 sink_keys=1 gradients16 smooth_k rotate numerics=5 is fused";
  const std::string output = run("fused");
  expect_in(output, "forward: mma 64x128 w4 s1 b2\nbackward: mma 64x64 w4 s1 b2\n");
  expect_in(output, "backward_dkv: SpecError: " + split + " on sm_80\n");
  expect_in(output, "given: mma 64x128 w8 s1 b1\nsums of dQ, bytes a value: 4\n");
  {
    ScopedVariable frozen("SAGEBWD_TUNE", "frozen"); // nothing else is to be had
    const std::string output = run("fused");
    expect_in(output, "forward: TuneError: SAGEBWD_TUNE=frozen");
    expect_in(output, "backward: mma 64x64 w4 s1 b2\n");
  }
  ScopedVariable major("FAKE_MAJOR", "9");
  const std::string hopper = run("fused");
  expect_in(hopper, "backward: SpecError: backward is not launched: the backward of d64 bf16 "
                    "causal=none row 64x128 sink_keys=1 gradients16 smooth_k rotate numerics=5 is "
                    "split on sm_90a\n");
}

TEST_F(AttentionTiles, ShortCallsHaveTwoKernelsOfTheGradients) {
  const std::string name = to_string(*resolved(tiles_spec()));
  const auto absent = [&](KernelKind kind, const char* is) {
    const std::string of(to_string(kind));
    return of + ": SpecError: " + of + " is not launched: the backward of " + name + " is " + is +
           " on sm_89\n";
  };
  const auto there = [](KernelKind kind) {
    const Arch& ada = find_arch("sm_89");
    return std::string(to_string(kind)) + ": " +
           to_string(default_tile(kind, resolved(tiles_spec()), ada)) + "\n";
  };
  using enum KernelKind;
  ScopedVariable minor("FAKE_MINOR", "9");
  EXPECT_EQ(run("lengths"), there(backward) + absent(backward_dkv, "fused") + "as split: 0\n" +
                                absent(backward, "split") + there(backward_dkv) +
                                "as split: 1\nhas its record's tile: 1\n");
}

TEST_F(AttentionTiles, TheBackwardIsBuiltInTheBackgroundOfTheForwardThatItFollows) {
  const size_t kernels =
      Operation(resolved(tiles_spec()), find_arch("sm_80")).distinct_kernels().size();
  const std::string all = std::to_string(kernels) + "\n";
  ScopedVariable quiet("SAGEBWD_LOG", "0");        // nothing about a slow machine
  ScopedVariable version("FAKE_VERSION", "99000"); // takes cubins of every NVRTC
  EXPECT_EQ(run("ahead"),
            "of none: 0\nthe forward: is built\nof both passes: " + all + "and then: " + all);
}

TEST_F(AttentionTiles, AProcessMayEndWhileTheBackwardIsBuilt) {
  ScopedVariable quiet("SAGEBWD_LOG", "0"), version("FAKE_VERSION", "99000");
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(run("ends"), "unfinished: some\n");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

TEST_F(AttentionTiles, AGpuWithoutTheInstructionsIsRefused) {
  ScopedVariable major("FAKE_MAJOR", "13"), minor("FAKE_MINOR", "0");
  expect_in(run("constructor"), "SpecError: compute capability 13.0");
}

TEST_F(AttentionTiles, RecordsAreUsedFromTheMomentTheyAreThere) {
  const std::string other =
      to_string(default_tile(KernelKind::backward_dq, resolved(tiles_spec()), find_arch("sm_80")));
  EXPECT_EQ(run("records"), "before: mma 64x128 w4 s1 b2\n"
                            "after: mma 128x128 w8 s1 b1\n"
                            "same bucket: mma 128x128 w8 s1 b1\n"
                            "other bucket: mma 64x128 w4 s1 b2\n"
                            "given tiles: mma 64x128 w4 s1 b2\n"
                            "other kernel: " +
                                other + "\ntuned again: mma 64x128 w4 s2 b2\n");
  expect_in(run("tiles"), "forward: mma 64x128 w4 s2 b2\n"); // in a new process
  ScopedVariable sms("FAKE_SMS", "109");
  expect_in(run("tiles"), "forward: mma 64x128 w4 s1 b2\n"); // another GPU
}

TEST_F(AttentionTiles, TheModeDecides) {
  run("records");
  {
    ScopedVariable off("SAGEBWD_TUNE", "off");
    expect_in(run("tiles"), "forward: mma 64x128 w4 s1 b2\n");
  }
  {
    ScopedVariable frozen("SAGEBWD_TUNE", "frozen");
    const std::string output = run("tiles");
    expect_in(output, "forward: mma 64x128 w4 s2 b2\n");
    expect_in(output, "backward_dq: TuneError: SAGEBWD_TUNE=frozen, and there is no tuning record "
                      "of backward_dq of d64");
    expect_in(output, "run: sagebwd tune --spec 'd64 ");
  }
  ScopedVariable unknown("SAGEBWD_TUNE", "always");
  expect_in(run("constructor"), "constructor: SpecError: SAGEBWD_TUNE is 'always'");
}

/// Why kernels cannot be compiled here, or empty.
std::string no_compiler() {
  try {
    Nvrtc::instance();
    return "";
  } catch (const LibraryError& error) {
    return std::string("no NVRTC: ") + error.what();
  }
}

TEST_F(AttentionTiles, ThreadsMayCallWhileRecordsChange) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  EXPECT_EQ(run("threads"), "calls: 1600\n");
}

TEST_F(AttentionTiles, ATunedTileThatCannotBeBuiltCostsTheOperationNothing) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  const std::string output = run("spills");
  expect_in(output, "the default tile is used, for the tuned one cannot be had");
  expect_in(output, "call: launched");
}

TEST_F(AttentionTiles, ARecordThatComesDuringTheFirstCallIsNotMissed) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  const std::string output = run("late record", /*driver=*/true);
  const size_t last = output.rfind("grid 4 1 1 block 256"); // 512 queries in blocks of 128
  ASSERT_NE(last, std::string::npos) << output;
  EXPECT_EQ(output.find("grid 8 1 1 block 128 1 1 shared 21504", last), std::string::npos);
}

TEST_F(AttentionTiles, ARecordThatComesAfterALaunchReplacesWhatIsLaunched) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  const std::string output = run("changed record", /*driver=*/true);
  const auto section = [&](const std::string& from, const std::string& to) {
    const size_t begin = from.empty() ? 0 : output.find(from + ": "), end = output.find(to + ": ");
    EXPECT_LT(begin, end) << output;
    return begin < end ? output.substr(begin, end - begin) : "";
  };
  // 512 and 1024 queries in blocks of 64, then 512 in blocks of 128.
  expect_in(section("", "first"), "grid 8 1 1 block 128");
  expect_in(section("first", "first of another bucket"), "grid 16 1 1 block 128");
  const std::string second = section("first of another bucket", "second");
  expect_in(second, "grid 4 1 1 block 256");
  EXPECT_EQ(second.find("grid 8 1 1 block 128 1 1 shared 21504"), std::string::npos) << second;
  expect_in(section("second", "second of another bucket"), "grid 16 1 1 block 128");
}

TEST_F(AttentionTiles, ACaptureTakesWhatIsLoaded) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  const std::string output = run("launch", /*driver=*/true);
  const auto section = [&](const std::string& from, const std::string& to) {
    const size_t begin = output.find(from), end = output.find(to);
    EXPECT_LT(begin, end) << output;
    return begin < end ? output.substr(begin, end - begin) : "";
  };
  expect_in(output, "capture, nothing loaded: DriverError: the stream is being captured");
  // The attention kernel's launch: 512 queries in blocks of 64, or of 128.
  const std::string by_default = "grid 8 1 1 block 128 1 1 shared 21504",
                    tuned = "grid 4 1 1 block 256 1 1 shared 25600";
  expect_in(section("capture, nothing", "capture, default: "), by_default);
  const std::string stale = section("capture, default: ", "capture, tuned but not loaded: ");
  expect_in(stale, by_default);
  EXPECT_EQ(stale.find(tuned), std::string::npos);
  expect_in(output, "captured with default tiles");
  expect_in(section("capture, tuned but not loaded: ", "capture, tuned: "), tuned);
  expect_in(output.substr(output.find("capture, tuned: ")), tuned);
  EXPECT_EQ(output.substr(output.find("capture, tuned: ")).find("cuda: load"), std::string::npos)
      << "something is loaded twice";
}

TEST_F(AttentionTiles, AWarmUpForASizeLoadsWhatWritesLists) {
  if (const std::string why = no_compiler(); !why.empty())
    GTEST_SKIP() << why;
  const std::string output = run("lists");
  expect_in(output, "mask, cold: DriverError: the stream is being captured");
  expect_in(output, "mask, warm: launched");
  expect_in(output, "indices, warm: launched");
}

} // namespace
