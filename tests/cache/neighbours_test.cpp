//===- neighbours_test.cpp - A directory shared with others ----------------===//
//
// Other processes, other versions of the library, and a byte limit for all of them.
//
//===----------------------------------------------------------------------===//

#include "cache/eviction.h"
#include "cache/store.h"
#include "tests/cache/mutations.h"
#include "tests/cache/numbered_entries.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <random>
#include <sys/stat.h>
#include <thread>

using namespace sagebwd;
using namespace sagebwd::test;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

TEST(Neighbours, WhatALivingProcessUsesIsNotEvicted) {
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

TEST(Neighbours, ADryRunSaysWhatARunDoes) {
  TempDirectory temp;
  publish_elsewhere(temp.path(), {1, 2, 3, 4, 5});
  test::write_text(temp / ".tmp-1-a", "half");
  CacheStore user(options_in(temp.path()));
  ASSERT_TRUE(user.load(key_number(2)));
  for (int number : {1, 2, 3}) { // to the second: what is just as old stays
    const auto age = number == 3 ? 3600s : 7200s;
    fs::last_write_time(file_of(temp.path(), number), fs::file_time_type::clock::now() - age);
  }
  const auto facts = [](const PruneResult& r) {
    return std::vector<uint64_t>{r.kept,   r.kept_bytes, r.evicted, r.evicted_bytes,
                                 r.in_use, r.stuck,      r.swept};
  };
  const uint64_t one = bytes_in(temp.path()) / 5;
  const auto dry = facts(prune(temp.path(), 4 * one, 3600s, /*dry_run=*/true));
  EXPECT_EQ(dry, (std::vector<uint64_t>{4, 4 * one, 1, one, 1, 0, 1}));
  EXPECT_EQ(order_in(temp.path()).size(), 5u);
  EXPECT_TRUE(fs::exists(temp / ".tmp-1-a"));
  EXPECT_EQ(facts(prune(temp.path(), 4 * one, 3600s)), dry);
  EXPECT_EQ(order_in(temp.path()), (std::vector<int>{2, 3, 4, 5}));
}

TEST(Neighbours, AskingWhoUsesAKeyDoesNotDisturbWhoBeginsTo) {
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

TEST(Neighbours, TwoVersionsShareADirectory) {
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

TEST(Neighbours, AnotherFormatUnderAnEntrysNameIsAMiss) {
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

class APublishedRecord : public testing::Test {
protected:
  void SetUp() override { ASSERT_TRUE(store.publish_record(record)); }

  TempDirectory temp;
  CacheStore store{options_in(temp.path())};
  const TuningRecord record = test::some_record(1);
  const std::string file = temp / (record.key.digest + ".tuning");
};

TEST_F(APublishedRecord, OfANewerVersionIsNeitherReadNorRemoved) {
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
  EXPECT_EQ(test::read_text(file), "{}") << "a record is lost by reading it";
  EXPECT_EQ(store.counters().heals, 0u);
  EXPECT_TRUE(store.publish_record(record));
  EXPECT_TRUE(store.load_record(record.key));
}

TEST_F(APublishedRecord, ThatOthersMayWriteStaysAndIsReported) {
  ASSERT_EQ(::chmod(file.c_str(), 0660), 0);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i)
    EXPECT_FALSE(store.load_record(record.key));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find("run: chmod go-w '" + file + "'"), std::string::npos) << text;
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  EXPECT_TRUE(store.load_record(record.key));
}

TEST(Neighbours, OfflineNothingIsRemovedAndTheReasonIsKnown) {
  TempDirectory temp;
  StoreOptions offline;
  offline.directory = temp.path();
  offline.heal = false;
  CacheStore store(offline);
  ASSERT_TRUE(store.publish(key_number(1), entry_of(10)));
  const std::string file = file_of(temp.path(), 1);
  ASSERT_EQ(::chmod(file.c_str(), 0660), 0);
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_EQ(store.counters().heals, 0u);
  EXPECT_NE(store.objection(key_number(1)).find("run: chmod go-w '" + file), std::string::npos);

  ASSERT_EQ(::chmod(temp.path().c_str(), 0770), 0);
  EXPECT_NE(CacheStore(offline).disabled_reason().find("run: chmod -R go-w"), std::string::npos);
  ASSERT_EQ(::chmod(temp.path().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  EXPECT_TRUE(store.load(key_number(1)));
  EXPECT_EQ(store.objection(key_number(1)), "");
}

TEST(Neighbours, TheByteLimitHoldsUnderManyPublishers) {
  constexpr uint64_t kLimit = 400000;
  constexpr size_t kCubin = 10000;
  constexpr int kAlive = 8, kChildren = 48, kEach = 6;
  // Nothing of a living publisher is evicted: neither what it keeps nor what it is writing.
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

TEST(Neighbours, APublisherNoticesWhatOthersPublishedSince) {
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

TEST(Neighbours, WhoeverExceedsTheLimitMakesATenthOfRoom) {
  constexpr uint64_t kLimit = 400000;
  constexpr size_t kCubin = 10000;
  for (const bool exceeds : {false, true}) {
    TempDirectory temp;
    std::vector<int> numbers(exceeds ? 39 : 37);
    std::iota(numbers.begin(), numbers.end(), 0);
    publish_elsewhere(temp.path(), numbers, kCubin);
    const uint64_t before = bytes_in(temp.path()), one = before / numbers.size();
    ASSERT_EQ(before + one > kLimit, exceeds);
    ASSERT_GT(before, kLimit - kLimit / 10);
    CacheStore store(options_in(temp.path(), kLimit));
    ASSERT_TRUE(store.publish(key_number(1000), entry_of(kCubin)));
    const uint64_t after = bytes_in(temp.path());
    EXPECT_EQ(store.counters().evictions > 0, exceeds);
    EXPECT_EQ(after <= kLimit - kLimit / 10, exceeds) << after;
    EXPECT_GT(after, kLimit - kLimit / 10 - one) << "and no more than that";
  }
}

} // namespace
