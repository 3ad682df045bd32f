//===- tuner_trials_test.cpp - Candidates that crash, hang, lie and differ -===//

#include "runtime/parallel_for.h"
#include "runtime/tuner/selection.h"
#include "runtime/tuner/trials.h"
#include "runtime/tuner/worker/cubins.h"
#include "runtime/tuner/worker/process.h"
#include "runtime/tuner/worker/protocol.h"
#include "runtime/tuner/worker/worker.h"
#include "tests/runtime/tuner_bench.h"

#include <gtest/gtest.h>

#include <sys/wait.h>

using namespace sagebwd;
using namespace sagebwd::tuner;
using namespace std::chrono_literals;
using test::ScopedVariable;
using test::test_worker;

namespace {

/// The tests of the tuner start this. It never returns: the test is the tuner's.
[[noreturn]] void serve(const std::string& role) {
  if (role == "dies")
    ::_exit(7);
  if (role == "stranger") {
    const std::string hello = "{\"report\":\"hello\",\"protocol\":99}\n";
    ::_exit(::write(STDIN_FILENO, hello.data(), hello.size()) > 0 && ::sleep(600) == 0);
  }
  while (role == "mute")
    std::this_thread::sleep_for(1s);
  test::FakeBench bench;
  ::_exit(run_worker(bench));
}

TEST(TunerWorker, SpeaksFirstAndEndsWithTheLine) {
  if (const char* role = std::getenv(test::kWorkerVariable))
    serve(role);
  ScopedVariable role(test::kWorkerVariable, "serves");
  const auto start = std::chrono::steady_clock::now();
  {
    const Cubins none;
    WorkerProcess worker(test_worker(), none.descriptor());
    Report hello;
    ASSERT_EQ(worker.hear(hello, 20s), Heard::line);
    EXPECT_EQ(hello.kind, Report::hello);
    EXPECT_EQ(hello.protocol, kProtocol);
    EXPECT_EQ(worker.hear(hello, 50ms), Heard::nothing);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

class Trials : public testing::Test {
protected:
  /// Candidates that do what their traits say; the first is the default.
  std::vector<Candidate> run(const std::vector<std::string>& traits, bool exact = true) {
    std::vector<Candidate> candidates;
    for (const std::string& what : traits)
      candidates.push_back(candidate(what, candidates.size()));
    BenchSetup setup;
    setup.spec = resolved(AttentionSpec());
    setup.operation = {candidate("ms=1", 0).kernel};
    setup.exact = exact;
    if (!open_.empty())
      setup.operation.back().cubin = open_;
    run_trials(test_worker(), setup, candidates, limits_);
    return candidates;
  }
  static Candidate candidate(const std::string& traits, size_t number) {
    Candidate c{};
    c.kernel.spec = {KernelKind::forward, Pass::forward, resolved(AttentionSpec()),
                     find_arch("sm_80"), parse_tile("mma 64x64 w4 s1 b2")};
    c.kernel.name = "kernel" + std::to_string(number);
    c.kernel.cubin = traits;
    c.tried.tile = "tile " + std::to_string(number);
    return c;
  }
  static std::vector<std::string> outcomes(const std::vector<Candidate>& candidates) {
    std::vector<std::string> result;
    for (const Candidate& c : candidates)
      result.push_back(c.tried.outcome);
    return result;
  }
  static size_t winner(const std::vector<Candidate>& candidates) {
    std::vector<std::optional<Timing>> timings;
    for (const Candidate& c : candidates)
      timings.push_back(c.tried.outcome == "timed"
                            ? std::optional(Timing{c.tried.median_ms, c.tried.mad_ms})
                            : std::nullopt);
    return winner_of(timings);
  }
  size_t workers() const {
    const std::string log = test::read_text(temp_ / "log");
    return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
  }
  /// The message of a run that cannot be done at all.
  std::string failure(const std::vector<std::string>& traits) {
    try {
      run(traits);
    } catch (const TuneError& error) {
      return error.what();
    }
    ADD_FAILURE() << "it was done";
    return "";
  }

  using Words = std::vector<std::string>;
  test::TempDirectory temp_;
  ScopedVariable role_{test::kWorkerVariable, "serves"};
  ScopedVariable log_{test::kWorkerLog, temp_ / "log"};
  TrialLimits limits_{60000ms, 6000ms, 6000ms, 6000ms, 7};
  std::string open_; ///< what opening does
};

TEST_F(Trials, AllAreTimedInOneWorkerAndTheFastestWins) {
  const auto done = run({"ms=1", "ms=0.9", "ms=0.7", "ms=1.5"});
  EXPECT_EQ(outcomes(done), (Words{"timed", "timed", "timed", "timed"}));
  EXPECT_EQ(winner(done), 2u);
  EXPECT_EQ(workers(), 1u);
  for (const Candidate& c : done) {
    EXPECT_EQ(c.tried.ms.size(), 7u);
    EXPECT_EQ(c.tried.median_ms, median_of(c.tried.ms));
    EXPECT_EQ(c.tried.mad_ms, mad_of(c.tried.ms));
  }
  EXPECT_NEAR(done[2].tried.median_ms, 0.7, 0.001);
}

TEST_F(Trials, NoneIsAlwaysTimedRightAfterTheSameOther) {
  limits_.rounds = 31;
  const auto done = run({"ms=1 slows=2", "ms=0.9", "ms=0.95", "ms=1.2", "ms=1.1"});
  EXPECT_EQ(winner(done), 1u); // in a fixed order it would take 1.8 ms
  for (const Candidate& c : done) {
    const auto slowed = std::count_if(c.tried.ms.begin(), c.tried.ms.end(),
                                      [&](double ms) { return ms > 1.5 * c.tried.median_ms; });
    // By chance it is a fifth of the rounds, or fewer for the one that slows others.
    EXPECT_LT(slowed, 15) << c.tried.tile;
    if (&c != &done.front())
      EXPECT_GT(slowed, 0) << c.tried.tile;
  }
}

TEST_F(Trials, EachLosesOnlyItself) {
  const auto done =
      run({"ms=1", "vet=crash", "ms=0.5 vet=wrong", "ms=0.9", "vet=throw", "vet=garbage",
           "vet=hang", "vet=exit", "ms=0.6 time=crash", "ms=0.6 time=hang", "ms=0.8"});
  EXPECT_EQ(outcomes(done), (Words{"timed", "crashed", "wrong", "timed", "failed", "garbled",
                                   "hung", "crashed", "crashed", "hung", "timed"}));
  EXPECT_EQ(winner(done), 10u);
  EXPECT_NE(done[1].tried.detail.find("signal 11"), std::string::npos) << done[1].tried.detail;
  EXPECT_EQ(done[2].tried.detail, "everything differs");
  EXPECT_NE(done[4].tried.detail.find("ILLEGAL_ADDRESS"), std::string::npos);
  EXPECT_NE(done[7].tried.detail.find("exit code 3; it wrote: "), std::string::npos)
      << done[7].tried.detail;
  EXPECT_NE(done[7].tried.detail.find("so long"), std::string::npos);
  for (const Candidate& c : done)
    EXPECT_EQ(c.tried.ms.size(), c.tried.outcome == "timed" ? 7u : 0u);
}

TEST_F(Trials, ANoisyOneDoesNotWinByLuck) {
  const auto done = run({"ms=1", "ms=0.9 noise=0.2", "ms=0.95"});
  EXPECT_EQ(outcomes(done), (Words{"timed", "timed", "timed"}));
  EXPECT_LT(done[1].tried.median_ms, done[2].tried.median_ms);
  EXPECT_GT(done[1].tried.mad_ms, 0.05);
  EXPECT_EQ(winner(done), 2u);
}

TEST_F(Trials, TwoInARowChooseTheSame) {
  const std::vector<std::string> field = {"ms=1", "ms=0.705 noise=0.004", "ms=0.7 noise=0.004",
                                          "ms=0.71 noise=0.003"};
  EXPECT_EQ(winner(run(field)), winner(run(field)));
  EXPECT_EQ(winner(run(field)), 1u); // not told apart from the fastest, and earlier
}

TEST_F(Trials, ExactnessDecidesAboutAnotherOrderOfSummation) {
  const std::vector<std::string> field = {"ms=1", "ms=0.5 vet=inexact", "ms=0.9"};
  const auto exact = run(field);
  EXPECT_EQ(outcomes(exact), (Words{"timed", "inexact", "timed"}));
  EXPECT_NE(exact[1].tried.detail.find("1e-05"), std::string::npos) << exact[1].tried.detail;
  EXPECT_EQ(winner(exact), 2u);
  EXPECT_EQ(workers(), 1u); // differing by rounding is no sign of spoilt data
  const auto free = run(field, /*exact=*/false);
  EXPECT_EQ(outcomes(free), (Words{"timed", "timed", "timed"}));
  EXPECT_EQ(winner(free), 1u);
}

TEST_F(Trials, WhoSpoilsTheDataDoesNotMakeOthersWrong) {
  const auto done = run({"ms=1", "vet=spoil", "ms=0.5", "ms=0.6"});
  EXPECT_EQ(outcomes(done), (Words{"timed", "timed", "timed", "timed"}));
}

TEST_F(Trials, WhatALibraryPrintsDoesNotMatter) {
  EXPECT_EQ(outcomes(run({"ms=1", "vet=print time=print"})), (Words{"timed", "timed"}));
}

TEST_F(Trials, AFloodOfMessagesIsAHang) {
  EXPECT_EQ(outcomes(run({"ms=1", "vet=flood", "ms=0.8"})), (Words{"timed", "hung", "timed"}));
}

TEST_F(Trials, WhatDroppedOutBeforeTakesNoPart) {
  std::vector<Candidate> candidates = {candidate("ms=1", 0), candidate("ms=0.5", 1)};
  candidates[1].tried.outcome = "not compiled";
  BenchSetup setup;
  setup.operation = {candidates[0].kernel};
  setup.spec = resolved(candidates[0].kernel.spec.attention);
  run_trials(test_worker(), setup, candidates, limits_);
  EXPECT_EQ(outcomes(candidates), (Words{"timed", "not compiled"}));
}

TEST_F(Trials, LongKernelsGetFewerRounds) {
  limits_.timing = 100ms;
  limits_.rounds = 50;
  EXPECT_EQ(run({"ms=1", "ms=0.9"})[0].tried.ms.size(), 43u); // 100 / (1 + 0.9 + 2 flushes)
  EXPECT_EQ(run({"ms=1000", "ms=2000"})[0].tried.ms.size(), 5u);
}

TEST_F(Trials, ADefaultThatDropsOutIsAnError) {
  const std::string what = failure({"vet=crash", "ms=0.5"});
  EXPECT_NE(what.find("default tile, tile 0"), std::string::npos) << what;
  EXPECT_NE(what.find("signal 11"), std::string::npos) << what;
}

TEST_F(Trials, AWorkerThatDiesBeforeItSpeaksIsAnError) {
  ScopedVariable role(test::kWorkerVariable, "dies");
  const std::string what = failure({"ms=1"});
  EXPECT_NE(what.find("does not start: it ended with exit code 7"), std::string::npos) << what;
}

TEST_F(Trials, AMuteWorkerIsAnError) {
  ScopedVariable role(test::kWorkerVariable, "mute");
  limits_.open = 300ms;
  const std::string what = failure({"ms=1"});
  EXPECT_NE(what.find("nothing within 300 ms"), std::string::npos) << what;
}

TEST_F(Trials, AWorkerOfAnotherVersionIsAnError) {
  ScopedVariable role(test::kWorkerVariable, "stranger");
  const std::string what = failure({"ms=1"});
  EXPECT_NE(what.find("protocol 99"), std::string::npos) << what;
}

TEST_F(Trials, WhatDoesNotOpenIsAnErrorWithItsReason) {
  open_ = "open=throw";
  EXPECT_NE(failure({"ms=1"}).find("does not start: CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
            std::string::npos);
  open_ = "open=crash";
  EXPECT_NE(failure({"ms=1"}).find("signal 11"), std::string::npos);
}

TEST_F(Trials, AProgramThatIsNoneOrNotThereIsAnError) {
  std::vector<Candidate> candidates = {candidate("ms=1", 0)};
  BenchSetup setup;
  setup.operation = {candidates[0].kernel};
  try {
    run_trials({"/nowhere/sagebwd", "tune-worker"}, setup, candidates, limits_);
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/sagebwd"), std::string::npos);
  }
  limits_.open = 300ms;
  EXPECT_THROW(run_trials({"/bin/true"}, setup, candidates, limits_), TuneError);
  EXPECT_THROW(run_trials({"/bin/cat"}, setup, candidates, limits_), TuneError);
}

TEST_F(Trials, MachineCodeOfAnySizeArrives) {
  const std::string padding(3 << 20, ' '); // more than a line may hold
  const auto done = run({"ms=1" + padding, "", padding + "ms=0.5"});
  EXPECT_EQ(outcomes(done), (Words{"timed", "timed", "timed"}));
  EXPECT_NEAR(done[1].tried.median_ms, 1, 0.001);
  EXPECT_NEAR(done[2].tried.median_ms, 0.5, 0.001);
}

TEST_F(Trials, AreInterruptedByTheWatchAndLeaveNoProcess) {
  limits_.vet = 60s;
  const auto start = std::chrono::steady_clock::now();
  const ScopedWatch watch([&] {
    if (workers() > 0 && std::chrono::steady_clock::now() - start > 500ms)
      throw std::runtime_error("Ctrl-C");
  });
  try {
    run({"vet=hang"});
    FAIL() << "it was done";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "Ctrl-C");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

TEST_F(Trials, LeaveNoProcessBehind) {
  run({"ms=1", "vet=hang", "vet=crash"});
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

/// Neither running nor about to be: a process that nobody waits for may stay as a zombie.
bool ended(pid_t process) {
  const std::string stat = test::read_text("/proc/" + std::to_string(process) + "/stat");
  return stat.empty() || stat.find(") Z ") != std::string::npos;
}

TEST_F(Trials, AWorkerEndsWithATunerThatIsKilled) {
  limits_.vet = 60s;
  const pid_t tuner = ::fork();
  if (tuner == 0) {
    run({"vet=hang"});
    ::_exit(0);
  }
  pid_t worker = 0;
  for (int i = 0; i < 6000 && worker == 0; ++i) {
    std::this_thread::sleep_for(50ms);
    worker = std::atoi(test::read_text(temp_ / "log").c_str());
  }
  ASSERT_GT(worker, 0);
  std::this_thread::sleep_for(100ms);
  EXPECT_FALSE(ended(worker));
  ::kill(tuner, SIGKILL);
  ::waitpid(tuner, nullptr, 0);
  for (int i = 0; i < 6000 && !ended(worker); ++i)
    std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(ended(worker));
}

} // namespace
