//===- threads_test.cpp - One compile among threads ------------------------===//
//
// Also built with ThreadSanitizer; see cmake/SanitizedTests.cmake.
//
//===----------------------------------------------------------------------===//

#include "cache/eviction.h"
#include "generator/emit.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/stand_in.h"

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <thread>

using namespace sagebwd;
using test::CompileLog;
using test::cubin_of;
using test::spec_number;
using test::TempDirectory;

namespace {

constexpr int kThreads = 64;

/// Runs work(0) ... work(63) at the same moment.
void in_threads(const std::function<void(int)>& work) {
  std::barrier together(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      together.arrive_and_wait();
      work(i);
    });
  for (std::thread& thread : threads)
    thread.join();
}

KernelBuilder builder_in(CacheStore& store, const CompileLog& log) {
  return KernelBuilder(store, test::emit_stand_in,
                       [&log](const KernelSource& source, const KernelSpec& spec) {
                         log.add();
                         std::this_thread::sleep_for(std::chrono::milliseconds(5));
                         return test::compile_stand_in(source, spec);
                       });
}

StoreOptions options_in(const std::string& directory) {
  StoreOptions options;
  options.directory = directory;
  return options;
}

TEST(Threads, SixtyFourThreadsCompileOneKeyOnce) {
  for (int round = 0; round < 5; ++round) {
    TempDirectory temp;
    CompileLog log(temp / "compiles");
    CacheStore store(options_in(temp / "cache"));
    KernelBuilder builder = builder_in(store, log);
    std::vector<KernelBuilder::Built> kernels(kThreads);
    in_threads([&](int i) { kernels[i] = builder.build(spec_number(1)); });
    EXPECT_EQ(log.count(), 1);
    EXPECT_EQ(store.counters().misses, 1u);
    for (const KernelBuilder::Built& kernel : kernels)
      EXPECT_EQ(kernel, kernels[0]);
  }
}

TEST(Threads, ManyKeysAreCompiledOnceEach) {
  constexpr int kKeys = 16;
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  CacheStore store(options_in(temp / "cache"));
  KernelBuilder builder = builder_in(store, log);
  std::atomic<int> wrong{0};
  in_threads([&](int i) {
    for (int k = 0; k < kKeys; ++k) {
      const KernelSpec spec = spec_number((i + k) % kKeys); // each thread begins elsewhere
      wrong += builder.build(spec)->entry.cubin != cubin_of(spec);
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(log.count(), kKeys);
  EXPECT_EQ(store.counters().compiles, static_cast<uint64_t>(kKeys));
}

/// Without a directory there are no locks on files either: only memory holds the threads together.
TEST(Threads, AtTheSameMomentWithoutADirectory) {
  constexpr int kKeys = 400;
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  CacheStore store(options_in(""));
  testing::internal::CaptureStderr(); // the warning that nothing is kept
  KernelBuilder builder(store, test::emit_stand_in,
                        [&log](const KernelSource& source, const KernelSpec& spec) {
                          log.add();
                          return test::compile_stand_in(source, spec);
                        });
  std::barrier together(kThreads);
  in_threads([&](int) {
    for (int k = 0; k < kKeys; ++k) {
      together.arrive_and_wait();
      builder.build(spec_number(k));
    }
  });
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.count(), kKeys);
}

/// As copies of the library in one process would: only the locks on files hold them together.
TEST(Threads, StoresOfTheirOwnStillCompileOnce) {
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  std::atomic<int> wrong{0}, timeouts{0};
  in_threads([&](int) {
    CacheStore store(options_in(temp / "cache"));
    KernelBuilder builder = builder_in(store, log);
    wrong += builder.build(spec_number(1))->entry.cubin != cubin_of(spec_number(1));
    timeouts += static_cast<int>(store.counters().timeouts);
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(timeouts, 0);
  EXPECT_EQ(log.count(), 1);
}

TEST(Threads, BuildAllFromManyThreadsAtOnce) {
  TempDirectory temp;
  CompileLog log(temp / "compiles");
  CacheStore store(options_in(temp / "cache"));
  KernelBuilder builder = builder_in(store, log);
  std::vector<KernelSpec> specs;
  for (int number = 0; number < 8; ++number)
    specs.push_back(spec_number(number));
  std::atomic<int> wrong{0};
  in_threads([&](int) {
    const std::vector<KernelBuilder::Built> kernels = builder.build_all(specs);
    for (size_t i = 0; i < specs.size(); ++i)
      wrong += kernels[i]->entry.cubin != cubin_of(specs[i]);
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(log.count(), 8);
}

TEST(Threads, APackServesThemAllOffline) {
  constexpr int kKeys = 8, kMissing = 64; // which is a group size there is: an error names it
  TempDirectory temp;
  std::vector<std::string> items;
  for (int number = 0; number < kKeys; ++number) {
    const KernelSpec spec = spec_number(number);
    const KernelSource source = test::emit_stand_in(spec);
    items.push_back(serialize(key_of(source, spec), test::compile_stand_in(source, spec).entry));
  }
  write_pack(temp / "some.pack", items);
  StoreOptions options = options_in(temp / "cache");
  options.packs = {temp / "some.pack"};
  CacheStore store(options);
  KernelBuilder builder(store, test::emit_stand_in, test::compile_stand_in, {/*offline=*/true, {}});
  std::atomic<int> wrong{0}, missing{0};
  in_threads([&](int i) {
    for (int k = 0; k <= kKeys; ++k)
      try {
        const int number = (i + k) % (kKeys + 1);
        const KernelSpec spec = spec_number(number < kKeys ? number : kMissing);
        wrong += builder.build(spec)->entry.cubin != cubin_of(spec);
      } catch (const OfflineError&) {
        ++missing;
      }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(missing, kThreads) << "the one that is in no layer, in each thread";
  EXPECT_EQ(store.counters().pack_hits, static_cast<uint64_t>(kKeys));
  EXPECT_EQ(store.counters().compiles, 0u);
}

TEST(Threads, ReadersPublishersAndPrunersShareAStore) {
  constexpr int kKeys = 4;
  TempDirectory temp;
  StoreOptions options = options_in(temp.path());
  options.byte_limit = 100000; // three of four: publishing evicts
  CacheStore store(options);
  std::atomic<int> wrong{0};
  in_threads([&](int i) {
    for (int round = 0; round < 10; ++round) {
      const KernelSpec spec = spec_number((i + round) % kKeys);
      const CacheKey key = make_key({{"number", std::to_string(spec.attention.group_q)}});
      if (i % 4 == 0)
        prune(temp.path(), 50000);
      else if (i % 4 == 1)
        wrong += !store.publish(key, test::compile_stand_in(test::emit_stand_in(spec), spec).entry);
      else if (std::optional<CacheEntry> entry = store.load(key))
        wrong += entry->cubin != cubin_of(spec);
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store.counters().heals, 0u);
}

} // namespace
