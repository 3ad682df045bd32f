//===- store_test.cpp - The user's cubin directory -------------------------===//

#include "cache/store.h"
#include "tests/cache/numbered_entries.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace sagebwd;
using test::key_number;
using test::TempDirectory;
namespace fs = std::filesystem;

namespace {

CacheEntry entry_with(const std::string& cubin) {
  CacheEntry entry;
  entry.kernel_name = "k";
  entry.arch = "sm_90a";
  entry.cubin = cubin;
  return entry;
}

int mode_of(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : -1;
}

std::string file_of(const CacheStore& store, const CacheKey& key) {
  return store.directory() + "/" + key.digest + ".kernel";
}

TEST(CacheStore, KeepsEntriesInAPrivateDirectoryMadeOnTheFirstPublish) {
  TempDirectory temp;
  CacheStore store(temp / "a/b/cache");
  EXPECT_EQ(store.disabled_reason(), "");
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_FALSE(fs::exists(temp / "a"));

  ASSERT_TRUE(store.publish(key_number(1), entry_with("one")));
  EXPECT_EQ(mode_of(store.directory()), 0700);
  EXPECT_EQ(mode_of(temp / "a"), 0700);
  EXPECT_EQ(mode_of(file_of(store, key_number(1))), 0600);
  EXPECT_EQ(test::files_in(store.directory()).size(), 1u) << "a temporary file is left";

  std::optional<CacheEntry> entry = CacheStore(store.directory()).load(key_number(1));
  ASSERT_TRUE(entry);
  EXPECT_EQ(entry->cubin, "one");
  EXPECT_FALSE(store.load(key_number(2)));
  EXPECT_EQ(store.counters().misses, 2u);
  EXPECT_EQ(store.counters().hits, 0u);
}

TEST(CacheStore, PublishReplacesAnEntry) {
  TempDirectory temp;
  CacheStore store(temp.path());
  ASSERT_TRUE(store.publish(key_number(1), entry_with("old")));
  ASSERT_TRUE(store.publish(key_number(1), entry_with("new")));
  EXPECT_EQ(store.load(key_number(1))->cubin, "new");
}

TEST(CacheStore, HealsWhateverIsInAnEntrysPlace) {
  TempDirectory temp;
  CacheStore store(temp.path());
  CacheKey key = key_number(1);
  const std::string file = file_of(store, key);
  test::write_text(temp / "elsewhere", "secret");
  ASSERT_TRUE(store.publish(key_number(2), entry_with("two")));

  const std::pair<const char*, std::function<void()>> things[] = {
      {"an empty file", [&] { test::write_text(file, ""); }},
      {"garbage", [&] { test::write_text(file, std::string(1000, 'x')); }},
      {"a truncated entry",
       [&] {
         store.publish(key, entry_with("one"));
         fs::resize_file(file, fs::file_size(file) - 1);
       }},
      {"another key's entry", [&] { fs::copy_file(file_of(store, key_number(2)), file); }},
      {"an empty directory", [&] { fs::create_directory(file); }},
      {"a link to a file", [&] { fs::create_symlink(temp / "elsewhere", file); }},
      {"a link to a good entry",
       [&] {
         store.publish(key, entry_with("one"));
         fs::rename(file, temp / "moved");
         fs::create_symlink(temp / "moved", file);
       }},
      {"a dangling link", [&] { fs::create_symlink(temp / "nowhere", file); }},
      {"a FIFO", [&] { ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0); }},
      {"a file that others may write",
       [&] {
         store.publish(key, entry_with("one"));
         ASSERT_EQ(::chmod(file.c_str(), 0666), 0);
       }},
  };
  uint64_t heals = 0;
  for (const auto& [what, put] : things) {
    SCOPED_TRACE(what);
    put();
    EXPECT_FALSE(store.load(key));
    EXPECT_EQ(store.counters().heals, ++heals);
    EXPECT_EQ(fs::symlink_status(file).type(), fs::file_type::not_found);
    ASSERT_TRUE(store.publish(key, entry_with("one")));
    ASSERT_TRUE(store.load(key));
    fs::remove(file);
  }
  EXPECT_EQ(test::read_text(temp / "elsewhere"), "secret");
}

TEST(CacheStore, AFullDirectoryInAnEntrysPlaceIsMovedAside) {
  TempDirectory temp;
  CacheStore store(temp.path());
  const std::string file = file_of(store, key_number(1));
  fs::create_directories(file);
  test::write_text(file + "/precious", "kept");
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_EQ(store.counters().heals, 1u);
  EXPECT_TRUE(store.publish(key_number(1), entry_with("one")));
  EXPECT_TRUE(store.load(key_number(1)));
  bool found = false;
  for (const auto& item : fs::recursive_directory_iterator(temp.path()))
    found |= item.path().filename() == "precious";
  EXPECT_TRUE(found) << "what was in the way is gone";
}

TEST(CacheStore, RefusesADirectoryThatOthersMayWrite) {
  for (mode_t mode : {0777, 0770, 0702, 01777}) {
    TempDirectory temp;
    CacheStore before(temp.path());
    ASSERT_TRUE(before.publish(key_number(1), entry_with("one")));
    ASSERT_EQ(::chmod(temp.path().c_str(), mode), 0);

    CacheStore store(temp.path());
    EXPECT_NE(store.disabled_reason().find("may be written by other users"), std::string::npos);
    testing::internal::CaptureStderr();
    EXPECT_FALSE(store.load(key_number(1)));
    EXPECT_FALSE(store.publish(key_number(2), entry_with("two")));
    EXPECT_FALSE(store.publish(key_number(3), entry_with("three")));
    std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find(temp.path()), std::string::npos) << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(test::files_in(temp.path()).size(), 1u);

    // Opened to others after the store began: no better.
    EXPECT_FALSE(before.load(key_number(1)));
    testing::internal::CaptureStderr();
    EXPECT_FALSE(before.publish(key_number(2), entry_with("two")));
    testing::internal::GetCapturedStderr();
  }
}

TEST(CacheStore, RefusesAnotherUsersDirectory) {
  if (::geteuid() != 0)
    GTEST_SKIP() << "only root can give a directory to another user";
  TempDirectory temp;
  ASSERT_TRUE(CacheStore(temp.path()).publish(key_number(1), entry_with("one")));
  if (::chown(temp.path().c_str(), 65534, 65534) != 0)
    GTEST_SKIP() << "there is no other user in this user namespace";
  CacheStore store(temp.path());
  EXPECT_NE(store.disabled_reason().find("belongs to user 65534"), std::string::npos);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(store.load(key_number(1)));
  testing::internal::GetCapturedStderr();
}

TEST(CacheStore, AnotherUsersFileIsHealed) {
  if (::geteuid() != 0)
    GTEST_SKIP() << "only root can give a file to another user";
  TempDirectory temp;
  CacheStore store(temp.path());
  ASSERT_TRUE(store.publish(key_number(1), entry_with("one")));
  if (::chown(file_of(store, key_number(1)).c_str(), 65534, 65534) != 0)
    GTEST_SKIP() << "there is no other user in this user namespace";
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_EQ(store.counters().heals, 1u);
}

TEST(CacheStore, AFileInTheDirectorysPlaceIsRefused) {
  TempDirectory temp;
  test::write_text(temp / "file", "");
  EXPECT_NE(CacheStore(temp / "file").disabled_reason().find("Not a directory"), std::string::npos);
  EXPECT_NE(CacheStore(temp / "file/below").disabled_reason(), "");
}

TEST(CacheStore, FollowsALinkToADirectory) {
  TempDirectory temp;
  fs::create_directory(temp / "real");
  fs::permissions(temp / "real", fs::perms::owner_all);
  fs::create_directory_symlink(temp / "real", temp / "link");
  CacheStore store(temp / "link");
  ASSERT_TRUE(store.publish(key_number(1), entry_with("one")));
  EXPECT_TRUE(CacheStore(temp / "real").load(key_number(1)));
}

TEST(CacheStore, TheDirectoryMayVanish) {
  TempDirectory temp;
  CacheStore store(temp / "cache");
  ASSERT_TRUE(store.publish(key_number(1), entry_with("one")));
  fs::remove_all(temp / "cache");
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_TRUE(store.publish(key_number(1), entry_with("one")));
  EXPECT_TRUE(store.load(key_number(1)));
}

TEST(CacheStore, WorksWithoutADirectory) {
  CacheStore store("");
  EXPECT_EQ(store.directory(), "");
  EXPECT_NE(store.disabled_reason().find("HOME"), std::string::npos);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(store.load(key_number(1)));
  EXPECT_FALSE(store.publish(key_number(1), entry_with("one")));
  std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find("SAGEBWD_CACHE_DIR"), std::string::npos) << text;
}

} // namespace
