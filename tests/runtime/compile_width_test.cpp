//===- compile_width_test.cpp - Threads by cores and memory ----------------===//

#include "runtime/compile_width.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <thread>

using namespace sagebwd;
using test::TempDirectory;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

/// A machine's files.
struct Machine {
  TempDirectory root;
  void file(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root / path).parent_path());
    test::write_text(root / path, text);
  }
  std::optional<uint64_t> available() const { return available_memory(root.path()); }
};

TEST(CompileWidth, IsTheCoresWhereThereIsMemory) {
  EXPECT_EQ(compile_width(64, std::nullopt), 64u);
  EXPECT_EQ(compile_width(64, uint64_t{1} << 40), 64u);
  EXPECT_EQ(compile_width(0, std::nullopt), 1u);
}

TEST(CompileWidth, IsBoundedByMemoryAndAtLeastOne) {
  EXPECT_EQ(compile_width(64, 1536 * kMiB), 8u);
  EXPECT_EQ(compile_width(64, 400 * kMiB), 2u);
  EXPECT_EQ(compile_width(64, 10 * kMiB), 1u);
  EXPECT_EQ(compile_width(64, 0), 1u);
}

TEST(CompileWidth, FollowsTheAffinityOfTheProcess) {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(compile_width(), 1u);
  }).join();
}

TEST(AvailableMemory, IsThatOfThisMachine) {
  std::optional<uint64_t> bytes = available_memory();
  ASSERT_TRUE(bytes);
  EXPECT_GT(*bytes, 16 * kMiB);
}

TEST(AvailableMemory, IsNotKnownWithoutFiles) { EXPECT_FALSE(Machine().available()); }

TEST(AvailableMemory, IsMemAvailableWithoutGroups) {
  Machine machine;
  machine.file("proc/meminfo", "MemTotal: 999999 kB\nMemFree: 5 kB\nMemAvailable:  204800 kB\n");
  EXPECT_EQ(machine.available(), 200 * kMiB);
  machine.file("proc/self/cgroup", "garbage\n::\n0::\n:memory:\n");
  EXPECT_EQ(machine.available(), 200 * kMiB);
}

TEST(AvailableMemory, IsWhatAVersion2GroupLeaves) {
  Machine machine;
  machine.file("proc/meminfo", "MemAvailable: 20480000 kB\n");
  machine.file("proc/self/cgroup", "0::/user/job\n");
  machine.file("sys/fs/cgroup/user/job/memory.max", "max\n");
  machine.file("sys/fs/cgroup/user/job/memory.current", "12345\n");
  EXPECT_EQ(machine.available(), 20000 * kMiB);
  // The group above it has a limit; half of its usage is cached files.
  machine.file("sys/fs/cgroup/user/memory.max", std::to_string(512 * kMiB));
  machine.file("sys/fs/cgroup/user/memory.current", std::to_string(200 * kMiB));
  machine.file("sys/fs/cgroup/user/memory.stat",
               "anon 5\ninactive_file " + std::to_string(100 * kMiB) + "\nactive_file 7\n");
  EXPECT_EQ(machine.available(), 412 * kMiB);
  machine.file("sys/fs/cgroup/user/memory.current", std::to_string(900 * kMiB));
  machine.file("sys/fs/cgroup/user/memory.stat", "anon 5\n");
  EXPECT_EQ(machine.available(), 0u);
}

TEST(AvailableMemory, IsWhatAVersion1GroupLeaves) {
  Machine machine;
  machine.file("proc/meminfo", "MemAvailable: 20480000 kB\n");
  machine.file("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/host-path\n0::/\n");
  // As in a container: the path is the host's, the root of the mount is the container's group.
  machine.file("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(256 * kMiB));
  machine.file("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(156 * kMiB));
  machine.file("sys/fs/cgroup/memory/memory.stat",
               "inactive_file 1\ntotal_inactive_file " + std::to_string(56 * kMiB) + "\n");
  EXPECT_EQ(machine.available(), 156 * kMiB);
  machine.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(machine.available(), 20000 * kMiB);
}

} // namespace
