//===- emit_test.cpp - Generated sources, and the golden ones ---------------===//
//
// tests/golden/ holds a few sources as they are generated, so that a change of the generator or of
// a template shows what it changes. SAGEBWD_UPDATE_GOLDEN=1 rewrites them.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "generator/space.h"
#include "tests/cache/temp_directory.h"
#include "tests/generator/specs.h"

#include <regex>

using namespace sagebwd;
using enum KernelKind;

namespace {

std::vector<KernelSpec> sample() {
  std::vector<KernelSpec> kernels;
  for (const char* arch : {"sm_80", "sm_90a", "sm_100"})
    for (const AttentionSpec& spec : test::all_specs())
      for (Pass pass : {Pass::forward, Pass::backward})
        if (spec.group_kv == 0 && spec.causal != Causal::bottom_right)
          for (const KernelSpec& kernel :
               kernels_of(pass, resolved(spec, find_arch(arch)), find_arch(arch)))
            kernels.push_back(kernel);
  return kernels;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

TEST(Emit, IsOneSelfContainedKernelAndDeterministic) {
  for (const KernelSpec& kernel : sample()) {
    const KernelSource source = emit(kernel), again = emit(KernelSpec(kernel));
    ASSERT_EQ(source.text, again.text) << source.name;
    ASSERT_EQ(source.options, again.options) << source.name;
    ASSERT_EQ(occurrences(source.text, "#include"), 0) << source.name;
    ASSERT_EQ(occurrences(source.text, "extern \"C\""), 1) << source.name;
    ASSERT_EQ(occurrences(source.text, source.name + "("), 1) << source.name;
    ASSERT_EQ(occurrences(source.text, "KERNEL("), 0) << source.name;
    ASSERT_EQ(source.text.rfind("// " + source.name + "\n", 0), 0u) << source.name;
    ASSERT_EQ(source.shared_bytes, shared_bytes(kernel.kind, kernel.attention, kernel.tile));
  }
}

TEST(Emit, LaunchesAsManyThreadsAsTheSourceIsWrittenFor) {
  for (const KernelSpec& kernel : sample()) {
    const KernelSource source = emit(kernel);
    ASSERT_GE(source.threads, 32) << source.name;
    ASSERT_LE(source.threads, 1024) << source.name;
    ASSERT_EQ(source.threads % 32, 0) << source.name;
    ASSERT_NE(source.text.find("THREADS = " + std::to_string(source.threads) + ";"),
              std::string::npos)
        << source.name;
    if (definition_of(kernel.kind).tiling) {
      ASSERT_EQ(source.threads, kernel.tile.warps * 32) << source.name;
    }
  }
}

TEST(Emit, DeclaresTheParametersThatThePlanPacks) {
  const Arch& arch = find_arch("sm_80");
  for (const KernelSpec& kernel : distinct_kernels(resolved(AttentionSpec(), arch), arch)) {
    std::string expected = "struct Params {\n";
    for (const Field& f : fields_of(kernel.kind))
      expected += "  " + std::string(type_of(f.operand)) + " " + std::string(f.name) + ";\n";
    EXPECT_EQ(occurrences(emit(kernel).text, expected + "};\n"), 1) << to_string(kernel.kind);
  }
}

TEST(Emit, TilesThatDoNotSuitAreRefused) {
  KernelSpec kernel = test::kernel_of(backward_dq, Pass::backward, {}, "sm_86");
  kernel.tile = parse_tile("mma 128x64 w8 s2 b1");
  test::expect_refusal([&] { emit(kernel); },
                       {"'mma 128x64 w8 s2 b1'", "backward_dq", "sm_86", "bytes of shared memory"});
}

TEST(Emit, ReadsTemplatesFromAFolderWhereOneIsNamed) {
  const KernelSpec kernel = test::kernel_of(forward, Pass::forward, {}, "sm_80");
  const std::string embedded = emit(kernel).text;
  {
    test::ScopedVariable folder("SAGEBWD_TEMPLATE_DIR", SAGEBWD_SOURCE_DIR "/templates");
    EXPECT_EQ(emit(kernel).text, embedded) << "the embedded templates are stale: build again";
  }
  test::ScopedVariable nowhere("SAGEBWD_TEMPLATE_DIR", "/nowhere");
  test::expect_refusal([&] { emit(kernel); }, {"base.cuh", "SAGEBWD_TEMPLATE_DIR", "'/nowhere'"});
}

struct Golden {
  KernelKind kind;
  Pass pass;
  const char* arch;
  AttentionSpec spec;
};

const Golden kGolden[] = {
    {forward, Pass::forward, "sm_80", {64, DType::bf16, Causal::top_left}},
    {backward_dkv, Pass::backward, "sm_90a", {128}},
    {backward_dq, Pass::backward, "sm_120", {128, DType::fp16, Causal::none, Granularity::block}},
    {quantize_q, Pass::backward, "sm_80", {64}},
    {key_mean_partial, Pass::forward, "sm_80", {128}},
};

TEST(Golden, SourcesAreUnchanged) {
  for (const Golden& golden : kGolden) {
    const KernelSource source =
        emit(test::kernel_of(golden.kind, golden.pass, golden.spec, golden.arch));
    const std::string name = source.name.substr(std::string("sagebwd_").size()) + ".cu";
    const std::string path = SAGEBWD_SOURCE_DIR "/tests/golden/" + name;
    if (std::getenv("SAGEBWD_UPDATE_GOLDEN"))
      test::write_text(path, source.text);
    const std::string kept = test::read_text(path);
    if (kept == source.text)
      continue;
    size_t line = 1;
    for (size_t i = 0; i < kept.size() && kept[i] == source.text[i]; ++i)
      line += kept[i] == '\n';
    ADD_FAILURE() << "tests/golden/" << name
                  << (kept.empty() ? " is missing"
                                   : " differs from line " + std::to_string(line) + " on")
                  << ". If the change is meant, run this test with SAGEBWD_UPDATE_GOLDEN=1, "
                     "review `git diff tests/golden` and remove what is no longer written.";
  }
}

} // namespace
