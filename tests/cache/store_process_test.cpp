//===- store_process_test.cpp - The store among processes and users --------===//
//
// Each case runs in child processes, which report by their exit status.
//
//===----------------------------------------------------------------------===//

#include "cache/store.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fcntl.h>

using namespace sagebwd;
using test::finish;
using test::kNotPermitted;
using test::start;
using test::TempDirectory;

namespace {

constexpr uid_t kNobody = 65534;

CacheKey shared_key() { return make_key({{"name", "sample"}}); }

/// All of one letter, so that a mixture of two would show even with a right checksum.
CacheEntry entry_of_letters(char letter, size_t size) {
  CacheEntry entry;
  entry.kernel_name = std::string(1, letter);
  entry.cubin.assign(size, letter);
  return entry;
}

TEST(CacheStoreProcesses, ReadersSeeWholeEntriesWhileWritersReplaceThem) {
  TempDirectory temp;
  auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
  auto running = [&] { return std::chrono::steady_clock::now() < deadline; };
  constexpr size_t kCubinBytes = 60000;

  std::vector<pid_t> children;
  for (char letter : {'a', 'b', 'c'})
    children.push_back(start([&, letter] {
      CacheStore store(temp.path());
      do
        if (!store.publish(shared_key(), entry_of_letters(letter, kCubinBytes)))
          return 1;
      while (running());
      return 0;
    }));
  for (int reader = 0; reader < 3; ++reader)
    children.push_back(start([&] {
      CacheStore store(temp.path());
      auto last_chance = deadline + std::chrono::minutes(5); // for the first hit, on a busy machine
      while (running() || store.counters().hits == 0) {
        if (std::chrono::steady_clock::now() > last_chance)
          return 4;
        std::optional<CacheEntry> entry = store.load(shared_key());
        if (entry && entry->cubin != std::string(kCubinBytes, entry->kernel_name[0]))
          return 1;
        if (!entry && store.counters().hits > 0)
          return 2; // it was there: a rename never leaves a gap
      }
      return store.counters().heals == 0 ? 0 : 3;
    }));
  for (pid_t child : children)
    EXPECT_EQ(finish(child), 0);
  EXPECT_EQ(test::files_in(temp.path()).size(), 1u);
}

TEST(CacheStoreProcesses, AKilledWriterLeavesNoEntry) {
  TempDirectory temp;
  for (int round = 0; round < 20; ++round) {
    pid_t child = start([&] {
      CacheStore store(temp.path());
      for (;;)
        store.publish(shared_key(), entry_of_letters('x', 4 << 20));
      return 0;
    });
    ::usleep(2000 + 1500 * round);
    ::kill(child, SIGKILL);
    finish(child);
    CacheStore store(temp.path());
    store.load(shared_key());
    ASSERT_EQ(store.counters().heals, 0u) << "a partial entry had the entry's name";
  }
}

TEST(CacheStoreProcesses, AReadOnlyDirectoryIsReadAndCostsOneWarning) {
  TempDirectory temp;
  int status = finish(start([&] {
    if (::geteuid() == 0 && // root may write anywhere
        (::chown(temp.path().c_str(), kNobody, kNobody) != 0 || ::setuid(kNobody) != 0))
      return kNotPermitted;
    if (!CacheStore(temp.path()).publish(shared_key(), entry_of_letters('a', 100)))
      return 11;
    ::chmod(temp.path().c_str(), 0500);
    CacheStore store(temp.path());
    if (!store.load(shared_key()))
      return 12;
    CacheKey other = make_key({{"name", "other"}});
    testing::internal::CaptureStderr();
    if (store.publish(other, entry_of_letters('b', 100)) ||
        store.publish(other, entry_of_letters('b', 100)))
      return 13;
    std::string text = testing::internal::GetCapturedStderr();
    if (std::count(text.begin(), text.end(), '\n') != 1 ||
        text.find("Permission denied") == std::string::npos)
      return 14;
    return store.counters().publish_failures == 2 ? 0 : 15;
  }));
  if (status == kNotPermitted)
    GTEST_SKIP() << "root cannot become another user here";
  EXPECT_EQ(status, 0);
}

TEST(CacheStoreProcesses, AHomeThatCannotBeWrittenCostsOneWarning) {
  TempDirectory temp;
  ASSERT_EQ(::chmod(temp.path().c_str(), 0755), 0);
  int status = finish(start([&] {
    if (::geteuid() == 0 ? ::setuid(kNobody) != 0 : ::chmod(temp.path().c_str(), 0500) != 0)
      return kNotPermitted;
    CacheStore store(temp / ".cache/sagebwd");
    if (store.disabled_reason() != temp / ".cache/sagebwd cannot be created: Permission denied")
      return 11;
    testing::internal::CaptureStderr();
    if (store.load(shared_key()) || store.publish(shared_key(), entry_of_letters('a', 100)))
      return 12;
    std::string text = testing::internal::GetCapturedStderr();
    return text.find("cannot be created") != std::string::npos ? 0 : 13;
  }));
  if (status == kNotPermitted)
    GTEST_SKIP() << "root cannot become another user here";
  EXPECT_EQ(status, 0);
}

} // namespace
