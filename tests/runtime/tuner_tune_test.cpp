//===- tuner_tune_test.cpp - From candidates to a record --------------------===//
//
// tune() with a stand-in compiler and bench, in real worker processes.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "tests/runtime/tune_fixture.h"

#include <algorithm>

using namespace sagebwd;
using namespace std::chrono_literals;
using test::ScopedVariable;

namespace {

TEST_F(Tune, AFusedBackwardLeavesTheForwardToBeTuned) {
  request_.spec.precision = Precision::gradients16, request_.spec.deterministic = false;
  request_.kernels = tiled_kernels();
  Records records(store());
  const std::vector<Tuned> found = tune(request_, around(records));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found.front().kernel, KernelKind::forward);
  request_.kernels = tiled_kernels(Pass::backward);
  const std::string what = failure<SpecError>([&] { tune(request_, around(records)); });
  EXPECT_NE(what.find("there is nothing to tune: the backward of d128"), std::string::npos) << what;
}

TEST_F(Tune, KeepsTheWinnerWithAllThatWasTried) {
  traits_[kFast] = "ms=0.8";
  const Tuned first = tuned();
  EXPECT_TRUE(first.fresh);
  EXPECT_TRUE(first.kept);
  EXPECT_EQ(first.record.tile, kFast);
  EXPECT_EQ(first.record.default_tile, to_string(default_()));
  EXPECT_EQ(first.record.compiler, compiler_);
  const auto space =
      tiles_worth_trying(KernelKind::forward, resolved(request_.spec), find_arch("sm_80"));
  ASSERT_EQ(first.record.candidates.size(), space.size());
  for (size_t i = 0; i < space.size(); ++i) {
    EXPECT_EQ(first.record.candidates[i].tile, to_string(space[i]));
    EXPECT_EQ(first.record.candidates[i].ms.size(), 5u);
  }
  EXPECT_EQ(first.record.key["gpu"], "Some GPU");
  EXPECT_EQ(first.record.key["bucket"], "q8192 kv8192 full");
  EXPECT_EQ(first.record.key["block_q"], "");

  const Tuned second = tuned();
  EXPECT_FALSE(second.fresh);
  EXPECT_EQ(serialize(second.record), serialize(first.record));
  EXPECT_EQ(workers(), 1u);
  EXPECT_EQ(to_string(chosen(TuneMode::use)), kFast);
}

TEST_F(Tune, WhatDoesNotCompileOrSpillsIsListedByName) {
  traits_["mma 64x128 w4 s2 b2"] = "refused";
  traits_[kFast] = "spills";
  std::map<std::string, std::string> outcomes;
  for (const TriedTile& tried : tuned().record.candidates)
    outcomes[tried.tile] = tried.outcome + (tried.detail.empty() ? "" : ": " + tried.detail);
  EXPECT_EQ(outcomes["mma 64x128 w4 s2 b2"], "not compiled: ptxas has no registers");
  EXPECT_EQ(outcomes[kFast], "spills: 64 bytes");
  EXPECT_EQ(outcomes[to_string(default_())], "timed");
}

TEST_F(Tune, WithoutTheOperationItNamesTheCommandThatBuildsIt) {
  traits_[to_string(default_())] = "missing";
  EXPECT_EQ(failure<OfflineError>([&] { tuned(); }),
            "it is in no place. Where NVRTC is, run: sagebwd prebuild --arch sm_80 --spec '" +
                to_string(*resolved(request_.spec)) +
                "' --out FILE; then name the file in SAGEBWD_CACHE_PACKS");
}

TEST_F(Tune, WithoutACompilerItSaysSoAndKeepsNothing) {
  for (const TileConfig& tile :
       tiles_worth_trying(KernelKind::forward, resolved(request_.spec), find_arch("sm_80")))
    if (tile != default_())
      traits_[to_string(tile)] = "refused";
  const std::string what = failure<TuneError>([&] { tuned(); });
  EXPECT_NE(what.find("no candidate for forward compiles"), std::string::npos) << what;
  EXPECT_NE(what.find("ptxas has no registers"), std::string::npos) << what;
  EXPECT_EQ(chosen(TuneMode::use), default_());
}

TEST_F(Tune, TunesAgainWhenToldToOrForAnotherCompiler) {
  tuned();
  request_.force = true;
  EXPECT_TRUE(tuned().fresh);
  request_.force = false;
  EXPECT_FALSE(tuned().fresh);
  compiler_ = "nvrtc 13.1";
  EXPECT_TRUE(tuned().fresh);
  EXPECT_EQ(tuned().record.compiler, "nvrtc 13.1");
  compiler_ = ""; // a machine without NVRTC takes any
  EXPECT_FALSE(tuned().fresh);
  EXPECT_EQ(workers(), 3u);
}

TEST_F(Tune, EachBucketSpecAndGpuHasARecordOfItsOwn) {
  tuned();
  Records records(store());
  const auto fresh = [&](const TuneSurroundings& surroundings) {
    return tune(request_, surroundings).at(0).fresh;
  };
  request_.problem.seq_q = request_.problem.seq_kv = 5000; // the same bucket
  EXPECT_FALSE(fresh(around(records)));
  request_.problem.seq_kv = 4096;
  EXPECT_TRUE(fresh(around(records)));
  request_.spec.deterministic = false;
  EXPECT_TRUE(fresh(around(records)));
  request_.spec.causal = Causal::top_left;
  EXPECT_TRUE(fresh(around(records)));
  TuneSurroundings other = around(records);
  other.gpu.sm_count = 216;
  EXPECT_TRUE(fresh(other));
  other.gpu.name = "Another GPU";
  EXPECT_TRUE(fresh(other));
  other.gpu.driver = "13.1";
  EXPECT_TRUE(fresh(other));
}

TEST_F(Tune, OnlyNamedTilesCompete) {
  request_.only = {parse_tile(kFast)};
  EXPECT_EQ(tuned().record.candidates.size(), 2u);
  request_.force = true;
  request_.only = {default_()};
  EXPECT_EQ(tuned().record.candidates.size(), 1u);
  request_.kernels = {KernelKind::forward, KernelKind::backward_dkv}; // which it does not suit
  request_.only = {parse_tile(kFast)};
  Records records(store());
  EXPECT_EQ(tune(request_, around(records)).size(), 1u);
}

TEST_F(Tune, AChoiceAmongFewerIsNotTakenForAFullOne) {
  request_.only = {parse_tile(kFast)};
  EXPECT_TRUE(tuned().fresh);
  EXPECT_FALSE(tuned().fresh);
  request_.only = {parse_tile("mma 64x128 w4 s2 b2")}; // did not compete
  EXPECT_TRUE(tuned().fresh);
  request_.only = {};
  EXPECT_TRUE(tuned().fresh);
  EXPECT_FALSE(tuned().fresh);
  request_.only = {parse_tile(kFast)}; // competed among others
  EXPECT_FALSE(tuned().fresh);
  EXPECT_EQ(workers(), 3u);
}

TEST_F(Tune, WhatDoesNotFitOnTheGpuIsSaidBeforeAnythingIsDone) {
  Records records(store());
  TuneSurroundings surroundings = around(records);
  surroundings.gpu.memory_bytes = uint64_t{80} << 30;
  surroundings.build = [](const KernelSpec&) -> std::shared_ptr<const BuiltKernel> {
    throw std::runtime_error("something is built");
  };
  request_.kernels = {KernelKind::backward_dq};
  for (const Problem& problem : {Problem{64, 32, 32, 65536, 65536},
                                 Problem{65535, 65535, 1, int64_t{1} << 30, int64_t{1} << 30}}) {
    request_.problem = problem;
    const std::string what = failure<SpecError>([&] { tune(request_, surroundings); });
    for (const char* part :
         {"backward_dq", "GiB of GPU memory, and Some GPU has 80.0 GiB", "smaller"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
  }
  request_.problem = {1, 32, 32, 8192, 8192};
  EXPECT_EQ(failure<std::runtime_error>([&] { tune(request_, surroundings); }),
            "something is built");
}

TEST_F(Tune, IsInterruptedWhileItCompiles) {
  Records records(store());
  TuneSurroundings surroundings = around(records);
  std::atomic<bool> building{false};
  surroundings.build = [&](const KernelSpec& spec) {
    building = true;
    while (!interrupt_flag()->load())
      std::this_thread::sleep_for(5ms);
    check_interrupt(); // as NVRTC's callback makes a compile end
    return build(spec);
  };
  const ScopedWatch watch([&] {
    if (building)
      throw std::runtime_error("Ctrl-C");
  });
  EXPECT_EQ(failure<std::runtime_error>([&] { tune(request_, surroundings); }), "Ctrl-C");
  EXPECT_TRUE(records.all().empty());
}

TEST_F(Tune, NoCandidateIsWrongUse) {
  request_.only = {parse_tile("wgmma 64x128 w4 s1 b2"), parse_tile("mma 64x128 w4 s9 b2")};
  const std::string what = failure<SpecError>([&] { tuned(); });
  for (const char* part : {"no candidate", "wgmma 64x128 w4 s1 b2", "sm_90a alone", "stages"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
}

} // namespace
