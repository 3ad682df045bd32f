//===- prebuild_command_test.cpp - The command for a missing kernel --------===//

#include "runtime/prebuild.h"
#include "runtime/prebuild_command.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <sstream>

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

/// What the command line makes of a command of one spec.
WantedOperation operation_of(const std::string& command) {
  std::istringstream words(command);
  std::string word, subcommand;
  words >> word >> subcommand;
  EXPECT_EQ(word + " " + subcommand, "sagebwd prebuild");
  WantedOperation operation{{}, all_archs().front()};
  std::map<std::string, std::function<void(const std::string&)>> options = {
      {"--arch", [&](auto& value) { operation.arch = find_arch(value); }},
      {"--head-dim", [&](auto& value) { operation.spec.head_dim = std::stoi(value); }},
      {"--dtype", [&](auto& value) { operation.spec.dtype = parse_dtype(value); }},
      {"--causal", [&](auto& value) { operation.spec.causal = parse_causal(value); }},
      {"--granularity",
       [&](auto& value) { operation.spec.granularity = parse_granularity(value); }},
      {"--precision", [&](auto& value) { operation.spec.precision = parse_precision(value); }},
      {"--group-q", [&](auto& value) { operation.spec.group_q = std::stoi(value); }},
      {"--group-kv", [&](auto& value) { operation.spec.group_kv = std::stoi(value); }},
      {"--pass", [&](auto& value) { operation.backward = value != "forward"; }},
      {"--records", [](auto&) {}},
      {"--out", [](auto& value) { EXPECT_EQ(value, "FILE"); }},
  };
  while (words >> word) {
    if (word == "--no-smooth-k" || word == "--no-rotate") {
      (word == "--no-rotate" ? operation.spec.rotate : operation.spec.smooth_k) = false;
      continue;
    }
    auto option = options.find(word);
    if (option == options.end()) {
      ADD_FAILURE() << "unknown option " << word;
      return operation;
    }
    std::string value;
    words >> value;
    option->second(value);
  }
  return operation;
}

/// All that differ in anything, and can be built.
std::vector<AttentionSpec> every_spec() {
  std::vector<AttentionSpec> specs;
  for (int head_dim : {64, 128})
    for (DType dtype : {DType::bf16, DType::fp16})
      for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
        for (Granularity granularity : {Granularity::row, Granularity::block})
          for (Precision precision : {Precision::six_of_seven, Precision::qk16})
            for (int flags = 0; flags < 8; ++flags)
              for (int group_kv : {0, 64, 128})
                if (granularity == Granularity::row || group_kv < 128)
                  specs.push_back({head_dim, dtype, causal, granularity, precision, bool(flags & 1),
                                   bool(flags & 2), bool(flags & 4), 0, group_kv});
  return specs;
}

TEST(PrebuildCommand, BuildsAPackThatHoldsTheKernel) {
  size_t kernels_seen = 0;
  std::mt19937 random(3);
  for (const Arch& arch : all_archs())
    for (const AttentionSpec& spec : every_spec()) {
      if (random() % 4) // of some 5000, to keep it short; others each time the list changes
        continue;
      for (Pass pass : {Pass::forward, Pass::backward}) {
        std::vector<KernelSpec> kernels;
        try {
          kernels = kernels_of(pass, spec, arch);
        } catch (const SpecError&) {
          continue; // no kernel that anyone could miss
        }
        for (const KernelSpec& kernel : kernels) {
          const std::string command = prebuild_command(kernel);
          ASSERT_EQ(command, prebuild_command(kernel.attention, kernel.arch));
          const std::vector<KernelSpec> built = kernels_of({operation_of(command)});
          ASSERT_EQ(count_of(built, kernel), 1)
              << command << " does not build " << kernel_name(kernel);
          ++kernels_seen;
        }
      }
    }
  EXPECT_GT(kernels_seen, 5000u);
}

TEST(PrebuildCommand, IsTheShortestForDefaults) {
  EXPECT_EQ(prebuild_command(AttentionSpec(), find_arch("sm_90a")),
            "sagebwd prebuild --arch sm_90a --head-dim 128 --dtype bf16 --causal none --out FILE");
  AttentionSpec spec;
  spec.head_dim = 64;
  spec.dtype = DType::fp16;
  spec.causal = Causal::bottom_right;
  spec.granularity = Granularity::block;
  spec.smooth_k = spec.rotate = false;
  EXPECT_EQ(prebuild_command(spec, find_arch("sm_80")),
            "sagebwd prebuild --arch sm_80 --head-dim 64 --dtype fp16 --causal bottom-right "
            "--granularity block --no-smooth-k --no-rotate --out FILE");
}

TEST(PrebuildCommand, NamesTheForwardAloneWhereNoBackwardFits) {
  AttentionSpec spec;
  spec.granularity = Granularity::block;
  spec.precision = Precision::qk16;
  EXPECT_TRUE(contains(prebuild_command(spec, find_arch("sm_86")), " --pass forward "));
  EXPECT_FALSE(contains(prebuild_command(spec, find_arch("sm_80")), "--pass"));
}

TEST(PrebuildCommand, AsksForTheRecordsOfATunedTile) {
  KernelSpec kernel = kernels_of(Pass::forward, AttentionSpec(), find_arch("sm_80")).back();
  EXPECT_FALSE(contains(prebuild_command(kernel), "--records"));
  kernel.tile.stages = 2;
  EXPECT_TRUE(contains(prebuild_command(kernel), "--records RECORDS --out FILE"));
}

} // namespace
