//===- fork_test.cpp - Children that are forked while threads build ---------===//
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/stand_in.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

using namespace sagebwd;
using test::finish;
using test::spec_number;
using test::start;
using test::TempDirectory;

namespace {

/// Of its parent's threads none goes on in it: what they build never comes there.
TEST(Fork, AForkedChildBuildsWhatItsParentIsBuilding) {
  CacheStore store{StoreOptions()}; // whose locks would make the child wait for its parent
  const pid_t parent = ::getpid();
  std::promise<void> compiling, may_end;
  KernelBuilder builder(store, test::emit_stand_in,
                        [&](const KernelSource& source, const KernelSpec& spec) {
                          if (::getpid() == parent) {
                            compiling.set_value();
                            may_end.get_future().wait();
                          }
                          return test::compile_stand_in(source, spec);
                        });
  std::thread thread([&] { builder.build(spec_number(1)); });
  compiling.get_future().wait();
  const pid_t child = start([&] {
    ::alarm(20); // which ends it
    return builder.build(spec_number(1))->cached ? 1 : 0;
  });
  EXPECT_EQ(finish(child), 0);
  may_end.set_value();
  thread.join();
  EXPECT_FALSE(builder.build(spec_number(1))->cached);
}

/// Whatever they hold for a moment while the process forks.
TEST(Fork, AForkedChildFindsNothingLocked) {
  TempDirectory temp;
  CacheStore store(temp / "cache");
  KernelBuilder builder(store, test::emit_stand_in, test::compile_stand_in);
  builder.build(spec_number(1));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      while (!stop)
        builder.build(spec_number(1));
    });
  for (int round = 0; round < 100 && !HasFailure(); ++round) {
    const pid_t child = start([&] {
      ::alarm(20);
      return builder.build(spec_number(1)) ? 0 : 1;
    });
    EXPECT_EQ(finish(child), 0);
  }
  stop = true;
  for (std::thread& thread : threads)
    thread.join();
}

} // namespace
