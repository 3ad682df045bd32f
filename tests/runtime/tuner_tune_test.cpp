//===- tuner_tune_test.cpp - From candidates to a record -------------------===//
//
// tune() and its modes with a stand-in compiler and bench, in real worker processes.
//
//===----------------------------------------------------------------------===//

#include "generator/space.h"
#include "runtime/parallel_for.h"
#include "runtime/tuner/tile_choice.h"
#include "runtime/tuner/worker/command.h"
#include "tests/runtime/tuner_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sys/wait.h>

using namespace sagebwd;
using namespace std::chrono_literals;
using test::ScopedVariable;

namespace {

constexpr const char* kFast = "mma 128x64 w8 s2 b1"; ///< of sm_80's forward at D 128

class Tune : public testing::Test {
protected:
  Tune() {
    request_.problem = {1, 32, 32, 8192, 8192};
    request_.worker = test::test_worker();
    request_.kernels = {KernelKind::forward};
    request_.limits = {20000ms, 1000ms, 1000ms, 1000ms, 5};
    request_.wait_limit = 30s;
  }
  /// A compiler whose kernels do what `traits_` says of their tile, or 1 ms a launch.
  std::shared_ptr<const BuiltKernel> build(const KernelSpec& spec) {
    const std::string tile = to_string(spec.tile);
    if (traits_[tile] == "refused")
      throw CompileError("ptxas has no registers", "", "");
    auto built = std::make_shared<BuiltKernel>();
    built->spec = spec;
    built->entry.kernel_name = kernel_name(spec);
    built->entry.cubin = traits_[tile];
    built->entry.spill_bytes = traits_[tile] == "spills" ? 64 : 0;
    return built;
  }
  TuneSurroundings around(Records& records) {
    return {records,
            {"Some GPU", 108, find_arch("sm_80"), "13.0"},
            [this](const KernelSpec& spec) {
              std::lock_guard lock(mutex_);
              return build(spec);
            },
            [this] { return compiler_; },
            rank_};
  }
  /// As a new process would find it.
  Tuned tuned() {
    Records records(store());
    return tune(request_, around(records)).at(0);
  }
  TileConfig chosen(TuneMode mode) {
    Records records(store());
    return chosen_tile(mode, KernelKind::forward, request_, around(records));
  }
  CacheStore& store() {
    stores_.push_back(std::make_unique<CacheStore>(StoreOptions{directory_, {}}));
    return *stores_.back();
  }
  CacheKey key() {
    Records records(store());
    return record_key(KernelKind::forward, resolved(request_.spec), around(records).gpu,
                      bucket_of(KernelKind::forward, request_.problem, 108));
  }
  TileConfig default_() {
    return default_tile(KernelKind::forward, resolved(request_.spec), find_arch("sm_80"));
  }
  size_t workers() const {
    const std::string log = test::read_text(temp_ / "log");
    return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
  }
  /// The message of what must fail.
  template <typename Error> std::string failure(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "it did not fail";
    return "";
  }
  /// Exit code of a child process.
  static int child(const std::function<int()>& work) { return wait_for(start(work)); }
  static pid_t start(const std::function<int()>& work) {
    const pid_t process = ::fork();
    if (process == 0)
      ::_exit(work());
    return process;
  }
  static int wait_for(pid_t process) {
    int status = 0;
    ::waitpid(process, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  test::TempDirectory temp_;
  ScopedVariable role_{test::kWorkerVariable, "serves"};
  ScopedVariable log_{test::kWorkerLog, temp_ / "log"};
  std::string directory_ = temp_ / "cache";
  std::string compiler_ = "nvrtc 13.0";
  int rank_ = 0;
  TuneRequest request_;
  std::map<std::string, std::string> traits_;
  std::mutex mutex_; ///< of traits_
  std::vector<std::unique_ptr<CacheStore>> stores_;
};

TEST_F(Tune, KeepsTheWinnerWithAllThatWasTried) {
  traits_[kFast] = "ms=0.8";
  const Tuned first = tuned();
  EXPECT_TRUE(first.fresh);
  EXPECT_TRUE(first.kept);
  EXPECT_EQ(first.record.tile, kFast);
  EXPECT_EQ(first.record.default_tile, to_string(default_()));
  EXPECT_EQ(first.record.compiler, compiler_);
  const auto space =
      tiles_worth_trying(KernelKind::forward, resolved(request_.spec), find_arch("sm_80"));
  ASSERT_EQ(first.record.candidates.size(), space.size());
  for (size_t i = 0; i < space.size(); ++i) {
    EXPECT_EQ(first.record.candidates[i].tile, to_string(space[i]));
    EXPECT_EQ(first.record.candidates[i].ms.size(), 5u);
  }
  EXPECT_EQ(first.record.key["gpu"], "Some GPU");
  EXPECT_EQ(first.record.key["bucket"], "q8192 kv8192 full");
  EXPECT_EQ(first.record.key["block_q"], "");

  const Tuned second = tuned();
  EXPECT_FALSE(second.fresh);
  EXPECT_EQ(serialize(second.record), serialize(first.record));
  EXPECT_EQ(workers(), 1u);
  EXPECT_EQ(to_string(chosen(TuneMode::use)), kFast);
}

TEST_F(Tune, WhatDoesNotCompileOrSpillsIsListedByName) {
  traits_["mma 64x64 w4 s2 b2"] = "refused";
  traits_[kFast] = "spills";
  std::map<std::string, std::string> outcomes;
  for (const TriedTile& tried : tuned().record.candidates)
    outcomes[tried.tile] = tried.outcome + (tried.detail.empty() ? "" : ": " + tried.detail);
  EXPECT_EQ(outcomes["mma 64x64 w4 s2 b2"], "not compiled: ptxas has no registers");
  EXPECT_EQ(outcomes[kFast], "spills: 64 bytes");
  EXPECT_EQ(outcomes[to_string(default_())], "timed");
}

TEST_F(Tune, WithoutACompilerItSaysSoAndKeepsNothing) {
  for (const TileConfig& tile :
       tiles_worth_trying(KernelKind::forward, resolved(request_.spec), find_arch("sm_80")))
    if (tile != default_())
      traits_[to_string(tile)] = "refused";
  const std::string what = failure<TuneError>([&] { tuned(); });
  EXPECT_NE(what.find("no candidate for forward compiles"), std::string::npos) << what;
  EXPECT_NE(what.find("ptxas has no registers"), std::string::npos) << what;
  EXPECT_EQ(chosen(TuneMode::use), default_());
}

TEST_F(Tune, TunesAgainWhenToldToOrForAnotherCompiler) {
  tuned();
  request_.force = true;
  EXPECT_TRUE(tuned().fresh);
  request_.force = false;
  EXPECT_FALSE(tuned().fresh);
  compiler_ = "nvrtc 13.1";
  EXPECT_TRUE(tuned().fresh);
  EXPECT_EQ(tuned().record.compiler, "nvrtc 13.1");
  compiler_ = ""; // a machine without NVRTC takes any
  EXPECT_FALSE(tuned().fresh);
  EXPECT_EQ(workers(), 3u);
}

TEST_F(Tune, EachBucketSpecAndGpuHasARecordOfItsOwn) {
  tuned();
  Records records(store());
  const auto fresh = [&](const TuneSurroundings& surroundings) {
    return tune(request_, surroundings).at(0).fresh;
  };
  request_.problem.seq_q = request_.problem.seq_kv = 5000; // the same bucket
  EXPECT_FALSE(fresh(around(records)));
  request_.problem.seq_kv = 4096;
  EXPECT_TRUE(fresh(around(records)));
  request_.spec.deterministic = false;
  EXPECT_TRUE(fresh(around(records)));
  request_.spec.causal = Causal::top_left;
  EXPECT_TRUE(fresh(around(records)));
  TuneSurroundings other = around(records);
  other.gpu.sm_count = 216;
  EXPECT_TRUE(fresh(other));
  other.gpu.name = "Another GPU";
  EXPECT_TRUE(fresh(other));
  other.gpu.driver = "13.1";
  EXPECT_TRUE(fresh(other));
}

TEST_F(Tune, OnlyNamedTilesCompete) {
  request_.only = {parse_tile(kFast)};
  EXPECT_EQ(tuned().record.candidates.size(), 2u);
  request_.force = true;
  request_.only = {default_()};
  EXPECT_EQ(tuned().record.candidates.size(), 1u);
  request_.kernels = {KernelKind::forward, KernelKind::backward_dkv}; // which it does not suit
  request_.only = {parse_tile(kFast)};
  Records records(store());
  EXPECT_EQ(tune(request_, around(records)).size(), 1u);
}

TEST_F(Tune, AChoiceAmongFewerIsNotTakenForAFullOne) {
  request_.only = {parse_tile(kFast)};
  EXPECT_TRUE(tuned().fresh);
  EXPECT_FALSE(tuned().fresh);
  request_.only = {parse_tile("mma 64x64 w4 s2 b2")}; // did not compete
  EXPECT_TRUE(tuned().fresh);
  request_.only = {};
  EXPECT_TRUE(tuned().fresh);
  EXPECT_FALSE(tuned().fresh);
  request_.only = {parse_tile(kFast)}; // competed among others
  EXPECT_FALSE(tuned().fresh);
  EXPECT_EQ(workers(), 3u);
}

TEST_F(Tune, WhatDoesNotFitOnTheGpuIsSaidBeforeAnythingIsDone) {
  Records records(store());
  TuneSurroundings surroundings = around(records);
  surroundings.gpu.memory_bytes = uint64_t{80} << 30;
  surroundings.build = [](const KernelSpec&) -> std::shared_ptr<const BuiltKernel> {
    throw std::runtime_error("something is built");
  };
  request_.kernels = {KernelKind::backward_dq};
  for (const Problem& problem : {Problem{64, 32, 32, 65536, 65536},
                                 Problem{65535, 65535, 1, int64_t{1} << 30, int64_t{1} << 30}}) {
    request_.problem = problem;
    const std::string what = failure<SpecError>([&] { tune(request_, surroundings); });
    for (const char* part :
         {"backward_dq", "GiB of GPU memory, and Some GPU has 80.0 GiB", "smaller"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
  }
  request_.problem = {1, 32, 32, 8192, 8192};
  EXPECT_EQ(failure<std::runtime_error>([&] { tune(request_, surroundings); }),
            "something is built");
}

TEST_F(Tune, IsInterruptedWhileItCompiles) {
  Records records(store());
  TuneSurroundings surroundings = around(records);
  std::atomic<bool> building{false};
  surroundings.build = [&](const KernelSpec& spec) {
    building = true;
    while (!interrupt_flag()->load())
      std::this_thread::sleep_for(5ms);
    check_interrupt(); // as NVRTC's callback makes a compile end
    return build(spec);
  };
  const ScopedWatch watch([&] {
    if (building)
      throw std::runtime_error("Ctrl-C");
  });
  EXPECT_EQ(failure<std::runtime_error>([&] { tune(request_, surroundings); }), "Ctrl-C");
  EXPECT_TRUE(records.all().empty());
}

TEST_F(Tune, NoCandidateIsWrongUse) {
  request_.only = {parse_tile("wgmma 64x64 w4 s1 b2"), parse_tile("mma 64x64 w4 s9 b2")};
  const std::string what = failure<SpecError>([&] { tuned(); });
  for (const char* part : {"no candidate", "wgmma 64x64 w4 s1 b2", "sm_90a alone", "stages"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
}

TEST_F(Tune, ModesDecide) {
  traits_[kFast] = "ms=0.8";
  EXPECT_EQ(chosen(TuneMode::use), default_()); // nothing there yet
  EXPECT_EQ(chosen(TuneMode::off), default_());
  const std::string what = failure<TuneError>([&] { chosen(TuneMode::frozen); });
  for (const char* part : {"frozen", "forward of d128", "q8192 kv8192 full", "Some GPU",
                           "sagebwd tune --spec 'd128 ", "--import"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
  EXPECT_EQ(workers(), 0u);
  EXPECT_EQ(to_string(chosen(TuneMode::tune)), kFast);
  EXPECT_EQ(to_string(chosen(TuneMode::tune)), kFast);
  EXPECT_EQ(workers(), 1u);
  EXPECT_EQ(to_string(chosen(TuneMode::use)), kFast);
  EXPECT_EQ(to_string(chosen(TuneMode::frozen)), kFast);
  EXPECT_EQ(chosen(TuneMode::off), default_());
}

TEST_F(Tune, ARecordOfATileThatNoKernelHasIsReported) {
  Tuned made = tuned();
  made.record.tile = "mma 96x64 w6 s1 b1";
  store().publish_record(made.record);
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen(TuneMode::use), default_());
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find(made.record.key.digest), std::string::npos) << warning;
  EXPECT_NE(warning.find("the default tile is used"), std::string::npos);
  EXPECT_NE(failure<TuneError>([&] { chosen(TuneMode::frozen); }).find("cannot be used"),
            std::string::npos);
}

TEST_F(Tune, OfTwoProcessesOneTunesAndTheOtherReads) {
  traits_[kFast] = "ms=0.8";
  const auto work = [&] { return to_string(chosen(TuneMode::tune)) == kFast ? 0 : 1; };
  std::vector<pid_t> processes;
  for (int i = 0; i < 4; ++i)
    processes.push_back(start(work));
  for (pid_t process : processes)
    EXPECT_EQ(wait_for(process), 0);
  EXPECT_EQ(workers(), 1u);
}

TEST_F(Tune, OfAGroupRankZeroTunesAndTheOthersWait) {
  traits_[kFast] = "ms=0.8";
  const auto rank = [&](int number) {
    return [this, number] {
      rank_ = number;
      if (number == 0)
        std::this_thread::sleep_for(300ms); // the others are there first
      return to_string(chosen(TuneMode::tune)) == kFast ? 0 : 1;
    };
  };
  const pid_t one = start(rank(1)), two = start(rank(2)), zero = start(rank(0));
  EXPECT_EQ(wait_for(zero), 0);
  EXPECT_EQ(wait_for(one), 0);
  EXPECT_EQ(wait_for(two), 0);
  EXPECT_EQ(workers(), 1u);
}

TEST_F(Tune, ARankThatWaitsInVainTakesTheDefaultWithAWarning) {
  rank_ = 3;
  request_.wait_limit = 300ms;
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen(TuneMode::tune), default_());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("rank 0 left no record"),
            std::string::npos);
  EXPECT_EQ(workers(), 0u);
}

TEST_F(Tune, ARankThatCanSeeNoRecordDoesNotWait) {
  rank_ = 3;
  directory_ = "";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(chosen(TuneMode::tune), default_());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST_F(Tune, WhatCannotBeTunedIsTriedOnceAndCostsNoStep) {
  request_.worker = {"/nonexistent/worker"};
  Records records(store());
  const auto call = [&] {
    return chosen_tile(TuneMode::tune, KernelKind::forward, request_, around(records));
  };
  testing::internal::CaptureStderr();
  EXPECT_EQ(call(), default_());
  EXPECT_EQ(call(), default_());
  const std::string text = testing::internal::GetCapturedStderr();
  const size_t first = text.find("is not tuned");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("is not tuned", first + 1), std::string::npos) << "it was tried again";
}

TEST_F(Tune, WithoutADirectoryItIsKnownToThisProcess) {
  directory_ = "";
  CacheStore& nowhere = store();
  Records records(nowhere);
  traits_[kFast] = "ms=0.8";
  testing::internal::CaptureStderr();
  const Tuned first = tune(request_, around(records)).at(0);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("warning"), std::string::npos);
  EXPECT_TRUE(first.fresh);
  EXPECT_FALSE(first.kept);
  EXPECT_FALSE(tune(request_, around(records)).at(0).fresh);
  EXPECT_EQ(records.all().size(), 1u);
}

TEST_F(Tune, ANewerVersionsRecordIsLeftAlone) {
  const TuningRecord record = tuned().record;
  const std::string path = directory_ + "/" + record.key.digest + ".tuning";
  const std::string newer = "{\"schema\": \"sagebwd tuning 2\", \"tile\": \"of the future\"}\n";
  test::write_text(path, newer);
  EXPECT_EQ(chosen(TuneMode::use), default_());
  EXPECT_EQ(test::read_text(path), newer);
  Records records(store());
  std::vector<std::string> problems;
  EXPECT_TRUE(records.all(&problems).empty());
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("newer version"), std::string::npos);
}

TEST_F(Tune, ListingARecordThatOthersMayWriteKeepsItAndSaysSo) {
  const TuningRecord record = tuned().record;
  const std::string path = directory_ + "/" + record.key.digest + ".tuning";
  std::filesystem::permissions(path, std::filesystem::perms(0660));
  std::vector<std::string> problems;
  EXPECT_TRUE(Records(store()).all(&problems).empty());
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("run: chmod go-w '" + path + "'"), std::string::npos) << problems[0];
  EXPECT_THROW(Records(store()).all(), TuneError);
  std::filesystem::permissions(path, std::filesystem::perms(0600));
  EXPECT_EQ(Records(store()).all().size(), 1u);
}

TEST_F(Tune, RecordsMoveBetweenMachines) {
  traits_[kFast] = "ms=0.8";
  tuned();
  request_.problem = {1, 1, 1, 512, 512};
  tuned();
  Records here(store());
  const std::vector<TuningRecord> all = here.all();
  ASSERT_EQ(all.size(), 2u);
  const std::string file = serialize_records(all);

  directory_ = temp_ / "elsewhere";
  Records there(store());
  const uint64_t before = there.generation();
  Records::Merged merged = there.merge(*parse_records(file), /*overwrite=*/false);
  EXPECT_EQ(merged.added, 2u);
  EXPECT_GT(there.generation(), before);
  EXPECT_EQ(to_string(chosen(TuneMode::frozen)), kFast);
  EXPECT_EQ(serialize_records(Records(store()).all()), file);

  std::vector<TuningRecord> changed = all;
  changed[0].compiler = "another";
  merged = there.merge(changed, /*overwrite=*/false);
  EXPECT_EQ(merged.kept, 2u);
  EXPECT_EQ(serialize_records(Records(store()).all()), file);
  merged = there.merge(changed, /*overwrite=*/true);
  EXPECT_EQ(merged.replaced, 2u);
  EXPECT_EQ(merged.added + merged.kept, 0u);
  EXPECT_EQ(Records(store()).find(changed[0].key)->compiler, "another");

  changed[1].tile = "nonsense"; // all or none
  changed[0].compiler = "a third";
  EXPECT_THROW(there.merge(changed, true), SpecError);
  EXPECT_EQ(Records(store()).find(changed[0].key)->compiler, "another");
}

TEST(WorkerCommand, IsNamedFoundOrMissed) {
  EXPECT_EQ(worker_command({"a", "b"}, "/named"), (std::vector<std::string>{"a", "b"}));
  test::TempDirectory temp;
  const std::string program = temp / "sagebwd";
  test::write_text(program, "#!/bin/sh\n");
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  EXPECT_EQ(worker_command({}, program), (std::vector<std::string>{program, "tune-worker"}));
  EXPECT_THROW(worker_command({}, temp / "none"), TuneError);
  set_tune_worker({"python", "-m", "sagebwd.tune_worker"});
  EXPECT_EQ(worker_command({}, "").front(), "python");
  set_tune_worker({});
  // Beside this executable, or in PATH, or nowhere.
  ScopedVariable path("PATH", "/nowhere::relative:" + temp.path());
  const std::filesystem::path beside =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "sagebwd";
  EXPECT_EQ(worker_command({}, "").front(),
            std::filesystem::exists(beside) ? beside.string() : program);
}

} // namespace
