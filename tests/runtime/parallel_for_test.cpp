//===- parallel_for_test.cpp - Work on several threads ---------------------===//
//
// Also built with ThreadSanitizer; see cmake/SanitizedTests.cmake.
//
//===----------------------------------------------------------------------===//

#include "runtime/parallel_for.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <pthread.h>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace sagebwd;
using namespace std::chrono_literals;

namespace {

/// While it lives, no thread can be started: none finds room for its stack.
class NoMoreThreads {
public:
  NoMoreThreads() {
    pthread_attr_t endless;
    ::pthread_getattr_default_np(&before_);
    ::pthread_getattr_default_np(&endless);
    ::pthread_attr_setstacksize(&endless, size_t{1} << 47);
    ::pthread_setattr_default_np(&endless);
    ::pthread_attr_destroy(&endless);
  }
  ~NoMoreThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }

private:
  pthread_attr_t before_;
};

/// The text of what a call raises.
std::string raised_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

TEST(ParallelFor, TakesEveryIndexOnceOnAsManyThreads) {
  std::barrier together(4); // is passed by four threads only
  std::atomic<int> counts[4] = {};
  std::mutex mutex;
  std::set<std::thread::id> threads;
  parallel_for(4, 4, [&](size_t i) {
    together.arrive_and_wait();
    ++counts[i];
    std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  for (const std::atomic<int>& count : counts)
    EXPECT_EQ(count, 1);
  EXPECT_EQ(threads.size(), 4u);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
  parallel_for(0, 4, [](size_t) { FAIL(); });
}

TEST(ParallelFor, RaisesTheErrorOfTheFirstIndexAndBeginsNothingMore) {
  std::barrier together(2);
  std::atomic<size_t> last{0};
  EXPECT_EQ(raised_by([&] {
              parallel_for(1000, 2, [&](size_t i) {
                last = std::max<size_t>(last, i);
                if (i < 2) {
                  together.arrive_and_wait();
                  std::this_thread::sleep_for(i == 0 ? 50ms : 0ms);
                  throw std::runtime_error("index " + std::to_string(i));
                }
              });
            }),
            "index 0");
  EXPECT_EQ(last, 1u);
}

TEST(ParallelFor, SaysWhatIsDoneOnTheCallingThread) {
  std::vector<size_t> done;
  const auto caller = std::this_thread::get_id();
  parallel_for(
      100, 3, [&](size_t) { EXPECT_NE(std::this_thread::get_id(), caller); },
      [&](size_t i) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        done.push_back(i);
      });
  EXPECT_EQ(done.size(), 100u);
  EXPECT_EQ(std::set(done.begin(), done.end()).size(), 100u);
}

TEST(ParallelFor, DoesWithoutThreadsThatCannotBeHad) {
  const NoMoreThreads none;
  ASSERT_NE(raised_by([] { std::thread([] {}).join(); }), "nothing");
  for (bool watched : {false, true})
    for (bool reports : {false, true}) {
      std::vector<size_t> order, done;
      int watches = 0;
      std::optional<ScopedWatch> watch;
      if (watched)
        watch.emplace([&] { ++watches; });
      parallel_for(
          5, 8, [&](size_t i) { order.push_back(i); },
          reports ? [&](size_t i) { done.push_back(i); } : std::function<void(size_t)>());
      EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2, 3, 4}));
      EXPECT_EQ(done, reports ? order : std::vector<size_t>());
      EXPECT_EQ(watches, watched ? 5 : 0);
    }
  EXPECT_EQ(raised_by([] {
              parallel_for(5, 8, [](size_t i) { throw std::out_of_range(i ? "" : "first"); });
            }),
            "first");
}

TEST(ParallelFor, TakesNoThreadsWithinAnother) {
  std::atomic<int> elsewhere{0};
  parallel_for(2, 2, [&](size_t) {
    const auto here = std::this_thread::get_id();
    parallel_for(8, 8, [&](size_t) { elsewhere += std::this_thread::get_id() != here; });
  });
  EXPECT_EQ(elsewhere, 0);
}

TEST(ParallelFor, IsInterruptedByTheWatchWhileItWorks) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> begun{0};
  const auto interrupt = [&] {
    const ScopedWatch watch([&] {
      if (begun == 2)
        throw std::runtime_error("Ctrl-C");
    });
    parallel_for(100, 2, [&](size_t) {
      ++begun;
      parallel_for(1000, 1, [](size_t) { std::this_thread::sleep_for(10ms); }); // nested
    });
  };
  EXPECT_EQ(raised_by(interrupt), "Ctrl-C"); // and not that the others were interrupted
  EXPECT_EQ(begun, 2);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  EXPECT_EQ(interrupt_flag(), nullptr);
  EXPECT_NO_THROW(check_interrupt()); // the watch ended with its scope
}

TEST(ParallelFor, IsEndedByWhatTheReportRaises) {
  std::atomic<int> begun{0};
  EXPECT_EQ(raised_by([&] {
              parallel_for(
                  1000, 2,
                  [&](size_t) {
                    ++begun;
                    std::this_thread::sleep_for(1ms);
                  },
                  [](size_t) { throw std::runtime_error("no room for reports"); });
            }),
            "no room for reports");
  EXPECT_LT(begun, 1000);
}

} // namespace
