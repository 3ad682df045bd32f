//===- tuner_test.cpp - Tuning on a real GPU -------------------------------===//
//
// With kernels among the candidates that fault, never end and compute something else. The worker
// is this executable again.
//
//===----------------------------------------------------------------------===//
#include "generator/choice.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/tuner/selection.h"
#include "runtime/tuner/tuner.h"
#include "runtime/tuner/worker/gpu_bench.h"
#include "tests/cache/temp_directory.h"
#include "tests/gpu/operation.h"

#include <filesystem>

using namespace sagebwd;
using namespace std::chrono_literals;

namespace {

/// This executable again as a command, whatever shard of the tests this one runs.
std::vector<std::string> again() {
  return {"/usr/bin/env",
          "-u",
          "GTEST_TOTAL_SHARDS",
          "-u",
          "GTEST_SHARD_INDEX",
          std::filesystem::read_symlink("/proc/self/exe").string(),
          "--gtest_filter=TunerWorkerOnGpu.*"};
}

constexpr const char* kWorkerVariable = "SAGEBWD_TEST_WORKER";
const std::vector<KernelKind>& kKinds = tiled_kernels();

TEST(TunerWorkerOnGpu, RefusesToBeStartedByHand) {
  if (std::getenv(kWorkerVariable))
    ::_exit(tune_worker_main());
  test::ScopedVariable worker(kWorkerVariable, "1");
  std::string command;
  for (const std::string& word : again())
    command += "'" + word + "' ";
  command += "< /dev/null > /dev/null 2>&1";
  EXPECT_EQ(std::system(command.c_str()) >> 8, 2);
}

class TunerOnGpu : public test::OnGpu {
protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped())
      return;
    gpu_ = gpu_of(0);
    request_.worker = again();
    request_.spec = *resolved(request_.spec);
    request_.problem = {1, 4, 2, 1024, 1024};
    request_.limits.rounds = 9;
  }
  std::vector<Tuned> tuned() {
    return tune(request_, {records_, gpu_, [](const KernelSpec& spec) { return build(spec); },
                           [] { return Nvrtc::instance().identity(); }});
  }
  BenchKernel kernel(const KernelSpec& spec) const {
    const auto built = build(spec);
    return {spec, built->entry.kernel_name, built->entry.cubin, built->threads,
            built->shared_bytes};
  }
  /// A kernel that takes the place of one with the given spec.
  BenchKernel injected(const KernelSpec& spec, const std::string& body) const {
    const std::string source = "struct Params { long long words[4]; };\n"
                               "extern \"C\" __global__ void injected(const Params p) {\n" +
                               body + "\n}\n";
    const Compilation made =
        Nvrtc::instance().compile("injected", source, gpu_.arch.name, false, {});
    return {spec, "injected", made.cubin, 128, 0};
  }

  test::ScopedVariable worker_{kWorkerVariable, "1"};
  test::TempDirectory temp_;
  CacheStore store_{StoreOptions{temp_ / "cache", {}}};
  Records records_{store_};
  Gpu gpu_;
  TuneRequest request_;
};

TEST_F(TunerOnGpu, FaultsHangsAndLiesCostThemselvesOnly) {
  BenchSetup setup;
  request_.spec.causal = Causal::top_left;
  setup.spec = resolved(request_.spec);
  setup.problem = request_.problem;
  setup.kind = KernelKind::forward;
  for (const KernelSpec& spec : Operation(setup.spec, gpu_.arch).kernels(Pass::forward))
    setup.operation.push_back(kernel(spec));
  const KernelSpec by_default = setup.operation.back().spec;
  KernelSpec other = by_default;
  other.tile = tiles_worth_trying(KernelKind::forward, setup.spec, gpu_.arch).back();
  // Another operation's kernel: right of itself, wrong here. (The other way round it is right: a
  // causal kernel's edges are arguments, and those of attention to all hide nothing.)
  KernelSpec dense = by_default;
  dense.attention.causal = Causal::none;

  std::vector<tuner::Candidate> candidates;
  const auto add = [&](const char* name, BenchKernel kernel) {
    candidates.emplace_back();
    candidates.back().kernel = std::move(kernel);
    candidates.back().tried.tile = name;
  };
  add("default", kernel(by_default));
  add("faults", injected(by_default, "asm volatile(\"st.global.u32 [%0], %1;\" :: \"l\"(16ull), "
                                     "\"r\"(1) : \"memory\");"));
  add("writes nothing", injected(by_default, ""));
  add("never ends", injected(by_default, "while (clock64() != 1) asm volatile(\"nanosleep.u32 "
                                         "1000;\" ::: \"memory\");"));
  add("computes something else", kernel(dense));
  add("no machine code", injected(by_default, ""));
  candidates.back().kernel.cubin = "nonsense";
  add("another tile", kernel(other));

  tuner::TrialLimits limits;
  limits.vet = 5000ms;
  run_trials(request_.worker, setup, candidates, limits);
  const auto outcome = [&](size_t i) {
    return candidates[i].tried.outcome + (i % 6 ? ": " + candidates[i].tried.detail : "");
  };
  EXPECT_EQ(outcome(0), "timed");
  EXPECT_NE(outcome(1).find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome(1);
  EXPECT_EQ(outcome(2), "wrong: out is not wholly written");
  EXPECT_EQ(outcome(3).substr(0, 5), "hung:") << outcome(3);
  EXPECT_EQ(outcome(4).substr(0, 23), "wrong: out differs from") << outcome(4);
  EXPECT_EQ(outcome(5).substr(0, 7), "failed:") << outcome(5);
  EXPECT_EQ(outcome(6), "timed");
  for (size_t i : {0, 6}) {
    EXPECT_EQ(candidates[i].tried.ms.size(), 15u);
    EXPECT_GT(candidates[i].tried.median_ms, 0.001);
    EXPECT_LT(candidates[i].tried.mad_ms, candidates[i].tried.median_ms);
  }
  // This process's context has not noticed.
  Attention attention(request_.spec);
  test::run(attention, reference::random_inputs({1, 1, 1, 128, 128}, request_.spec.head_dim,
                                                request_.spec.dtype, 1.0, 1));
}

/// Outputs with every candidate that deterministic lets take part, against the default's.
void expect_same_bits(const AttentionSpec& spec, const std::vector<Tuned>& kernels) {
  const Problem problem = {1, 4, 2, 333, 500};
  const reference::Inputs in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1.0, 5);
  Attention by_default(spec, 0, Tiles{});
  const reference::Outputs<float> expected = test::run(by_default, in);
  for (const Tuned& kernel : kernels)
    for (const TriedTile& tried : kernel.record.candidates) {
      if (tried.outcome != "timed")
        continue;
      SCOPED_TRACE(std::string(to_string(kernel.kernel)) + " " + tried.tile);
      Attention attention(spec, 0, Tiles{{kernel.kernel, parse_tile(tried.tile)}});
      test::expect_identical(test::run(attention, in), expected);
    }
}

TEST_F(TunerOnGpu, WhateverWinsTheBitsAreTheDefaults) {
  for (int head_dim : {64, 128})
    for (Granularity granularity : {Granularity::row, Granularity::block}) {
      AttentionSpec spec;
      spec.head_dim = head_dim;
      spec.granularity = granularity;
      request_.spec = *resolved(spec);
      const std::vector<Tuned> kernels = tuned();
      EXPECT_EQ(kernels.size(), 3u);
      expect_same_bits(request_.spec, kernels);
    }
}

TEST_F(TunerOnGpu, NotDeterministicItDiffersByTheOrderOfSumsAtMost) {
  request_.spec.deterministic = false;
  const reference::Inputs in = reference::random_inputs({1, 4, 2, 512, 512}, request_.spec.head_dim,
                                                        request_.spec.dtype, 1.0, 5);
  Attention by_default(request_.spec, 0, Tiles{});
  const reference::Outputs<float> expected = test::run(by_default, in);
  for (const Tuned& kernel : tuned())
    for (const TriedTile& tried : kernel.record.candidates) {
      EXPECT_NE(tried.outcome, "inexact");
      if (tried.outcome != "timed")
        continue;
      SCOPED_TRACE(std::string(to_string(kernel.kernel)) + " " + tried.tile);
      Attention attention(request_.spec, 0, Tiles{{kernel.kernel, parse_tile(tried.tile)}});
      const reference::Outputs<float> outputs = test::run(attention, in);
      EXPECT_LE(test::distance(outputs.o, expected.o).relative(), kLargestRelL2);
      EXPECT_LE(test::distance(outputs.dq, expected.dq).relative(), kLargestRelL2);
      EXPECT_LE(test::distance(outputs.dk, expected.dk).relative(), kLargestRelL2);
      EXPECT_LE(test::distance(outputs.dv, expected.dv).relative(), kLargestRelL2);
    }
}

TEST_F(TunerOnGpu, TwoInARowChooseTheSameOrEqualTiles) {
  request_.problem = {1, 16, 16, 2048, 2048};
  request_.limits.rounds = 15;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Tuned> first = tuned();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  request_.force = true;
  const std::vector<Tuned> second = tuned();
  for (size_t i = 0; i < first.size(); ++i) {
    const TuningRecord &a = first[i].record, &b = second[i].record;
    EXPECT_TRUE(first[i].fresh && second[i].fresh);
    const auto timing = [](const TuningRecord& record, const std::string& tile) {
      for (const TriedTile& tried : record.candidates)
        if (tried.tile == tile)
          return Timing{tried.median_ms, tried.mad_ms};
      return Timing{};
    };
    // By each run's own timings, what the other chose is as good.
    for (const TuningRecord& record : {a, b}) {
      const Timing x = timing(record, a.tile), y = timing(record, b.tile);
      EXPECT_LE(std::abs(x.median_ms - y.median_ms), 2 * margin_ms(x, y))
          << to_string(first[i].kernel) << ": " << a.tile << " and " << b.tile;
    }
    std::printf("%s: %s, then %s; the default %s\n", a.key["kind"].c_str(), a.tile.c_str(),
                b.tile.c_str(), a.default_tile.c_str());
  }
  std::printf("one operation tuned in %.1f s\n", seconds);
  EXPECT_LT(seconds, 60);
}

TEST_F(TunerOnGpu, MoreMemoryThanThereIsIsAnError) {
  request_.problem = {1024, 64, 64, 65536, 65536};
  try {
    tuned();
    FAIL() << "it was tuned";
  } catch (const SpecError& error) {
    EXPECT_NE(std::string(error.what()).find("GiB of GPU memory, and"), std::string::npos)
        << error.what();
  }
}

} // namespace
