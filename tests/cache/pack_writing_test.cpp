//===- pack_writing_test.cpp - What writing a pack refuses and survives ----===//

#include "tests/cache/pack_items.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

using namespace sagebwd;
using test::kNotPermitted;
using test::TempDirectory;
namespace fs = std::filesystem;

namespace {

TEST(PackWriting, LeavesAFileThatIsNoPack) {
  TempDirectory temp;
  test::write_text(temp / "notes.txt", "precious");
  const std::string why = refusal([&] { write_pack(temp / "notes.txt", {kernel_number(1)}); });
  EXPECT_TRUE(contains(why, temp / "notes.txt")) << why;
  EXPECT_TRUE(contains(why, "is no pack")) << why;
  EXPECT_EQ(test::read_text(temp / "notes.txt"), "precious");
}

TEST(PackWriting, RefusesTwoContentsOfOneKey) {
  TempDirectory temp;
  test::write_text(temp / "p.pack", "SAGEBWDP as it was");
  CacheEntry other;
  other.kernel_name = "another";
  std::string why = refusal([&] {
    write_pack(temp / "p.pack", {kernel_number(1), serialize(pack_key(1), other)});
  });
  EXPECT_TRUE(contains(why, temp / "p.pack")) << why;
  EXPECT_TRUE(contains(why, pack_key(1).digest)) << why;
  EXPECT_EQ(test::read_text(temp / "p.pack"), "SAGEBWDP as it was");
  EXPECT_EQ(count_files_in(temp.path()), 1u);
}

TEST(PackWriting, RefusesWhatIsNoItem) {
  TempDirectory temp;
  std::string bad = kernel_number(1);
  bad.back() ^= 1;
  for (const std::string& item : {bad, std::string("{}"), std::string(""), std::string("x"),
                                  serialize(record()).substr(0, 100)}) {
    std::string why = refusal([&] { write_pack(temp / "p.pack", {kernel_number(2), item}); });
    EXPECT_TRUE(contains(why, "item 2 ")) << why;
    EXPECT_TRUE(fs::is_empty(temp.path()));
  }
}

TEST(PackWriting, RefusesWhatCannotBeWrittenAndLeavesNothing) {
  TempDirectory temp;
  fs::create_directory(temp / "folder.pack");
  fs::create_directory(temp / "empty");
  EXPECT_TRUE(contains(refusal([&] { write_pack(temp / "folder.pack", {}); }), "no regular file"));
  EXPECT_TRUE(fs::is_empty(temp / "folder.pack"));
  EXPECT_TRUE(contains(refusal([&] { write_pack("/dev/null", {}); }), "no regular file"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_TRUE(contains(refusal([&] { write_pack(temp / "none/p.pack", {}); }), "no folder"));
  EXPECT_TRUE(contains(refusal([&] { write_pack(temp / "empty/", {}); }), "no file's name"));
  const std::string cut(temp / "a"), longer = cut + std::string("\0.pack", 6);
  EXPECT_TRUE(contains(refusal([&] { write_pack(longer, {}); }), "'" + cut + "' and holds a NUL"));
  EXPECT_EQ(count_files_in(temp.path()), 2u);
}

TEST(PackWriting, RefusesAPathThatTheEnvironmentCouldNotName) {
  TempDirectory temp;
  const std::string why = refusal([&] { write_pack(temp / "a:b.pack", {kernel_number(1)}); });
  EXPECT_TRUE(contains(why, "a:b.pack' has a colon, and colons separate")) << why;
  EXPECT_TRUE(contains(why, "SAGEBWD_CACHE_PACKS")) << why;
  EXPECT_TRUE(fs::is_empty(temp.path()));
  EXPECT_TRUE(contains(refusal(temp / "none"), "in SAGEBWD_CACHE_PACKS colons separate paths"));
}

TEST(PackWriting, AReadOnlyFolderIsAnErrorAndTheFileStays) {
  TempDirectory temp;
  int status = in_child([&] {
    if (::geteuid() == 0 && // root may write anywhere
        (::chown(temp.path().c_str(), kNobody, kNobody) != 0 || ::setuid(kNobody) != 0))
      return kNotPermitted;
    write_pack(temp / "p.pack", {kernel_number(1)});
    const std::string before = test::read_text(temp / "p.pack");
    ::chmod(temp.path().c_str(), 0500);
    std::string why = refusal([&] { write_pack(temp / "p.pack", {kernel_number(2)}); });
    if (!contains(why, "Permission denied"))
      return 11;
    return test::read_text(temp / "p.pack") == before && count_files_in(temp.path()) == 1 ? 0 : 12;
  });
  if (status == kNotPermitted)
    GTEST_SKIP() << "root cannot become another user here";
  EXPECT_EQ(status, 0);
}

TEST(PackWriting, AFullDiskIsAnErrorAndTheFileStays) {
  TempDirectory temp;
  int status = in_child([&] {
    // A mount of our own, seen by this process only.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", temp.path().c_str(), "tmpfs", 0, "size=64k,mode=700") != 0)
      return kNotPermitted;
    write_pack(temp / "p.pack", {kernel_number(1)});
    const std::string before = test::read_text(temp / "p.pack");
    std::string why =
        refusal([&] { write_pack(temp / "p.pack", {kernel_number(2, 12000, "sm_80", 200000)}); });
    if (!contains(why, "No space left on device"))
      return 11;
    if (count_files_in(temp.path()) != 1)
      return 12;
    return test::read_text(temp / "p.pack") == before ? 0 : 13;
  });
  if (status == kNotPermitted)
    GTEST_SKIP() << "mounting a small file system is not permitted here";
  EXPECT_EQ(status, 0);
}

TEST(PackWriting, AKilledWriterLeavesTheOldFileAndTheNextSweeps) {
  TempDirectory temp;
  write_pack(temp / "p.pack", {kernel_number(0)});
  const std::vector<std::string> large = {kernel_number(1, 12000, "sm_80", 8 << 20)};
  size_t leftovers = 0;
  for (int round = 0; round < 20; ++round) {
    pid_t child = ::fork();
    if (child == 0)
      for (;;)
        write_pack(temp / "p.pack", large);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (count_files_in(temp.path()) < 2 && std::chrono::steady_clock::now() < deadline)
      ::usleep(static_cast<useconds_t>(50 * round)); // at other moments each time
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_EQ(Pack::open(temp / "p.pack")->digests().size(), 1u);
    for (const auto& file : fs::directory_iterator(temp.path()))
      if (file.path() != temp / "p.pack") {
        if (file.file_size() > 0)
          ++leftovers;
        else // an empty one may be a living writer's, for a minute
          fs::remove(file.path());
      }
    write_pack(temp / "p.pack", {kernel_number(0)});
    EXPECT_EQ(count_files_in(temp.path()), 1u) << "a leftover was not swept";
  }
  EXPECT_GT(leftovers, 0u) << "no writer was killed while it wrote";
}

TEST(PackWriting, WritersOfOnePackDoNotHinderEachOther) {
  TempDirectory temp;
  std::vector<pid_t> writers;
  for (int number = 0; number < 4; ++number) {
    writers.push_back(::fork());
    if (writers.back() == 0) {
      for (int round = 0; round < 100; ++round)
        if (!refusal([&] { write_pack(temp / "p.pack", {kernel_number(number)}); }).empty())
          ::_exit(1);
      ::_exit(0);
    }
  }
  for (pid_t writer : writers) {
    int status = -1;
    ::waitpid(writer, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(Pack::open(temp / "p.pack")->digests().size(), 1u);
  EXPECT_EQ(count_files_in(temp.path()), 1u);
}

} // namespace
