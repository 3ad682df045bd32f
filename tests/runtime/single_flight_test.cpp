//===- single_flight_test.cpp - One compile among processes ----------------===//
//
// With a stand-in compiler, and once with NVRTC, which needs no GPU.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "generator/operation.h"
#include "runtime/parallel_for.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/stand_in.h"

#include "llvm/ADT/StringRef.h"
#include "llvm/Support/Regex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <random>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>

using namespace sagebwd;
using test::CompileLog;
using test::finish;
using test::kNotPermitted;
using test::spec_number;
using test::start;
using test::TempDirectory;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

constexpr int kProcesses = 64;
constexpr milliseconds kLong{120000};
/// Less than the limits that must not be waited for, and more than a busy machine takes for
/// anything else.
constexpr milliseconds kMoment{60000};

StoreOptions options_for(const std::string& directory, milliseconds lock_limit) {
  StoreOptions options;
  options.directory = directory;
  options.lock_limit = lock_limit;
  return options;
}

/// Tells what one process did to get the kernel.
struct Outcome {
  bool right = false;
  uint64_t compiles = 0, waits = 0, timeouts = 0;
  milliseconds spent{0};
};

Outcome build_in(
    const std::string& directory, milliseconds lock_limit, const CompileLog& log,
    const std::function<void()>& during_compile = [] {},
    const std::function<void()>& while_waiting = nullptr) {
  const Clock::time_point begin = Clock::now();
  StoreOptions options = options_for(directory, lock_limit);
  options.check_interrupt = while_waiting;
  CacheStore store(options);
  KernelBuilder builder(store, test::emit_stand_in,
                        [&](const KernelSource& source, const KernelSpec& spec) {
                          log.add();
                          during_compile();
                          return test::compile_stand_in(source, spec);
                        });
  const KernelSpec spec = spec_number(1);
  Outcome outcome;
  outcome.right = builder.build(spec)->entry.cubin == test::cubin_of(spec);
  outcome.compiles = store.counters().compiles;
  outcome.waits = store.counters().waits;
  outcome.timeouts = store.counters().timeouts;
  outcome.spent = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
  return outcome;
}

/// A child is in the middle of a compile, stopped, with the key's lock in its hands.
class StuckHolder : public testing::Test {
protected:
  void SetUp() override { ASSERT_TRUE(test::wait_until_stopped(holder)); }
  void kill_holder() {
    ::kill(holder, SIGKILL);
    EXPECT_EQ(finish(holder), -1);
  }

  TempDirectory temp;
  CompileLog log{temp / "compiles"};
  const pid_t holder = start([this] {
    return build_in(temp / "cache", kLong, log, [] { ::raise(SIGSTOP); }).right ? 0 : 1;
  });
};

TEST(SingleFlight, SixtyFourColdProcessesCompileOnce) {
  std::minstd_rand random(1);
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    TempDirectory temp;
    CompileLog log(temp / "compiles");
    test::Gate gate;
    // At the same moment in even rounds; else some come while the compile runs, some after it.
    const int jitter_us = round % 2 ? 60000 : 1;
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i)
      children.push_back(start([&, delay = static_cast<int>(random()) % jitter_us] {
        gate.wait();
        ::usleep(static_cast<useconds_t>(delay));
        const Outcome outcome = build_in(temp / "cache", kLong, log, [] { ::usleep(30000); });
        return outcome.right && outcome.timeouts == 0 ? 0 : 1;
      }));
    gate.open();
    for (pid_t child : children)
      EXPECT_EQ(finish(child), 0);
    EXPECT_EQ(log.count(), 1);
    EXPECT_EQ(test::files_in(temp / "cache").size(), 1u);
  }
}

/// Every process finds an entry that it does not accept, as under SAGEBWD_RECOMPILE=1.
TEST(SingleFlight, AnUnacceptedEntryIsReplacedOnce) {
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  ASSERT_TRUE(build_in(temp / "cache", kLong, log).right);
  test::Gate gate;
  std::vector<pid_t> children;
  for (int i = 0; i < 16; ++i)
    children.push_back(start([&] {
      CacheStore store(options_for(temp / "cache", kLong));
      KernelBuilder builder(
          store, test::emit_stand_in,
          [&](const KernelSource& source, const KernelSpec& spec) {
            log.add();
            ::usleep(30000);
            KernelBuilder::Compiled compiled = test::compile_stand_in(source, spec);
            compiled.entry.compiler = "a newer stand-in";
            return compiled;
          },
          {false, [](const CacheEntry& entry) { return entry.compiler == "a newer stand-in"; }});
      gate.wait();
      return builder.build(spec_number(1))->entry.compiler == "a newer stand-in" ? 0 : 1;
    }));
  gate.open();
  for (pid_t child : children)
    EXPECT_EQ(finish(child), 0);
  EXPECT_EQ(log.count(), 2) << "one of each compiler";
}

TEST_F(StuckHolder, AStoppedHolderIsWaitedForUpToTheLimit) {
  constexpr milliseconds kLimit{300};
  std::vector<pid_t> waiters;
  for (int i = 0; i < 8; ++i)
    waiters.push_back(start([&] {
      const Outcome outcome = build_in(temp / "cache", kLimit, log);
      if (!outcome.right || outcome.compiles > outcome.waits)
        return 1;
      // Nobody compiles without having waited to the limit. One whose limit came a moment later
      // finds, after it, what the first has published.
      if (outcome.compiles > outcome.timeouts)
        return 2;
      if (outcome.timeouts && outcome.spent < kLimit)
        return 3;
      return outcome.spent < kMoment ? 0 : 4;
    }));
  for (pid_t waiter : waiters)
    EXPECT_EQ(finish(waiter), 0);
  EXPECT_GE(log.count(), 2) << "somebody must have compiled beside the holder";
  ::kill(holder, SIGCONT);
  EXPECT_EQ(finish(holder), 0) << "the holder goes on with what it has";
}

TEST_F(StuckHolder, ALoneWaiterTimesOutAndCounts) {
  const Outcome outcome = build_in(temp / "cache", milliseconds(200), log);
  EXPECT_TRUE(outcome.right);
  EXPECT_EQ(outcome.waits, 1u);
  EXPECT_EQ(outcome.timeouts, 1u);
  EXPECT_EQ(outcome.compiles, 1u);
  EXPECT_GE(outcome.spent, milliseconds(200));
  kill_holder();
}

TEST_F(StuckHolder, AWaitOfTwoSecondsSaysForWhomAndHowLong) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(build_in(temp / "cache", milliseconds(1900), log).timeouts, 1u);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  std::filesystem::remove(test::files_in(temp / "cache").at(0));
  testing::internal::CaptureStderr();
  EXPECT_EQ(build_in(temp / "cache", milliseconds(4400), log).timeouts, 1u);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(llvm::Regex("^sagebwd: waiting for process " + std::to_string(holder) +
                          " \\([^\n]+\\), which is compiling k1 for sm_90a; after another [0-2] s "
                          "it is compiled here as well\n$")
                  .match(said))
      << said;
  kill_holder();
}

TEST_F(StuckHolder, AnInterruptEndsTheWaitForAnotherProcess) {
  StoreOptions options = options_for(temp / "cache", kLong);
  options.check_interrupt = check_interrupt; // as Settings::store_options() has it
  CacheStore store(options);
  KernelBuilder builder(store, test::emit_stand_in, test::compile_stand_in);
  const Clock::time_point begin = Clock::now();
  const ScopedWatch watch([&] {
    if (Clock::now() - begin > milliseconds(200))
      throw std::invalid_argument("Ctrl-C");
  });
  EXPECT_THROW(builder.build(spec_number(1)), std::invalid_argument);
  EXPECT_LT(Clock::now() - begin, kMoment);
  // On threads of the library's own, of which none has a watch.
  EXPECT_THROW(builder.build_all({spec_number(1), spec_number(2)}), std::invalid_argument);
  EXPECT_LT(Clock::now() - begin, kMoment);
  EXPECT_EQ(store.counters().timeouts, 0u);
  kill_holder();
}

TEST_F(StuckHolder, WhenTheHolderIsKilledTheNextGoesOnAtOnce) {
  const pid_t waiter = start([&] {
    const Outcome outcome = build_in(
        temp / "cache", kLong, log, [] {}, [&] { test::write_text(temp / "waits", "1"); });
    const bool as_told = outcome.waits == 1 && outcome.timeouts == 0 && outcome.compiles == 1;
    return outcome.right && as_told && outcome.spent < kMoment ? 0 : 1;
  });
  while (test::read_text(temp / "waits").empty())
    std::this_thread::sleep_for(milliseconds(1));
  kill_holder();
  EXPECT_EQ(finish(waiter), 0);
  EXPECT_EQ(log.count(), 2);
}

/// A data loader, say, that is forked while a thread compiles.
TEST(SingleFlight, AForkedChildDoesNotKeepTheLock) {
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  pid_t forked = -1;
  const Outcome first =
      build_in(temp / "cache", kLong, log, [&] { forked = start([] { return ::pause(); }); });
  EXPECT_TRUE(first.right);
  std::filesystem::remove(test::files_in(temp / "cache").at(0));
  const Outcome second = build_in(temp / "cache", kLong, log);
  EXPECT_EQ(second.waits, 0u) << "the child holds the lock of a compile that is over";
  ::kill(forked, SIGKILL);
  finish(forked);
}

TEST(SingleFlight, WhatIsInTheLockFilesPlaceHindersNobody) {
  for (const char* what : {"directory", "link", "fifo", "forbidden"}) {
    SCOPED_TRACE(what);
    TempDirectory temp;
    CompileLog log(temp / "compiles");
    std::filesystem::create_directory(temp / "cache");
    std::filesystem::permissions(temp / "cache", std::filesystem::perms::owner_all);
    const std::string locks = temp / "cache/locks";
    if (what == std::string("directory"))
      std::filesystem::create_directory(locks);
    else if (what == std::string("link"))
      std::filesystem::create_symlink(temp / "elsewhere", locks);
    else if (what == std::string("fifo"))
      ASSERT_EQ(::mkfifo(locks.c_str(), 0600), 0);
    else
      ::close(::open(locks.c_str(), O_CREAT | O_WRONLY, 0));
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i)
      children.push_back(start([&] {
        const Outcome outcome = build_in(temp / "cache", kLong, log);
        return outcome.right && outcome.timeouts == 0 ? 0 : 1;
      }));
    for (pid_t child : children)
      EXPECT_EQ(finish(child), 0);
    EXPECT_GE(log.count(), 1);
    EXPECT_FALSE(std::filesystem::exists(temp / "elsewhere")) << "a link was followed";
    EXPECT_EQ(build_in(temp / "cache", kLong, log).compiles, 0u) << "nothing was published";
  }
}

/// From now on fcntl() refuses locks as file systems without them do. False where the system does
/// not let us.
bool take_locks_away() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])), // little endian
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_GETLK, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOLCK),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter = {sizeof(program) / sizeof(*program), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

TEST(SingleFlight, WithoutLocksEveryoneCompilesAndNothingBreaks) {
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  test::Gate gate;
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i)
    children.push_back(start([&] {
      if (!take_locks_away())
        return kNotPermitted;
      gate.wait();
      const Outcome outcome = build_in(temp / "cache", kLong, log, [] { ::usleep(100000); });
      return outcome.right && outcome.waits == 0 ? 0 : 1;
    }));
  gate.open();
  int refused = 0;
  for (pid_t child : children) {
    const int status = finish(child);
    refused += status == kNotPermitted;
    if (status != kNotPermitted)
      EXPECT_EQ(status, 0);
  }
  if (refused)
    GTEST_SKIP() << "system calls cannot be filtered here";
  EXPECT_GT(log.count(), 1) << "locks were not taken away";
  EXPECT_EQ(test::files_in(temp / "cache").size(), 1u);
}

//===--- With NVRTC -------------------------------------------------------===//

constexpr const char* kNvrtcTest = "SingleFlight.SixtyFourProcessesCompileOneRealKernelOnce";
constexpr const char* kReportVariable = "SAGEBWD_TEST_REPORT";

/// A new process, which this executable is again: "compiles waits" of one kernel into a file.
void build_real_kernel(const std::string& report) {
  const AttentionSpec spec = resolved(AttentionSpec());
  const KernelSpec kernel =
      Operation(resolved(spec), find_arch("sm_80")).kernels(Pass::forward).back();
  EXPECT_GT(build(kernel)->entry.cubin.size(), 1000u);
  const CacheCounters& counters = user_store().counters();
  test::write_text(report, std::to_string(counters.compiles) + " " +
                               std::to_string(counters.waits) + " " +
                               std::to_string(counters.timeouts));
}

TEST(SingleFlight, SixtyFourProcessesCompileOneRealKernelOnce) {
  if (const char* report = std::getenv(kReportVariable))
    return build_real_kernel(report);
  TempDirectory temp;
  test::ScopedVariable directory("SAGEBWD_CACHE_DIR", temp / "cache");
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  test::Gate gate;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i)
    children.push_back(start([&] {
      ::setenv(kReportVariable, (temp / std::to_string(i)).c_str(), 1);
      const int output = ::open((temp / "output").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      ::dup2(output, STDOUT_FILENO);
      ::dup2(output, STDERR_FILENO);
      gate.wait();
      ::execl(self.c_str(), self.c_str(), (std::string("--gtest_filter=") + kNvrtcTest).c_str(),
              nullptr);
      return 127;
    }));
  gate.open();
  for (pid_t child : children)
    ASSERT_EQ(finish(child), 0) << test::read_text(temp / "output");
  int compiles = 0, waits = 0, timeouts = 0;
  for (int i = 0; i < kProcesses; ++i) {
    int c = -1, w = 0, t = 0;
    std::istringstream(test::read_text(temp / std::to_string(i))) >> c >> w >> t;
    ASSERT_GE(c, 0) << test::read_text(temp / "output");
    compiles += c, waits += w, timeouts += t;
  }
  EXPECT_EQ(compiles, 1);
  EXPECT_EQ(timeouts, 0);
  std::printf("%d processes: %d compile, %d waited\n", kProcesses, compiles, waits);
}

} // namespace
