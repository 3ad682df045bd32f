//===- prebuild_command_test.cpp - The command for a missing kernel --------===//

#include "generator/operation.h"
#include "runtime/kernels.h"
#include "runtime/prebuild.h"
#include "runtime/prebuild_command.h"

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/Regex.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

using namespace sagebwd;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Kernels of equal fields are one, whichever spec they are listed under.
bool same(const KernelSpec& a, const KernelSpec& b) {
  return a.arch == b.arch && labelled(a) == labelled(b);
}
long count_of(const std::vector<KernelSpec>& kernels, const KernelSpec& wanted) {
  return std::count_if(kernels.begin(), kernels.end(),
                       [&](const KernelSpec& kernel) { return same(kernel, wanted); });
}

/// Gives what the command line makes of a command of one spec.
WantedOperation operation_of(const std::string& command) {
  llvm::SmallVector<llvm::StringRef> parts;
  const llvm::Regex form(
      "^sagebwd prebuild --arch ([^ ]+) --spec '([^']+)'( --records RECORDS)? --out FILE$");
  if (!form.match(command, &parts)) {
    ADD_FAILURE() << "not understood: " << command;
    return {{}, all_archs().front()};
  }
  return {parse_spec(parts[2]), find_arch(parts[1].str()), /*forward=*/true,
          /*backward=*/true};
}

/// All that differ in anything, and can be built.
std::vector<AttentionSpec> every_spec() {
  std::vector<AttentionSpec> specs;
  for (int head_dim : {64, 128})
    for (DType dtype : {DType::bf16, DType::fp16})
      for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
        for (Granularity granularity : {Granularity::row, Granularity::block})
          for (const auto& [precision, word] : Words<Precision>::all)
            for (int flags = 0; flags < 8; ++flags)
              for (int group_kv : {0, 64, 128})
                for (int sink_keys : {0, 1})
                  if (granularity == Granularity::row || (group_kv < 128 && sink_keys == 0))
                    specs.push_back({head_dim, dtype, causal, granularity, precision,
                                     bool(flags & 1), bool(flags & 2), bool(flags & 4), 0, group_kv,
                                     sink_keys});
  return specs;
}

TEST(PrebuildCommand, BuildsAPackThatHoldsTheOperation) {
  size_t kernels_seen = 0;
  std::mt19937 random(3);
  for (const Arch& arch : all_archs())
    for (const AttentionSpec& spec : every_spec()) {
      if (random() % 16) // of some 27000, to keep it short; others each time the list changes
        continue;
      const std::string command = prebuild_command(resolved(spec), arch);
      EXPECT_FALSE(contains(command, "--records")) << command;
      const std::vector<KernelSpec> built = kernels_of({operation_of(command)});
      for (const KernelSpec& kernel : Operation(resolved(spec), arch).distinct_kernels()) {
        ASSERT_EQ(count_of(built, kernel), 1)
            << command << " does not build " << kernel_name(kernel);
        ++kernels_seen;
      }
    }
  EXPECT_GT(kernels_seen, 5000u);
}

TEST(PrebuildCommand, SaysTheWholeSpec) {
  const Arch& arch = find_arch("sm_90a");
  EXPECT_EQ(prebuild_command(resolved(AttentionSpec()), arch),
            "sagebwd prebuild --arch sm_90a --spec 'd128 bf16 causal=none row 64x128 sink_keys=1 "
            "six-of-seven smooth_k rotate deterministic numerics=5' --out FILE");
}

TEST(PrebuildCommand, AsksForTheRecordsOfATunedTile) {
  const ResolvedSpec spec = resolved(AttentionSpec());
  std::vector<KernelSpec> kernels = Operation(spec, find_arch("sm_80")).kernels(Pass::forward);
  const auto advice = [&] {
    return std::string(of_operation(OfflineError(""), kernels, spec).what());
  };
  EXPECT_FALSE(contains(advice(), "--records"));
  kernels.back().tile.stages = 2;
  EXPECT_TRUE(contains(advice(), "--records RECORDS --out FILE"));
}

} // namespace
