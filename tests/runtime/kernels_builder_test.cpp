//===- kernels_builder_test.cpp - Memory, disk, compile --------------------===//
//
// With sources and compilers of the test's own: no NVRTC, no generator.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "runtime/kernel_builder.h"
#include "runtime/log.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/stand_in.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

using namespace sagebwd;
using test::spec_number;
using test::TempDirectory;

namespace {

/// A builder whose parts count their calls.
struct Bench {
  std::atomic<int> emits{0}, compiles{0};
  std::function<void(const KernelSpec&)> during_compile = [](const KernelSpec&) {};
  std::string compiler = "test compiler 1";
  bool keep = true;
  KernelBuilder builder;

  explicit Bench(CacheStore& store)
      : builder(
            store,
            [this](const KernelSpec& spec) {
              ++emits;
              std::string name = "k" + std::to_string(spec.attention.group_q);
              return KernelSource{name, "source of " + name, 128, 4096};
            },
            [this](const KernelSource& source, const KernelSpec& spec) {
              ++compiles;
              during_compile(spec);
              CacheEntry entry;
              entry.kernel_name = source.name;
              entry.arch = spec.arch.name;
              entry.compiler = compiler;
              entry.compile_ms = 7;
              entry.cubin = "cubin of " + source.text;
              return KernelBuilder::Compiled{entry, keep};
            }) {}
};

TEST(KernelBuilder, LooksInMemoryThenOnDiskThenCompiles) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench first(store);
  auto kernel = first.builder.build(spec_number(1));
  EXPECT_FALSE(kernel->cached);
  EXPECT_EQ(kernel->entry.cubin, "cubin of source of k1");
  EXPECT_EQ(kernel->entry.compile_ms, 7);
  EXPECT_EQ(kernel->threads, 128);
  EXPECT_EQ(kernel->shared_bytes, 4096);
  EXPECT_EQ(kernel->spec, spec_number(1));

  EXPECT_EQ(first.builder.build(spec_number(1)), kernel);
  EXPECT_EQ(first.emits, 1) << "a hit in memory generates and hashes nothing";
  EXPECT_EQ(store.counters().misses, 1u);

  Bench second(store); // as another process would
  auto again = second.builder.build(spec_number(1));
  EXPECT_TRUE(again->cached);
  EXPECT_EQ(again->entry.cubin, kernel->entry.cubin);
  EXPECT_EQ(again->entry.compile_ms, 0);
  EXPECT_EQ(again->threads, 128);
  EXPECT_EQ(second.compiles, 0);
  EXPECT_FALSE(second.builder.build(spec_number(2))->cached);
}

TEST(KernelBuilder, CompilingThatLastsSaysSoOnce) {
  ::unsetenv("SAGEBWD_LOG"); // which other tests are spared the line by
  TempDirectory temp;
  CacheStore store(temp.path());
  const auto said = [&](std::chrono::milliseconds after, int first) {
    KernelBuilder::Policy policy;
    policy.announce_after = after;
    KernelBuilder builder(
        store, test::emit_stand_in,
        [](const KernelSource& source, const KernelSpec& spec) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return test::compile_stand_in(source, spec);
        },
        policy);
    testing::internal::CaptureStderr();
    for (int i = 0; i < 3; ++i)
      builder.build(spec_number(first + i));
    return testing::internal::GetCapturedStderr();
  };
  const std::string line = said(std::chrono::milliseconds(30), 10); // of two kernels
  EXPECT_EQ(line.find("sagebwd: compiling kernels for sm_90a, for "), 0u) << line;
  EXPECT_NE(line.find("kept in " + temp.path()), std::string::npos) << line;
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
  EXPECT_EQ(said(std::chrono::hours(1), 20), "");
}

TEST(KernelBuilder, EveryKernelIsLoggedWithWhereItComesFrom) {
  TempDirectory temp;
  CacheStore store(temp.path());
  keep_log_lines();
  take_log_lines();
  EXPECT_FALSE(has_log_lines());
  Bench first(store), second(store);
  first.builder.build(spec_number(1));
  first.builder.build(spec_number(1)); // in memory: no news
  second.builder.build(spec_number(1));
  EXPECT_TRUE(has_log_lines());
  const std::vector<LogLine> lines = take_log_lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[0].compiled && !lines[1].compiled);
  EXPECT_EQ(lines[0].text.find("compiled k1 for sm_90a in "), 0u) << lines[0].text;
  EXPECT_EQ(lines[1].text.find("loaded k1 for sm_90a from " + temp.path() + " in "), 0u)
      << lines[1].text;
  EXPECT_FALSE(has_log_lines());
}

TEST(KernelBuilder, AnotherCompilersEntryIsAHit) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench first(store), second(store);
  second.compiler = "test compiler 2";
  first.builder.build(spec_number(1));
  EXPECT_EQ(second.builder.build(spec_number(1))->entry.compiler, "test compiler 1");
}

TEST(KernelBuilder, ACorruptEntryIsCompiledAgain) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench first(store), second(store), third(store);
  first.builder.build(spec_number(1));
  for (const std::string& file : test::files_in(temp.path()))
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_FALSE(second.builder.build(spec_number(1))->cached);
  EXPECT_EQ(store.counters().heals, 1u);
  EXPECT_TRUE(third.builder.build(spec_number(1))->cached);
}

TEST(KernelBuilder, WhatIsNotToBeKeptStaysInMemory) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  bench.keep = false;
  bench.builder.build(spec_number(1));
  bench.builder.build(spec_number(1));
  EXPECT_EQ(bench.compiles, 1);
  EXPECT_TRUE(test::files_in(temp.path()).empty());
}

TEST(KernelBuilder, WorksWithoutADirectory) {
  TempDirectory temp;
  test::write_text(temp / "file", "");
  CacheStore store(temp / "file");
  Bench bench(store);
  testing::internal::CaptureStderr();
  EXPECT_EQ(bench.builder.build(spec_number(1))->entry.cubin, "cubin of source of k1");
  EXPECT_EQ(bench.builder.build(spec_number(2))->entry.cubin, "cubin of source of k2");
  std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST(KernelBuilder, ManyThreadsCompileOneSpecOnce) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  bench.during_compile = [](const KernelSpec&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  };
  std::vector<KernelBuilder::Built> kernels(8);
  std::vector<std::thread> threads;
  for (KernelBuilder::Built& kernel : kernels)
    threads.emplace_back([&] { kernel = bench.builder.build(spec_number(1)); });
  for (std::thread& thread : threads)
    thread.join();
  EXPECT_EQ(bench.compiles, 1);
  for (const KernelBuilder::Built& kernel : kernels)
    EXPECT_EQ(kernel, kernels[0]);
}

TEST(KernelBuilder, DifferentSpecsCompileAtTheSameTime) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  std::atomic<int> inside{0};
  std::atomic<bool> met{true};
  bench.during_compile = [&](const KernelSpec&) {
    ++inside;
    auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    while (inside < 2)
      if (std::chrono::steady_clock::now() > deadline) {
        met = false;
        return;
      }
  };
  std::thread other([&] { bench.builder.build(spec_number(1)); });
  bench.builder.build(spec_number(2));
  other.join();
  EXPECT_TRUE(met);
}

TEST(KernelBuilder, AFailureReachesEveryWaiterAndIsForgotten) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  bench.during_compile = [](const KernelSpec&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    throw CompileError("no", "log", "source");
  };
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      try {
        bench.builder.build(spec_number(1));
      } catch (const CompileError& error) {
        failures += error.log == "log";
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  EXPECT_EQ(failures, 4);

  bench.during_compile = [](const KernelSpec&) {};
  EXPECT_EQ(bench.builder.build(spec_number(1))->entry.kernel_name, "k1");
}

TEST(KernelBuilder, BuildAllKeepsTheOrderAndBuildsEqualSpecsOnce) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  std::vector<KernelSpec> specs;
  for (int number : {5, 1, 4, 1, 3, 5, 2})
    specs.push_back(spec_number(number));
  std::vector<KernelBuilder::Built> kernels = bench.builder.build_all(specs);
  ASSERT_EQ(kernels.size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i)
    EXPECT_EQ(kernels[i]->spec, specs[i]);
  EXPECT_EQ(bench.compiles, 5);
  EXPECT_TRUE(bench.builder.build_all({}).empty());
}

TEST(KernelBuilder, BuildAllUsesNoMoreThreadsThanTheMachine) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  std::atomic<int> inside{0}, most{0};
  bench.during_compile = [&](const KernelSpec&) {
    int now = ++inside;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);)
      ;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    --inside;
  };
  std::vector<KernelSpec> specs;
  for (int number = 0; number < 40; ++number)
    specs.push_back(spec_number(number));
  bench.builder.build_all(specs);
  EXPECT_LE(most, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
}

TEST(KernelBuilder, BuildAllReportsAFailure) {
  TempDirectory temp;
  CacheStore store(temp.path());
  Bench bench(store);
  bench.during_compile = [](const KernelSpec& spec) {
    if (spec.attention.group_q == 3)
      throw CompileError("k3", "", "");
  };
  std::vector<KernelSpec> specs;
  for (int number = 0; number < 6; ++number)
    specs.push_back(spec_number(number));
  EXPECT_THROW(bench.builder.build_all(specs), CompileError);
}

TEST(KernelSpecHash, EveryFieldSeparatesSpecs) {
  KernelSpec base = spec_number(64);
  std::vector<KernelSpec> others(18, base);
  others[0].kind = KernelKind::backward_dq;
  others[1].pass = Pass::backward;
  others[2].arch = find_arch("sm_80");
  others[3].attention.head_dim = 64;
  others[4].attention.dtype = DType::fp16;
  others[5].attention.causal = Causal::top_left;
  others[6].attention.granularity = Granularity::block;
  others[7].attention.precision = Precision::qk16;
  others[8].attention.smooth_k = false;
  others[9].attention.rotate = false;
  others[10].attention.deterministic = false;
  others[11].attention.group_q = 128;
  others[12].attention.group_kv = 128;
  others[13].tile.block_q = 64;
  others[14].tile.warps = 8;
  others[15].tile.stages = 2;
  others[16].attention.dq_sums = DqSums::fp16;
  others[17].attention.dp_sums = DpSums::fp16;
  for (const KernelSpec& other : others) {
    EXPECT_FALSE(other == base);
    EXPECT_NE(KernelSpecHash()(other), KernelSpecHash()(base));
  }
}

TEST(KeyOf, NamesTheSpecSchemaSourceOptionsAndArchitectureAndNothingElse) {
  const KernelSpec spec = spec_number(1);
  const KernelSource source{"k", "text", 128, 0, {}};
  std::vector<std::pair<std::string, std::string>> expected = labelled(spec);
  expected.emplace_back("schema", "sagebwd kernel 2");
  expected.emplace_back("source", sha256_hex("text"));
  expected.emplace_back("options", key_of(source, spec)["options"]);
  expected.emplace_back("arch", "sm_90a");
  EXPECT_EQ(key_of(source, spec).digest, make_key(expected).digest);
  EXPECT_EQ(key_of({"another", "text", 64, 1, {}}, spec).digest, make_key(expected).digest);
}

TEST(KeyOf, ChangesInOneFieldWithWhateverChanges) {
  auto differing = [](const CacheKey& a, const CacheKey& b) {
    std::vector<std::string> labels;
    for (size_t i = 0; i < a.fields.size(); ++i)
      if (a.fields[i] != b.fields[i])
        labels.push_back(a.fields[i].first);
    return labels;
  };
  const KernelSpec spec = spec_number(1);
  const CacheKey key = key_of({"k", "text", 128, 0, {}}, spec);
  using Labels = std::vector<std::string>;
  EXPECT_EQ(differing(key, key_of({"k", "text ", 128, 0, {}}, spec)), Labels{"source"});
  EXPECT_EQ(differing(key, key_of({"k", "text", 128, 0, {"-G"}}, spec)), Labels{"options"});
  EXPECT_EQ(differing(key, key_of({"k", "text", 128, 0, {}}, spec_number(2))), Labels{"group_q"});
  KernelSpec other = spec;
  other.arch = find_arch("sm_80");
  EXPECT_EQ(differing(key, key_of({"k", "text", 128, 0, {}}, other)), Labels{"arch"});
}

} // namespace
