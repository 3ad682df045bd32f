//===- stats_test.cpp - SAGEBWD_STATS ---------------------------------------===//

#include "runtime/kernels.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

using namespace sagebwd;

namespace {

// GoogleMock would have this matcher, but needs a package of its own.
struct ExactlyOneReport {
  using is_gtest_matcher = void;
  bool MatchAndExplain(const std::string& text, std::ostream*) const {
    const size_t first = text.find("memory_hits=");
    return first != std::string::npos && text.find("memory_hits=", first + 1) == std::string::npos;
  }
  void DescribeTo(std::ostream* out) const { *out << "holds the counters once"; }
  void DescribeNegationTo(std::ostream* out) const { *out << "does not hold the counters once"; }
};

TEST(StatsDeathTest, AForkedChildDoesNotRepeatItsParentsCounters) {
  GTEST_FLAG_SET(death_test_style, "threadsafe"); // a process whose store is not made yet
  const test::ScopedVariable stats("SAGEBWD_STATS", "1");
  const auto parent_and_child = [] {
    user_store();
    if (::fork() == 0)
      std::exit(0);
    ::wait(nullptr);
    std::exit(7);
  };
  EXPECT_EXIT(parent_and_child(), testing::ExitedWithCode(7), ExactlyOneReport());
}

} // namespace
