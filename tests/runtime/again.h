//===- again.h - This executable again, in a process of its own ------------===//
//
// A test starts a child that runs one test of the same executable. There child_task() says what is
// to be done, and what that prints is the parent's to compare.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>

namespace sagebwd::test {

inline constexpr const char* kTaskVariable = "SAGEBWD_TEST_CHILD";

/// Gives the task that this process was started for, or null where there is none.
inline const char* child_task() { return std::getenv(kTaskVariable); }

/// In a child: what `work` prints is told from what gtest does, in one order with standard error.
inline void report(const std::function<void()>& work) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::printf("begin\n");
  work();
  std::printf("end\n");
}

/// Gives what `test` reports in a new process in which `task` is to be done.
inline std::string report_of_child(const std::string& test, const std::string& task) {
  ScopedVariable variable(kTaskVariable, task);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::FILE* pipe = ::popen(("'" + self + "' --gtest_filter=" + test + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  while (size_t count = std::fread(buffer, 1, sizeof(buffer), pipe))
    output.append(buffer, count);
  EXPECT_EQ(::pclose(pipe), 0) << output;
  const size_t begin = output.find("begin\n"), end = output.find("end\n");
  EXPECT_NE(end, std::string::npos) << output;
  return end == std::string::npos ? output : output.substr(begin + 6, end - begin - 6);
}

/// The fake driver (fake_libcuda.c) in a folder, for LD_LIBRARY_PATH.
inline void compile_fake_driver(const std::string& folder, const std::string& options = "") {
  const std::string command =
      "cc -w -shared -fPIC -Wl,-soname,libcuda.so.1 " + options + " -o '" + folder +
      "/libcuda.so.1' '" SAGEBWD_SOURCE_DIR "/tests/runtime/fake_libcuda.c'";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

} // namespace sagebwd::test
