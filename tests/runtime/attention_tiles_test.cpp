//===- attention_tiles_test.cpp - Which tiles an operation runs with -------===//
//
// On a fake driver (fake_libcuda.c), in a child process that is this executable again: GPUs nobody
// has seen, tuning records, modes, captures. Where kernels are launched, NVRTC compiles them.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "generator/space.h"
#include "runtime/attention.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/tuner/tuner.h"
#include "tests/runtime/again.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <vector>

using namespace sagebwd;
using test::ScopedVariable;

namespace {

const Problem kShort = {1, 1, 1, 512, 512}, kLong = {1, 32, 32, 8192, 8192};

AttentionSpec tiles_spec() {
  AttentionSpec s;
  s.head_dim = 64;
  return s;
}

/// Prints what an action gives, or the error it ends with.
void tell(const char* what, const std::function<std::string()>& action) {
  std::string result;
  try {
    result = action();
  } catch (const SpecError& error) {
    result = std::string("SpecError: ") + error.what();
  } catch (const TuneError& error) {
    result = std::string("TuneError: ") + error.what();
  } catch (const DriverError& error) {
    result = std::string("DriverError: ") + error.what();
  }
  std::printf("%s: %s\n", what, result.c_str());
}

/// Keeps a record by which a tile has won.
void keep(KernelKind kind, const Problem& problem, const std::string& tile) {
  const Gpu gpu = gpu_of(0);
  TuningRecord record;
  record.key =
      record_key(kind, resolved(tiles_spec()), gpu, bucket_of(kind, problem, gpu.sm_count));
  record.tile = record.default_tile = tile;
  user_records().keep(record);
}

void show_tiles() {
  Attention attention(tiles_spec());
  std::printf("arch: %s\n", std::string(attention.arch().name).c_str());
  for (KernelKind kind : {KernelKind::forward, KernelKind::backward_dq, KernelKind::backward_dkv})
    tell(std::string(to_string(kind)).c_str(),
         [&] { return to_string(attention.tile(kind, kLong)); });
}

void use_records() {
  Attention attention(tiles_spec()), given(tiles_spec(), 0, Tiles{});
  const auto forward = [](Attention& a, const Problem& p) {
    return [&a, p] { return to_string(a.tile(KernelKind::forward, p)); };
  };
  tell("before", forward(attention, kLong));
  keep(KernelKind::forward, kLong, "mma 128x128 w8 s1 b1");
  tell("after", forward(attention, kLong));
  tell("same bucket", forward(attention, {4, 32, 8, 5000, 4500}));
  tell("other bucket", forward(attention, kShort));
  tell("given tiles", forward(given, kLong));
  tell("other kernel", [&] { return to_string(attention.tile(KernelKind::backward_dq, kLong)); });
  keep(KernelKind::forward, kLong, "mma 64x128 w4 s2 b2");
  tell("tuned again", forward(attention, kLong));
}

/// Arguments that the fake driver's kernels do not look at.
struct Arguments {
  Arguments(const Attention& attention, const Problem& problem) {
    const auto place = [](uint64_t number) { return reinterpret_cast<void*>(number << 40); };
    forward.problem = problem;
    forward.q = forward.k = forward.v = {place(1), 64, 64, 64};
    forward.out = {place(2), 64, 64, 64};
    forward.lse = static_cast<float*>(place(3));
    forward.softmax_scale = 1;
    forward.workspace = place(4);
    forward.workspace_bytes = attention.forward_workspace_bytes(problem);
  }
  ForwardArgs forward;
};

/// Calls of many sizes while records come and go.
void call_from_many_threads() {
  Attention attention(tiles_spec());
  attention.warmup(false);
  const char* const kTiles[] = {"mma 128x128 w8 s1 b1", "mma 64x128 w4 s2 b2"};
  for (const char* tile : kTiles) { // compiled before the race
    keep(KernelKind::forward, kShort, tile);
    attention.warmup(false, kShort);
  }
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, i] {
      Arguments args(attention, {1, 1, 1, int64_t{256} << (i % 4), 512});
      for (int call = 0; call < 200; ++call, ++calls)
        attention.forward(args.forward);
    });
  for (int i = 0; i < 40; ++i)
    keep(KernelKind::forward, {1, 1, 1, int64_t{256} << (i % 4), 512}, kTiles[i % 2]);
  for (std::thread& thread : threads)
    thread.join();
  std::printf("calls: %d\n", calls.load());
}

/// The grid's first extent, which the fake driver writes down, tells 64 queries a block from 128.
void launch_tiles() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  const auto forward = [&](void* stream) {
    return [&, stream] {
      args.forward.stream = stream;
      attention.forward(args.forward);
      return std::string("launched");
    };
  };
  int captured = 0; // to the fake driver every stream but the null stream is being captured
  tell("capture, nothing loaded", forward(&captured));
  attention.warmup(false);
  tell("capture, default", forward(&captured));
  keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  tell("capture, tuned but not loaded", forward(&captured));
  attention.warmup(false, kShort);
  tell("capture, tuned", forward(&captured));
  tell("tuned", forward(nullptr));
}

/// A record from a machine whose compiler can do more: here the tile spills.
void launch_what_cannot_be_built() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  keep(KernelKind::forward, kShort, "mma 64x128 w4 s1 b8");
  tell("call", [&] {
    attention.forward(args.forward);
    return std::string("launched");
  });
}

/// A record that comes while the kernels of a first call are being compiled.
void tune_during_the_first_call() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  std::thread other([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  });
  attention.forward(args.forward);
  other.join();
  tell("second", [&] {
    attention.forward(args.forward);
    return std::string("launched");
  });
}

/// Of two buckets that have been launched, one changes.
void tune_after_the_first_call() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort), longer(attention, {1, 1, 1, 1024, 512});
  const auto forward = [&](Arguments& a) {
    return [&] {
      attention.forward(a.forward);
      return std::string("launched");
    };
  };
  tell("first", forward(args));
  tell("first of another bucket", forward(longer));
  keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  tell("second", forward(args));
  tell("second of another bucket", forward(longer));
}

/// Without `deterministic`: a backward in one kernel, where it is the default.
void show_fused() {
  AttentionSpec free = tiles_spec();
  free.precision = Precision::gradients16, free.deterministic = false;
  const Gpu gpu = gpu_of(0);
  TuningRecord record; // of the split one
  record.key = record_key(KernelKind::backward_dkv, resolved(free), gpu,
                          bucket_of(KernelKind::backward_dkv, kLong, gpu.sm_count));
  record.tile = record.default_tile = "mma 64x128 w8 s1 b1";
  user_records().keep(record);
  Attention attention(free),
      split(free, 0, Tiles{{KernelKind::backward_dkv, parse_tile(record.tile)}});
  for (KernelKind kind : {KernelKind::forward, KernelKind::backward, KernelKind::backward_dkv})
    tell(std::string(to_string(kind)).c_str(),
         [&] { return to_string(attention.tile(kind, kLong)); });
  tell("given", [&] { return to_string(split.tile(KernelKind::backward_dkv, kLong)); });
  const size_t more =
      attention.backward_workspace_bytes(kLong) - split.backward_workspace_bytes(kLong);
  tell("sums of dQ, bytes a value", [&] { return std::to_string(more / (32 * 8192 * 64)); });
}

const std::map<std::string, std::function<void()>>& tiles_scenarios() {
  static const std::map<std::string, std::function<void()>> map = {
      {"tiles", show_tiles},
      {"fused", show_fused},
      {"records", use_records},
      {"launch", launch_tiles},
      {"threads", call_from_many_threads},
      {"spills", launch_what_cannot_be_built},
      {"late record", tune_during_the_first_call},
      {"changed record", tune_after_the_first_call},
      {"constructor",
       [] { tell("constructor", [] { return to_string(Attention(tiles_spec()).spec()); }); }}};
  return map;
}

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
  /// What a test does not say; in the child, what the parent says stays.
  static std::optional<std::string> unless_child(const char* name, const char* value) {
    if (!test::child_task())
      return value;
    const char* given = std::getenv(name);
    return given ? std::optional<std::string>(given) : std::nullopt;
  }
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
    for (KernelKind kind : tiled_kernels())
      expected += std::string(to_string(kind)) + ": " +
                  to_string(default_tile(kind, resolved(tiles_spec()), find_arch(arch))) + "\n";
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

} // namespace
