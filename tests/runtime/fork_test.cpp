//===- fork_test.cpp - Children that are forked while threads build ---------===//
#include "generator/emit.h"
#include "runtime/nvrtc/in_use.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/stand_in.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

using namespace sagebwd;
using test::finish;
using test::spec_number;
using test::start;
using test::TempDirectory;

namespace {

/// None of a parent's threads goes on in its child: what they build never comes there.
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

/// 0: LibraryError that says what happened.
int refusal_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const LibraryError& error) {
    const std::string what = error.what();
    return what.find("forked") != what.npos && what.find("spawn") != what.npos ? 0 : 2;
  }
  return 1;
}

/// As one of its parent's threads holds a lock of NVRTC's.
TEST(Fork, AChildForkedWithinNvrtcRefusesToCompileAndUsesWhatIsKept) {
  TempDirectory temp;
  CacheStore store(temp / "cache");
  const auto builder_of = [&] {
    KernelBuilder::Policy policy;
    policy.check_compiler = nvrtc::raise_if_unusable;
    return KernelBuilder(store, test::emit_stand_in, test::compile_stand_in, policy);
  };
  builder_of().build(spec_number(1));
  const KernelSpec missing = spec_number(2);
  // The parent has the right to compile it: to wait for that would end in a refusal all the same.
  const KeyLock held = store.lock(key_of(test::emit_stand_in(missing), missing));
  ASSERT_TRUE(held.held());
  std::promise<void> within, may_end;
  std::thread thread([&] {
    const nvrtc::InUse in_use;
    within.set_value();
    may_end.get_future().wait();
  });
  within.get_future().wait();
  const pid_t child = start([&] {
    ::alarm(20);
    KernelBuilder builder = builder_of();
    const int refused = refusal_of([&] { builder.build(missing); });
    if (refused != 0 || store.counters().waits != 0)
      return 10 + refused;
    if (const int entered = refusal_of([] { nvrtc::InUse(); }))
      return 20 + entered;
    if (!builder.build(spec_number(1))->cached)
      return 30;
    return finish(start([&] { return refusal_of(nvrtc::raise_if_unusable); })); // a grandchild
  });
  EXPECT_EQ(finish(child), 0);
  may_end.set_value();
  thread.join();
  EXPECT_NO_THROW(nvrtc::raise_if_unusable()) << "the parent goes on";
  EXPECT_EQ(finish(start([] { return refusal_of(nvrtc::raise_if_unusable); })), 1)
      << "no thread is within it any more";
}

/// A child would wait for ever for a function's static.
TEST(Fork, WaitsUntilWhatAProcessHasOneOfIsMade) {
  static constinit Single<int> one;
  std::promise<void> making;
  std::thread thread([&] {
    one.get([&] {
      making.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(50)); // in which the fork begins
      static constinit Single<int> inner;
      return new int(inner.get([] { return new int(7); }));
    });
  });
  making.get_future().wait();
  const pid_t child = start([&] {
    ::alarm(20);
    const NoFork none; // it is free here as well
    return one.get([] { return new int(8); });
  });
  EXPECT_EQ(finish(child), 7);
  thread.join();
}

} // namespace
