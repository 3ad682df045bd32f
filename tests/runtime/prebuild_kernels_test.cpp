//===- prebuild_kernels_test.cpp - What a pack is to hold ------------------===//

#include "generator/choice.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/generate.h"
#include "runtime/kernels.h"
#include "tests/runtime/prebuild_requests.h"

#include <gtest/gtest.h>

#include <set>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

TEST(PrebuildKernels, AreThoseOfEachPassOnceInAFixedOrder) {
  std::vector<WantedOperation> operations = some_operations();
  const std::vector<KernelSpec> kernels = kernels_of(operations);
  for (const WantedOperation& operation : operations)
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& kernel :
           Operation(resolved(operation.spec), operation.arch).kernels(pass))
        EXPECT_EQ(count_of(kernels, kernel), 1) << kernel_name(kernel);
  std::reverse(operations.begin(), operations.end());
  operations.push_back(operations.front());
  const std::vector<KernelSpec> again = kernels_of(operations);
  EXPECT_TRUE(std::equal(again.begin(), again.end(), kernels.begin(), kernels.end(), same));
}

TEST(PrebuildKernels, AreFoundByKeysOfThisVersionAndOfNoOther) {
  for (const Arch& arch : all_archs())
    for (int head_dim : {40, 64, 128})
      for (int block : {0, 64}) {
        AttentionSpec spec;
        spec.head_dim = head_dim, spec.sparse_q = 2 * block, spec.sparse_kv = block;
        spec.packed = block == 0 && head_dim == 40;
        spec.smooth_q = block == 0 && !spec.packed;
        std::vector<KernelSpec> kernels = Operation(resolved(spec), arch).distinct_kernels();
        for (const KernelSpec& kernel : kernels_beside(resolved(spec), arch))
          kernels.push_back(kernel);
        for (const KernelSpec& kernel : kernels) {
          const CacheKey key = key_of(generate(kernel), kernel);
          EXPECT_TRUE(is_current(key)) << kernel_name(kernel) << " on " << arch.name;
          std::vector<std::pair<std::string, std::string>> fields = key.fields;
          fields.emplace_back("a_later_field", "1");
          EXPECT_FALSE(is_current(make_key(fields)));
        }
      }
  const KernelSpec spec = kernels_of({operation("sm_90a")}).front();
  EXPECT_FALSE(is_current(key_of({"k", "another source", 128, 0, {}}, spec)));
  for (const char* head_dim : {"0", "72", "512", "-64", "none", ""}) {
    std::vector<std::pair<std::string, std::string>> fields = labelled(spec);
    for (auto& [label, value] : fields)
      value = label == "head_dim" ? head_dim : value;
    fields.emplace_back("arch", "sm_90a");
    EXPECT_FALSE(is_current(make_key(fields))) << head_dim;
  }
}

TEST(PrebuildKernels, OnePassAlone) {
  WantedOperation forward = operation();
  forward.backward = false;
  for (const KernelSpec& kernel : kernels_of({forward}))
    EXPECT_EQ(kernel.pass, Pass::forward);
  EXPECT_LT(kernels_of({forward}).size(), kernels_of({operation()}).size());
}

TEST(PrebuildKernels, AreThoseOfAFusedBackwardWhereThatIsTheDefault) {
  const auto kinds_on = [](const Arch& arch, Precision precision) {
    WantedOperation asked = operation(arch.name.data());
    asked.spec.precision = precision, asked.spec.deterministic = false;
    if (arch.name == "sm_90a") // where it is split at 64
      asked.spec.head_dim = 128;
    std::set<KernelKind> kinds;
    for (const KernelSpec& kernel : kernels_of({asked}))
      kinds.insert(kernel.kind);
    return kinds;
  };
  using enum KernelKind;
  std::set<KernelKind> fused = {key_mean, quantize, forward, backward, round_dq},
                       split = {key_mean, quantize, forward, backward_dq, backward_dkv};
  for (std::set<KernelKind>* kinds : {&fused, &split})
    kinds->insert({front, front_gradients, front_gains, gate, gate_gradients});
  for (const Arch& arch : all_archs()) {
    EXPECT_EQ(kinds_on(arch, Precision::gradients16), fused) << arch.name;
    EXPECT_EQ(kinds_on(arch, Precision::dv16), split) << arch.name;
  }
}

/// Norm, RoPE and gates of an operation's tensors have the same kernels whatever its other options
/// are.
TEST(PrebuildKernels, HoldThoseOfNormRopeAndGates) {
  using enum KernelKind;
  for (int head_dim : {40, 64, 128, 256})
    for (DType dtype : {DType::bf16, DType::fp16}) {
      std::vector<WantedOperation> asked(4, operation("sm_90a", head_dim));
      asked[1].spec.packed = true;
      asked[2].spec.causal = Causal::top_left;
      asked[3].spec.sparse_q = 128, asked[3].spec.sparse_kv = 64;
      for (WantedOperation& one : asked) {
        one.spec.dtype = dtype;
        const std::vector<KernelSpec> kernels = kernels_of({one});
        for (KernelKind kind : {front, front_gradients, front_gains, gate, gate_gradients})
          EXPECT_EQ(count_of(kernels, kernel_of(kind, Pass::forward,
                                                *resolved({.head_dim = head_dim, .dtype = dtype}),
                                                one.arch, {})),
                    1)
              << head_dim << " " << to_string(kind);
      }
      const std::vector<KernelSpec> of_all = kernels_of(asked);
      EXPECT_EQ(std::count_if(of_all.begin(), of_all.end(),
                              [](const KernelSpec& k) { return k.kind == front; }),
                1);
    }
}

TEST(PrebuildKernels, RecordsOfASplitBackwardAreNotAFusedOnes) {
  WantedOperation asked = operation();
  asked.spec.precision = Precision::gradients16, asked.spec.deterministic = false;
  const TuningRecord split =
      record_of(asked, KernelKind::backward_dq, {Family::mma, 128, 128, 8, 1, 1});
  EXPECT_TRUE(records_of({asked}, {split}).empty());
  asked.spec.precision = Precision::dv16; // which is split
  const TuningRecord used =
      record_of(asked, KernelKind::backward_dq, {Family::mma, 128, 128, 8, 1, 1});
  EXPECT_EQ(records_of({asked}, {used}).size(), 1u);
}

TEST(PrebuildKernels, RecordsAddTheirTilesForWhatIsAskedFor) {
  const WantedOperation asked = operation("sm_80", 64, Causal::bottom_right);
  const TileConfig tuned = {Family::mma, 128, 128, 8, 2, 1};
  const TuningRecord record = record_of(asked, KernelKind::forward, tuned);
  const TuningRecord other = record_of(operation("sm_120"), KernelKind::forward, tuned);
  EXPECT_EQ(records_of({asked}, {other, record}).size(), 1u);
  const std::vector<KernelSpec> kernels = kernels_of({asked}, {other, record});
  EXPECT_EQ(kernels.size(), kernels_of({asked}).size() + 1);
  EXPECT_EQ(std::count_if(kernels.begin(), kernels.end(),
                          [&](const KernelSpec& kernel) { return kernel.tile == tuned; }),
            1);
  // The default's own record adds no kernel.
  const TileConfig plain = default_tile(KernelKind::forward, resolved(asked.spec), asked.arch);
  const TuningRecord same = record_of(asked, KernelKind::forward, plain);
  EXPECT_EQ(records_of({asked}, {same}).size(), 1u);
  EXPECT_TRUE(kernels_of({asked}, {same}) == kernels_of({asked}));
}

TEST(PrebuildKernels, RecordsOfOtherTemplatesAreLeftOut) {
  TuningRecord record =
      record_of(operation(), KernelKind::forward, {Family::mma, 128, 128, 8, 2, 1});
  EXPECT_EQ(records_of({operation()}, {record}).size(), 1u);
  auto fields = record.key.fields;
  for (auto& [label, value] : fields)
    if (label == "source")
      value = sha256_hex("another");
  record.key = make_key(fields);
  EXPECT_TRUE(records_of({operation()}, {record}).empty());
}

TEST(PrebuildKernels, RecordsThatCannotBeUsedAreNamed) {
  TuningRecord record =
      record_of(operation(), KernelKind::forward, {Family::mma, 64, 128, 4, 1, 2});
  for (const char* tile : {"banana", "wgmma 64x128 w4 s1 b2", "mma 72x128 w4 s1 b2"}) {
    record.tile = tile;
    std::string what = message_of([&] { kernels_of({operation()}, {record}); });
    EXPECT_TRUE(contains(what, record.key.digest)) << what;
  }
  record.key = make_key({{"schema", kTuningSchema}});
  EXPECT_TRUE(contains(message_of([&] { records_of({operation()}, {record}); }), "head_dim"));
}

} // namespace
