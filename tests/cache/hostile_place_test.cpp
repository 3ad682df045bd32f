//===- hostile_place_test.cpp - Full, read-only and shared directories -----===//
//
// Clocks jump here, too. A test that cannot be set up without being root runs in a user namespace;
// where there are none, it is skipped by name.
//
//===----------------------------------------------------------------------===//

#include "cache/directory.h"
#include "cache/eviction.h"
#include "cache/store.h"
#include "tests/cache/mutations.h"
#include "tests/cache/numbered_entries.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

using namespace sagebwd;
using namespace sagebwd::test;
using namespace std::chrono_literals;

namespace {

//===--- File systems of our own ------------------------------------------===//

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

/// Says whether the work prints one line to stderr, which holds `part`.
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
    return result.evicted == 0 && result.stuck == 2 && result.kept == 2 &&
                   store.counters().heals == 0 && !reason_not_writable(directory).empty()
               ? 0
               : 14;
  }));
}

/// Runs a case that may write files of 64 KiB at most.
int within_a_size_limit(const std::function<int()>& work) {
  return finish(start([&] {
    const rlimit limit = {64 << 10, 64 << 10};
    return ::setrlimit(RLIMIT_FSIZE, &limit) == 0 ? work() : kNotPermitted;
  }));
}

TEST(HostilePlace, AFileSizeLimitCostsOneWarningAndNotTheProcess) {
  TempDirectory temp;
  const auto pending_or_blocked = [] {
    sigset_t pending, blocked;
    ::sigpending(&pending);
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    return sigismember(&pending, SIGXFSZ) + 2 * sigismember(&blocked, SIGXFSZ);
  };
  EXPECT_EQ(within_a_size_limit([&] {
              CacheStore store(options_in(temp / "cache"));
              bool published = false;
              if (!warns_once("File too large", [&] {
                    for (int i = 0; i < 2; ++i)
                      published |= store.publish(key_number(1), entry_of(200000));
                  }))
                return 11;
              if (published || store.counters().publish_failures != 2 || pending_or_blocked())
                return 12;
              struct sigaction action;
              ::sigaction(SIGXFSZ, nullptr, &action);
              if (action.sa_handler != SIG_DFL)
                return 13;
              sigset_t own; // a host's own, pending, stays the host's
              sigemptyset(&own);
              sigaddset(&own, SIGXFSZ);
              ::pthread_sigmask(SIG_BLOCK, &own, nullptr);
              ::raise(SIGXFSZ);
              store.publish(key_number(1), entry_of(200000));
              if (pending_or_blocked() != 3)
                return 14;
              return store.publish(key_number(2), entry_of(1000)) &&
                             test::files_in(temp / "cache").size() == 1
                         ? 0
                         : 15;
            }),
            0);
  EXPECT_EQ(within_a_size_limit([&] { // a host's own writes end it as they always did
              CacheStore(options_in(temp / "cache")).publish(key_number(1), entry_of(200000));
              const int file = ::open((temp / "own").c_str(), O_WRONLY | O_CREAT, 0600);
              return static_cast<int>(::pwrite(file, "x", 1, 1 << 20));
            }),
            -1);
}

TEST(HostilePlace, AdviceIsNotToChangeADirectoryThatIsNotTheCachesAlone) {
  TempDirectory temp;
  const std::string own = "name a directory of your own instead, such as '";
  const auto advice = [&](mode_t mode) {
    EXPECT_EQ(::chmod(temp.path().c_str(), mode), 0);
    const std::string reason = reason_to_refuse(temp.path());
    EXPECT_NE(reason.find("may be written by other users"), std::string::npos) << reason;
    EXPECT_NE(reason.find("chmod") == std::string::npos, reason.find(own) == std::string::npos);
    // If others may rename what is in it, a directory below is not one's own.
    const std::string below = temp / ("sagebwd-" + std::to_string(::geteuid()));
    EXPECT_EQ(reason.find(below) != std::string::npos, (mode & S_ISVTX) != 0) << reason;
    return reason.find("chmod") == std::string::npos ? "own" : "chmod";
  };
  publish_elsewhere(temp.path(), {1});
  CacheStore(options_in(temp.path())).lock(key_number(1));
  EXPECT_STREQ(advice(0777), "chmod") << "all that is in it is the cache's";
  EXPECT_STREQ(advice(01777), "own") << "as /tmp and /var/tmp are";
  EXPECT_STREQ(advice(02775), "own") << "as /usr/local is";
  {
    ScopedVariable home("HOME", temp.path() + "/");
    EXPECT_STREQ(advice(0770), "own");
  }
  test::write_text(temp / "thesis.txt", "mine");
  EXPECT_STREQ(advice(0777), "own");
}

TEST(HostilePlace, DirectoriesOfTheSystemAndHomesAreNoCaches) {
  for (const char* path : {"/", "/usr", "/etc", "/dev", "/home", "/lib", "/usr/lib", "/usr/local"})
    if (std::filesystem::exists(path) && ::geteuid() == 0) {
      EXPECT_NE(reason_to_refuse(path).find("such as '"), std::string::npos) << path;
      EXPECT_NE(CacheStore(options_in(path)).disabled_reason(), "") << path;
    }
  TempDirectory temp;
  EXPECT_EQ(reason_to_refuse(temp.path()), "");
  ScopedVariable home("HOME", temp.path());
  EXPECT_NE(reason_to_refuse(temp.path()).find("or a home; name a directory of your own"),
            std::string::npos);
  EXPECT_EQ(reason_to_refuse(temp / ".cache"), "");
}

TEST(HostilePlace, APathInAdviceIsWhatAShellReads) {
  TempDirectory temp;
  const std::string path = temp / "it's";
  std::filesystem::create_directory(path);
  ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  EXPECT_NE(reason_to_refuse(path).find("chmod go-w '" + temp.path() + "/it'\\''s'"),
            std::string::npos)
      << reason_to_refuse(path);
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

  // They do not outlive for ten years what is used from now on. Looking changes no stamp.
  EXPECT_EQ(prune(temp.path(), std::nullopt, std::nullopt, /*dry_run=*/true).kept, 5u);
  struct stat info;
  ASSERT_EQ(::stat(file_of(temp.path(), 1).c_str(), &info), 0);
  EXPECT_GT(info.st_mtime, ::time(nullptr) + kYear);
  EXPECT_EQ(prune(temp.path(), std::nullopt).kept, 5u);
  std::this_thread::sleep_for(20ms);
  publish_elsewhere(temp.path(), {5});
  EXPECT_EQ(order_in(temp.path()).back(), 5);
  EXPECT_EQ(prune(temp.path(), std::nullopt, std::chrono::seconds::max()).evicted, 0u);
  EXPECT_EQ(prune(temp.path(), std::nullopt, 30min).evicted, 2u);
  CacheStore store(options_in(temp.path()));
  for (int number : {1, 2, 5})
    EXPECT_TRUE(store.load(key_number(number)));
}

} // namespace
