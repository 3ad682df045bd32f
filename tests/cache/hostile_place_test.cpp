//===- hostile_place_test.cpp - Full, read-only and shared directories -----===//
//
// And clocks that jump. What cannot be set up without being root is done in a user namespace; where
// there are none, it is skipped by name.
//
//===----------------------------------------------------------------------===//

#include "cache/eviction.h"
#include "cache/store.h"
#include "tests/cache/mutations.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fcntl.h>
#include <random>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>

using namespace sagebwd;
using test::finish;
using test::ScopedVariable;
using test::start;
using test::TempDirectory;
using namespace std::chrono_literals;

namespace {

CacheKey key_number(int number) { return make_key({{"number", std::to_string(number)}}); }

CacheEntry entry_of(size_t cubin_bytes) {
  CacheEntry entry;
  entry.kernel_name = "k";
  entry.cubin.assign(cubin_bytes, 'c');
  return entry;
}

std::string file_of(const std::string& directory, int number) {
  return directory + "/" + key_number(number).digest + ".kernel";
}

uint64_t bytes_in(const std::string& directory) {
  uint64_t bytes = 0;
  for (const KeptFile& file : kept_files(directory))
    bytes += file.bytes;
  return bytes;
}

StoreOptions options_in(const std::string& directory, uint64_t byte_limit = 0) {
  StoreOptions options;
  options.directory = directory;
  options.byte_limit = byte_limit;
  return options;
}

//===--- File systems of our own ------------------------------------------===//

constexpr int kNotPermitted = 77; ///< an exit status: the case cannot be set up here

/// From now on this process may mount, and nobody else sees it.
bool unshare_mounts() {
  if (::geteuid() == 0 ? ::unshare(CLONE_NEWNS) == 0 : [] {
        const std::string user = std::to_string(::geteuid()), group = std::to_string(::getegid());
        if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
          return false;
        test::write_text("/proc/self/setgroups", "deny");
        test::write_text("/proc/self/uid_map", "0 " + user + " 1");
        test::write_text("/proc/self/gid_map", "0 " + group + " 1");
        return ::geteuid() == 0;
      }())
    return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  return false;
}

/// Runs a case with a file system of its own, mounted with these options; the case gives an exit
/// status.
int on_own_file_system(const std::string& options,
                       const std::function<int(const std::string& directory)>& work) {
  TempDirectory temp;
  return finish(start([&] {
    if (!unshare_mounts() ||
        ::mount("tmpfs", temp.path().c_str(), "tmpfs", 0, ("mode=700," + options).c_str()) != 0)
      return kNotPermitted;
    return work(temp.path());
  }));
}

#define EXPECT_CASE_PASSES(status)                                                                 \
  if (const int status_ = (status); status_ == kNotPermitted)                                      \
    GTEST_SKIP() << "mounting a file system is not permitted here";                                \
  else                                                                                             \
    EXPECT_EQ(status_, 0)

/// What it prints to stderr meanwhile must be one line that holds `part`.
template <typename Work> bool warns_once(const std::string& part, Work work) {
  testing::internal::CaptureStderr();
  work();
  const std::string text = testing::internal::GetCapturedStderr();
  return std::count(text.begin(), text.end(), '\n') == 1 && text.find(part) != std::string::npos;
}

TEST(HostilePlace, AFullDiskCostsOneWarningAndLeavesNothing) {
  EXPECT_CASE_PASSES(on_own_file_system("size=64k", [](const std::string& directory) {
    CacheStore store(options_in(directory));
    if (!store.publish(key_number(1), entry_of(20000)))
      return 11;
    bool published = false;
    if (!warns_once("No space left on device", [&] {
          for (int i = 0; i < 2; ++i)
            published |= store.publish(key_number(2), entry_of(200000));
        }))
      return 12;
    if (published || store.load(key_number(2)) || !store.load(key_number(1)))
      return 13;
    return test::files_in(directory).size() == 1 ? 0 : 14;
  }));
}

TEST(HostilePlace, WithoutRoomForALockFileTheWorkGoesOn) {
  EXPECT_CASE_PASSES(on_own_file_system("nr_inodes=1", [](const std::string& directory) {
    CacheStore store(options_in(directory));
    const auto begin = std::chrono::steady_clock::now();
    const KeyLock lock = store.lock(key_number(1));
    if (lock.held() || lock.timed_out() || std::chrono::steady_clock::now() - begin > 5s)
      return 11;
    bool published = false;
    if (!warns_once("No space left on device",
                    [&] { published = store.publish(key_number(1), entry_of(10)); }))
      return 12;
    return published ? 13 : 0;
  }));
}

TEST(HostilePlace, AReadOnlyFileSystemIsReadAndNothingIsSaidToBeEvicted) {
  EXPECT_CASE_PASSES(on_own_file_system("size=1m", [](const std::string& directory) {
    if (!CacheStore(options_in(directory)).publish(key_number(1), entry_of(1000)))
      return 11;
    test::write_text(directory + "/" + key_number(2).digest + ".kernel", "no entry");
    if (::mount(nullptr, directory.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0)
      return kNotPermitted;
    CacheStore store(options_in(directory));
    if (!store.load(key_number(1)) || store.load(key_number(2)))
      return 12;
    if (!warns_once("Read-only file system", [&] {
          store.publish(key_number(3), entry_of(10));
          store.publish(key_number(3), entry_of(10));
        }))
      return 13;
    const PruneResult result = prune(directory, 0);
    return result.evicted == 0 && result.kept == 2 ? 0 : 14;
  }));
}

TEST(HostilePlace, WithoutFreeDescriptorsNothingIsTakenForBad) {
  TempDirectory temp;
  EXPECT_EQ(finish(start([&] {
              CacheStore store(options_in(temp.path()));
              store.publish(key_number(1), entry_of(1000));
              rlimit descriptors = {};
              ::getrlimit(RLIMIT_NOFILE, &descriptors);
              const int next = ::dup(0);
              ::close(next);
              for (int left : {0, 1}) { // not even the directory opens; only the directory does
                const rlimit few = {static_cast<rlim_t>(next + left), descriptors.rlim_max};
                ::setrlimit(RLIMIT_NOFILE, &few);
                if (store.load(key_number(1)) || store.counters().heals != 0)
                  return 11;
                prune(temp.path(), std::nullopt);
              }
              ::setrlimit(RLIMIT_NOFILE, &descriptors);
              return store.load(key_number(1)) ? 0 : 12;
            })),
            0);
}

//===--- Clocks -----------------------------------------------------------===//

/// Seconds from now on; `use` is ours, `access` the file system's.
void set_stamps(const std::string& file, int64_t use, int64_t access = 0) {
  const time_t now = ::time(nullptr);
  const timespec times[2] = {{now + access, 0}, {now + use, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
}

/// The numbers of the keys in the order in which they would be evicted.
std::vector<int> order_in(const std::string& directory) {
  std::vector<int> numbers;
  for (const KeptFile& file : kept_files(directory))
    for (int number = 0; number < 10; ++number)
      if (key_number(number).digest == file.digest)
        numbers.push_back(number);
  return numbers;
}

/// Published by processes that are gone, as nobody evicts what he uses himself.
void publish_elsewhere(const std::string& directory, const std::vector<int>& numbers,
                       size_t cubin_bytes = 1000) {
  ASSERT_EQ(finish(start([&] {
              CacheStore store(options_in(directory));
              for (int number : numbers)
                if (!store.publish(key_number(number), entry_of(cubin_bytes)))
                  return 1;
              return 0;
            })),
            0);
}

constexpr int64_t kHour = 3600, kYear = 365 * 24 * kHour;

TEST(HostilePlace, EvictionGoesByOurStampAndNotByTheAccessTime) {
  TempDirectory temp;
  publish_elsewhere(temp.path(), {1, 2, 3, 4});
  for (int number = 1; number <= 4; ++number) // the access times say the opposite
    set_stamps(file_of(temp.path(), number), -kHour * (10 - number), -kHour * number);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{1, 2, 3, 4}));

  // A hit stamps: 1 is now the last to go.
  ASSERT_EQ(finish(start(
                [&] { return CacheStore(options_in(temp.path())).load(key_number(1)) ? 0 : 1; })),
            0);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{2, 3, 4, 1}));
  const uint64_t one = bytes_in(temp.path()) / 4;
  EXPECT_EQ(prune(temp.path(), 2 * one).evicted, 2u);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{4, 1}));
  EXPECT_EQ(prune(temp.path(), std::nullopt, 2h).evicted, 1u);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{1}));
}

TEST(HostilePlace, StampsOfAClockThatJumpedCountAsNow) {
  TempDirectory temp;
  publish_elsewhere(temp.path(), {1, 2, 3, 4, 5});
  set_stamps(file_of(temp.path(), 1), 10 * kYear);
  set_stamps(file_of(temp.path(), 2), 400 * kYear); // beyond 64 bits of nanoseconds
  set_stamps(file_of(temp.path(), 3), -::time(nullptr) + 1);
  set_stamps(file_of(temp.path(), 4), -kHour);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{3, 4, 5, 1, 2}));
  for (const KeptFile& file : kept_files(temp.path()))
    EXPECT_LE(file.last_use, std::chrono::system_clock::now());

  // They do not outlive for ten years what is used from now on.
  std::this_thread::sleep_for(20ms);
  publish_elsewhere(temp.path(), {5});
  EXPECT_EQ(order_in(temp.path()).back(), 5);
  EXPECT_EQ(prune(temp.path(), std::nullopt, std::chrono::seconds::max()).evicted, 0u);
  EXPECT_EQ(prune(temp.path(), std::nullopt, 30min).evicted, 2u);
  CacheStore store(options_in(temp.path()));
  for (int number : {1, 2, 5})
    EXPECT_TRUE(store.load(key_number(number)));
}

//===--- Neighbours -------------------------------------------------------===//

TEST(HostilePlace, WhatALivingProcessUsesIsNotEvicted) {
  TempDirectory temp;
  publish_elsewhere(temp.path(), {1, 2});
  const pid_t user = start([&] {
    CacheStore store(options_in(temp.path()));
    const bool loaded = store.load(key_number(1)).has_value();
    ::raise(SIGSTOP);
    return loaded ? 0 : 1;
  });
  ASSERT_TRUE(test::wait_until_stopped(user));
  EXPECT_EQ(prune(temp.path(), 0).evicted, 1u);
  EXPECT_EQ(prune(temp.path(), std::nullopt, 0s).evicted, 0u);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{1}));
  ::kill(user, SIGCONT);
  ASSERT_EQ(finish(user), 0);
  EXPECT_EQ(prune(temp.path(), 0).evicted, 1u) << "its user is gone";
}

TEST(HostilePlace, AskingWhoUsesAKeyDoesNotDisturbWhoBeginsTo) {
  TempDirectory temp;
  CacheStore(options_in(temp.path())).publish(key_number(9), entry_of(10)); // makes the directory
  std::atomic<bool> done{false};
  std::thread pruner([&] {
    while (!done)
      UseMarks::used(temp.path(), key_number(1).digest);
  });
  for (int round = 0; round < 5000; ++round) {
    UseMarks marks;
    marks.mark(temp.path(), key_number(1).digest);
    if (!UseMarks::used(temp.path(), key_number(1).digest)) {
      ADD_FAILURE() << "the mark got lost in round " << round;
      break;
    }
  }
  done = true;
  pruner.join();
}

TEST(HostilePlace, TwoVersionsShareADirectory) {
  TempDirectory temp;
  auto key_of_schema = [](const char* schema) {
    return make_key({{"schema", schema}, {"source", "the same"}});
  };
  CacheStore old_store(options_in(temp.path())), new_store(options_in(temp.path()));
  CacheEntry old_entry = entry_of(100), new_entry = entry_of(200);
  ASSERT_TRUE(old_store.publish(key_of_schema("sagebwd kernel 2"), old_entry));
  ASSERT_TRUE(new_store.publish(key_of_schema("sagebwd kernel 3"), new_entry));
  EXPECT_EQ(old_store.load(key_of_schema("sagebwd kernel 2"))->cubin, old_entry.cubin);
  EXPECT_EQ(new_store.load(key_of_schema("sagebwd kernel 3"))->cubin, new_entry.cubin);
  EXPECT_EQ(old_store.counters().heals + new_store.counters().heals, 0u);
  EXPECT_EQ(kept_files(temp.path()).size(), 2u);
}

TEST(HostilePlace, AnotherFormatUnderAnEntrysNameIsAMiss) {
  TempDirectory temp;
  CacheStore store(options_in(temp.path()));
  for (char version : {'\0', '\1', '\3', '\xff'}) {
    std::string bytes = serialize(key_number(1), entry_of(100));
    bytes[8] = version;
    test::write_text(file_of(temp.path(), 1), test::resealed_entry(bytes));
    EXPECT_FALSE(store.load(key_number(1)));
    ASSERT_TRUE(store.publish(key_number(1), entry_of(100)));
    EXPECT_TRUE(store.load(key_number(1)));
  }
}

TEST(HostilePlace, ARecordOfANewerVersionIsNeitherReadNorRemoved) {
  TempDirectory temp;
  CacheStore store(options_in(temp.path()));
  const TuningRecord record = test::some_record(1);
  ASSERT_TRUE(store.publish_record(record));
  const std::string file = temp / (record.key.digest + ".tuning");
  std::string text = test::read_text(file);
  const std::string schema = "\"schema\": \"sagebwd tuning 1\",\n  \"tile\"";
  ASSERT_NE(text.find(schema), std::string::npos) << text;
  text.replace(text.find(schema), schema.size(), "\"schema\": \"sagebwd tuning 2\",\n  \"tile\"");
  test::write_text(file, text);
  EXPECT_FALSE(store.load_record(record.key));
  EXPECT_EQ(test::read_text(file), text);
  EXPECT_EQ(store.counters().heals, 0u);

  test::write_text(file, "{}");
  EXPECT_FALSE(store.load_record(record.key));
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_EQ(store.counters().heals, 1u);
}

TEST(HostilePlace, TheByteLimitHoldsUnderManyPublishers) {
  constexpr uint64_t kLimit = 400000;
  constexpr size_t kCubin = 10000;
  constexpr int kAlive = 8, kChildren = 48, kEach = 6;
  // Of a living publisher nothing is evicted: neither what it keeps nor what it is writing.
  constexpr uint64_t kMost = kLimit + kAlive * (kEach + 1) * (kCubin + 1000);
  TempDirectory temp;
  // One that looks the directory over now and then publishes on, as if nobody else did.
  CacheStore own(options_in(temp.path(), kLimit));
  uint64_t most = 0, evictions = 0;
  int number = 0;
  std::vector<pid_t> living;
  for (int child = 0; child < kChildren; ++child) {
    living.push_back(start([&, first = number] {
      CacheStore store(options_in(temp.path(), kLimit));
      for (int i = 0; i < kEach; ++i)
        if (!store.publish(key_number(first + i), entry_of(kCubin)))
          return 1;
      return 0;
    }));
    number += kEach;
    if (living.size() == kAlive) {
      EXPECT_EQ(finish(living.front()), 0);
      living.erase(living.begin());
    }
    if (child % 8 == 0)
      own.publish(key_number(1000000 + child), entry_of(kCubin));
    most = std::max(most, bytes_in(temp.path()));
  }
  for (pid_t child : living)
    EXPECT_EQ(finish(child), 0);
  EXPECT_LE(most, kMost);
  EXPECT_GT(most, kLimit / 2) << "the limit was never near";

  const pid_t last = start([&] {
    CacheStore store(options_in(temp.path(), kLimit));
    store.publish(key_number(2000000), entry_of(kCubin));
    return store.counters().evictions > 0 || bytes_in(temp.path()) <= kLimit ? 0 : 1;
  });
  EXPECT_EQ(finish(last), 0);
  EXPECT_LE(bytes_in(temp.path()), kLimit);
  evictions = own.counters().evictions;
  std::printf("at most %llu bytes with %d publishers at a time, limit %llu; %llu evicted here\n",
              static_cast<unsigned long long>(most), kAlive,
              static_cast<unsigned long long>(kLimit), static_cast<unsigned long long>(evictions));
}

TEST(HostilePlace, APublisherNoticesWhatOthersPublishedSince) {
  constexpr uint64_t kLimit = 400000;
  constexpr size_t kCubin = 10000;
  TempDirectory temp;
  CacheStore store(options_in(temp.path(), kLimit));
  ASSERT_TRUE(store.publish(key_number(100), entry_of(kCubin)));
  publish_elsewhere(temp.path(), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, (kLimit - 2 * kCubin) / 10);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(store.publish(key_number(101 + i), entry_of(kCubin)));
    EXPECT_LE(bytes_in(temp.path()), kLimit);
  }
  EXPECT_GT(store.counters().evictions, 0u);
}

TEST(HostilePlace, TheLimitComesFromTheEnvironment) {
  auto limit = [](const char* text) {
    ScopedVariable variable("SAGEBWD_CACHE_LIMIT", text);
    return StoreOptions::from_environment().byte_limit;
  };
  EXPECT_EQ(limit(""), uint64_t{1} << 30);
  EXPECT_EQ(limit("0"), 0u);
  EXPECT_EQ(limit("512M"), uint64_t{512} << 20);
  EXPECT_EQ(limit("3G"), uint64_t{3} << 30);
  EXPECT_EQ(limit("7K"), 7u << 10);
  EXPECT_EQ(limit("123"), 123u);
  for (const char* bad : {"1T", "M", "-1", "1 G", "1g", "18446744073709551616", "17179869184G"})
    EXPECT_THROW(limit(bad), std::invalid_argument) << bad;
}

} // namespace
