//===- kill_test.cpp - Writers killed at random moments --------------------===//

#include "cache/directory.h"
#include "cache/eviction.h"
#include "cache/layout.h"
#include "cache/posix.h"
#include "cache/store.h"
#include "cache/whole_file.h"
#include "tests/cache/numbered_entries.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fcntl.h>
#include <random>
#include <thread>

using namespace sagebwd;
using test::key_number;
using test::TempDirectory;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using namespace std::chrono_literals;

namespace {

constexpr int kKills = 500;
constexpr int kWorkers = 6;
constexpr int kKeys = 5;
constexpr milliseconds kLockLimit{2000};

/// Known from the key alone, so that every process can tell a bad one. Up to 400 KB: long enough
/// to be killed in the middle.
std::string cubin_of(int number) {
  return std::string(static_cast<size_t>(1000 + 100000 * number), static_cast<char>('a' + number));
}

CacheEntry known_entry(int number) {
  CacheEntry entry;
  entry.kernel_name = "k" + std::to_string(number);
  entry.cubin = cubin_of(number);
  return entry;
}

TuningRecord record_of(int number) {
  TuningRecord record;
  record.key = make_key({{"schema", kTuningSchema}, {"number", std::to_string(number)}});
  record.tile = "tile " + std::to_string(number);
  record.candidates.assign(200, {record.tile, "timed", "", {1, 2, 3}, 2, 1});
  return record;
}

/// An exit status tells what a process found wrong. The process never returns while all is well.
enum Finding { kBadEntry = 11, kBadRecord, kHealed, kWaitedTooLong };

Finding work_until_killed(const std::string& directory, unsigned seed) {
  StoreOptions options;
  options.directory = directory;
  options.byte_limit = 1500000; // now and then publishing evicts
  options.lock_limit = kLockLimit;
  CacheStore store(options);
  std::minstd_rand random(seed);
  for (;;) {
    const int number = static_cast<int>(random() % kKeys);
    switch (random() % 6) {
    case 0:
      prune(directory, random() % 2 ? std::optional<uint64_t>(300000) : std::nullopt);
      break;
    case 1:
      store.publish_record(record_of(number));
      if (auto record = store.load_record(record_of(number).key))
        if (record->tile != record_of(number).tile)
          return kBadRecord;
      break;
    default: { // as KernelBuilder goes about it
      std::optional<CacheEntry> entry = store.load(key_number(number));
      if (!entry) {
        const Clock::time_point begin = Clock::now();
        const KeyLock lock = store.lock(key_number(number));
        if (Clock::now() - begin > kLockLimit + std::chrono::minutes(1)) // of a busy machine
          return kWaitedTooLong;
        entry = store.load_again(key_number(number));
        if (!entry)
          store.publish(key_number(number), known_entry(number));
      }
      if (entry && entry->cubin != cubin_of(number))
        return kBadEntry;
      if (store.counters().heals != 0) // a partial file had an entry's name
        return kHealed;
      if (random() % 4 == 0)
        store.publish(key_number(number), known_entry(number));
    }
    }
  }
}

/// Files that are being written, or were by a process that is gone.
int temporaries_of(const std::string& directory, const std::string& writer) {
  int count = 0;
  for (const std::string& path : test::files_in(directory))
    count += path.find("/.tmp-" + writer) != std::string::npos;
  return count;
}

void set_age(const std::string& path, std::chrono::seconds age) {
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - age);
}

TEST(KilledWriters, NeverSpoilOrStallAnythingAndTheirLeftoversAreSwept) {
  TempDirectory temp;
  std::minstd_rand random(7);
  unsigned seed = 0;
  auto spawn = [&] {
    return test::start([&, seed = ++seed] { return work_until_killed(temp.path(), seed); });
  };
  std::vector<pid_t> workers;
  for (int i = 0; i < kWorkers; ++i)
    workers.push_back(spawn());

  int leftovers = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
    pid_t& victim = workers[random() % workers.size()];
    ::kill(victim, SIGKILL);
    ASSERT_EQ(test::finish(victim), -1) << "a process found something wrong and said so";
    leftovers += temporaries_of(temp.path(), std::to_string(victim) + "-");
    victim = spawn();
  }
  for (pid_t worker : workers) {
    ::kill(worker, SIGKILL);
    EXPECT_EQ(test::finish(worker), -1);
  }

  // Nobody is left who could hold a lock.
  CacheStore store(temp.path());
  for (int number = 0; number < kKeys; ++number) {
    const KeyLock lock = store.lock(key_number(number));
    EXPECT_TRUE(lock.held());
    EXPECT_FALSE(lock.waited());
    std::optional<CacheEntry> entry = store.load(key_number(number));
    EXPECT_TRUE(!entry || entry->cubin == cubin_of(number));
    store.load_record(record_of(number).key);
  }
  EXPECT_EQ(store.counters().heals, 0u);

  EXPECT_GT(leftovers, 0) << "no writer was killed in the middle of a file: this proves nothing";
  prune(temp.path(), std::nullopt);
  for (const std::string& path : test::files_in(temp.path()))
    if (path.find("/.tmp-") != std::string::npos) {
      EXPECT_EQ(std::filesystem::file_size(path), 0u)
          << "only these may still be about to be written";
      set_age(path, 120s);
    }
  prune(temp.path(), std::nullopt);
  EXPECT_EQ(temporaries_of(temp.path(), ""), 0);
  std::printf("%d kills left %d files half written\n", kKills, leftovers);
}

TEST(KilledWriters, AreNotThoseThatStillWriteWhateverTheClockSays) {
  TempDirectory temp;
  const std::string name = unique_name(layout::kTemporary), path = temp / name;
  test::write_text(path, "half of a kernel");
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(lock_byte(file.get(), F_WRLCK, 0), LockStatus::taken); // as its writer does
  for (std::chrono::seconds age : {0s, 172800s, -172800s}) {
    set_age(path, age);
    EXPECT_EQ(leftovers(temp.path(), /*remove=*/true), 0u) << age.count();
    EXPECT_TRUE(file_exists(temp.path(), name)) << age.count();
  }
  file.close();
  EXPECT_EQ(leftovers(temp.path(), /*remove=*/true), 1u);
  EXPECT_FALSE(file_exists(temp.path(), name));
}

TEST(KilledWriters, AFileThatOnlyBeginsAsATemporaryIsAnothers) {
  TempDirectory temp;
  for (const char* name : {".tmp-notes", ".tmp-", ".tmp-1", ".tmp-1-", ".tmp--ff", ".tmp-1-xyz"}) {
    test::write_text(temp / name, "precious");
    set_age(temp / name, 72h);
  }
  EXPECT_EQ(prune(temp.path(), std::nullopt).swept, 0u);
  EXPECT_EQ(test::read_text(temp / ".tmp-notes"), "precious");
  EXPECT_EQ(test::files_in(temp.path()).size(), 6u);
}

TEST(KilledWriters, ASweepTakesTheLeftoversAndNothingElse) {
  TempDirectory temp;
  CacheStore store(temp.path());
  ASSERT_TRUE(store.publish(key_number(1), known_entry(1)));
  for (int i = 0; i < 3; ++i)
    test::write_text(temp / ".tmp-123-" + std::to_string(i), "half an en");
  for (auto [name, age] : {std::pair(".tmp-1-1a", 0s), {".tmp-2-2b", 120s}, {".tmp-3-3c", -120s}}) {
    test::write_text(temp / name, "");
    set_age(temp / name, age);
  }
  // One that a living process is still writing, and things that are no files of ours.
  const std::string busy = temp / ".tmp-4-4d";
  const pid_t writer = test::start([&] {
    const int file = ::open(busy.c_str(), O_RDWR | O_CREAT, 0600);
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_len = 1;
    ::fcntl(file, F_OFD_SETLK, &lock);
    if (::write(file, "half", 4) != 4)
      return 1;
    ::raise(SIGSTOP);
    return 0;
  });
  ASSERT_TRUE(test::wait_until_stopped(writer));
  std::filesystem::create_directory(temp / ".tmp-5-5e");
  test::write_text(temp / "elsewhere", "precious");
  std::filesystem::create_symlink(temp / "elsewhere", temp / ".tmp-6-6f");

  EXPECT_EQ(prune(temp.path(), std::nullopt).swept, 5u);
  EXPECT_TRUE(std::filesystem::exists(busy));
  EXPECT_TRUE(std::filesystem::exists(temp / ".tmp-1-1a")) << "its writer may be about to lock it";
  EXPECT_EQ(test::read_text(temp / "elsewhere"), "precious");
  EXPECT_TRUE(store.load(key_number(1)));

  ::kill(writer, SIGKILL);
  test::finish(writer);
  EXPECT_EQ(prune(temp.path(), std::nullopt).swept, 1u);
}

} // namespace
