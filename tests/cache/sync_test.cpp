//===- sync_test.cpp - File systems whose fsync does not do it --------------===//
//
// The cache's calls of fsync come here: this executable's function is found before the C library's.
//
//===----------------------------------------------------------------------===//
#include "cache/whole_file.h"
#include "tests/cache/numbered_entries.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>

using namespace sagebwd;

namespace {
thread_local int fsync_says = 0; // an errno
}

extern "C" int fsync(int file) {
  if (fsync_says == 0)
    return static_cast<int>(::syscall(SYS_fsync, file));
  errno = fsync_says;
  return -1;
}

namespace {

class Syncing : public testing::Test {
protected:
  ~Syncing() override { fsync_says = 0; }
  std::string write(int error) {
    fsync_says = error;
    return write_output(temp_ / "file", {&text_});
  }
  test::TempDirectory temp_;
  const std::string text_ = "text";
};

TEST_F(Syncing, AFileSystemThatCannotSyncHasTheFileAllTheSame) {
  for (int error : {EINVAL, ENOSYS, ENOTSUP}) {
    EXPECT_EQ(write(error), "") << error;
    EXPECT_EQ(read_input(temp_ / "file"), text_) << error;
    std::filesystem::remove(temp_ / "file");
  }
}

TEST_F(Syncing, WhatIsNotOnTheDiskIsNotThere) {
  for (int error : {EIO, ENOSPC, EDQUOT}) {
    EXPECT_NE(write(error).find("is not written"), std::string::npos) << error;
    EXPECT_TRUE(std::filesystem::is_empty(std::string(temp_ / "."))) << error;
  }
}

TEST_F(Syncing, AFullDiskOrQuotaSaysThatSpaceIsNeeded) {
  const auto advised = [](const std::string& text) {
    return text.find("; free some space") != std::string::npos;
  };
  for (int error : {ENOSPC, EDQUOT, EIO}) {
    EXPECT_EQ(advised(write(error)), error != EIO) << error;
    testing::internal::CaptureStderr();
    CacheStore store(test::options_in(temp_ / "cache"));
    EXPECT_FALSE(store.publish(test::key_number(1), test::entry_of(10)));
    EXPECT_EQ(advised(testing::internal::GetCapturedStderr()), error != EIO) << error;
  }
}

} // namespace
