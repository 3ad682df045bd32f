//===- emit_test.cpp - Generated sources, and the golden ones ---------------===//
//
// tests/golden/kernels.txt says of a few sources what the generator itself writes: constants,
// parameters and which templates stand around them. SAGEBWD_UPDATE_GOLDEN=1 rewrites it.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/generate.h"
#include "runtime/settings.h"
#include "tests/cache/temp_directory.h"
#include "tests/generator/specs.h"

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>

using namespace sagebwd;
using enum KernelKind;

namespace {

std::vector<KernelSpec> sample() {
  std::vector<KernelSpec> kernels;
  test::Distinct distinct;
  for (const char* arch : {"sm_80", "sm_90a", "sm_100"})
    for (const AttentionSpec& spec : test::all_specs())
      for (Pass pass : {Pass::forward, Pass::backward})
        if (spec.group_kv == 0 && spec.causal != Causal::bottom_right)
          for (const KernelSpec& kernel : Operation(resolved(spec), find_arch(arch)).kernels(pass))
            if (distinct.insert(kernel))
              kernels.push_back(kernel);
  return kernels;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

/// The lines between a banner and the end of the parameters.
std::string configuration_of(const std::string& text) {
  const size_t from = text.find("//===- configuration.cuh"), params = text.find("struct Params {");
  return text.substr(from, text.find("};\n", params) + 3 - from);
}

/// The templates of a source, by their banners, in order.
std::vector<std::string> templates_in_text(const std::string& text) {
  const std::string start = "//===- ";
  std::vector<std::string> paths;
  for (size_t at = 0; (at = text.find(start, at)) != text.npos;) {
    const bool begins = at == 0 || text[at - 1] == '\n';
    const std::string line = text.substr(at, text.find('\n', at) - at);
    at += line.size();
    if (const size_t end = line.find(".cuh - "); begins && end != line.npos)
      paths.push_back(line.substr(start.size(), end + 4 - start.size()));
  }
  return paths;
}

/// How the line begins that stands above a template in the place of another one.
constexpr std::string_view kInPlace = "// In the place of ";

/// A statement of the entry itself, under no condition.
TEST(Emit, EveryKernelWaitsForTheOneBefore) {
  for (const KernelSpec& kernel : sample()) {
    const std::string text = emit(kernel).text;
    std::string entry = text.substr(text.find("extern \"C\" __global__"));
    if (const size_t roles = text.find("//===- tile/walk/roles.cuh"); roles != std::string::npos) {
      EXPECT_EQ(occurrences(entry, "  run_roles<"), 1) << emit(kernel).name;
      entry += text.substr(roles, text.find("\n//===- ", roles) - roles);
    }
    EXPECT_EQ(occurrences(entry, ";\n  begin_in_stream_order();\n") +
                  occurrences(entry, "}\n  begin_in_stream_order();\n") +
                  occurrences(entry, "{\n  begin_in_stream_order();\n"),
              1)
        << emit(kernel).name;
  }
}

TEST(Emit, IsOneSelfContainedKernelAndDeterministic) {
  for (const KernelSpec& kernel : sample()) {
    const KernelSource source = emit(kernel), again = emit(KernelSpec(kernel));
    ASSERT_EQ(source.text, again.text) << source.name;
    ASSERT_EQ(source.options, again.options) << source.name;
    ASSERT_EQ(occurrences(source.text, "#include"), 0) << source.name;
    ASSERT_EQ(occurrences(source.text, "#pragma once"), 0) << source.name;
    ASSERT_EQ(occurrences(source.text, "extern \"C\" __global__"), 1) << source.name;
    ASSERT_EQ(occurrences(source.text, source.name + "("), 1) << source.name;
    ASSERT_EQ(occurrences(source.text, "KERNEL("), 0) << source.name;
    ASSERT_EQ(source.text.rfind("// " + source.name + "\n", 0), 0u) << source.name;
    ASSERT_EQ(source.shared_bytes, shared_bytes(kernel));
  }
}

TEST(Emit, IsAConfigurationAmongWholeTemplates) {
  std::map<std::string, std::string> alone; // each template, without what it includes
  for (const auto& [path, text] : embedded_templates())
    alone[std::string(path)] = expanded(path, [&](std::string_view wanted) {
      return wanted == path ? embedded_template(path) : std::string();
    });
  for (const KernelSpec& kernel : sample()) {
    const KernelSource source = emit(kernel);
    size_t bytes = source.text.find("//===-");
    for (const std::string& path : templates_in_text(source.text)) {
      std::string part =
          path == "configuration.cuh" ? configuration_of(source.text) : alone.at(path);
      if (const size_t at = part.find("KERNEL("); at != part.npos)
        part.replace(at, 6, source.name);
      if (source.text.compare(bytes, kInPlace.size(), kInPlace) == 0)
        bytes = source.text.find('\n', bytes) + 1;
      ASSERT_EQ(source.text.compare(bytes, part.size(), part), 0) << source.name << " of " << path;
      bytes += part.size() + 1; // a blank line between each two
    }
    ASSERT_EQ(bytes, source.text.size() + 1) << source.name;
  }
}

/// A kernel has one of the two, whose banner follows the line that names the other.
TEST(Emit, NamesWhatStandsInThePlaceOfAnotherTemplate) {
  std::vector<KernelSpec> kernels = sample();
  AttentionSpec listed;
  listed.head_dim = 64, listed.sparse_q = 128, listed.sparse_kv = 64;
  listed.linear = LinearKeys::all;
  AttentionSpec between, spoken;
  between.intervals = 2;
  spoken.mask = "q >= k", spoken.score = "tanh(s)";
  for (const AttentionSpec& spec : {listed, between, spoken, test::with_half_dp()})
    for (const KernelSpec& kernel :
         Operation(resolved(spec), find_arch("sm_80")).distinct_kernels())
      kernels.push_back(kernel);
  std::map<std::string, std::string> instead;
  for (const KernelSpec& kernel : kernels) {
    const std::string text = emit(kernel).text;
    const std::vector<std::string> there = templates_in_text(text);
    const std::string start = "\n" + std::string(kInPlace);
    for (size_t at = text.find(start); at != text.npos; at = text.find(start, at + 1)) {
      const size_t name = at + start.size(), end = text.find('\n', name);
      const std::string other = text.substr(name, text.find(", as ", name) - name);
      EXPECT_NE(embedded_template(other), "");
      EXPECT_EQ(std::count(there.begin(), there.end(), other), 0) << emit(kernel).name;
      instead[other] = templates_in_text(text.substr(end + 1)).front();
    }
  }
  EXPECT_EQ(instead,
            (std::map<std::string, std::string>{
                {"tile/math/dp_sums.cuh", "tile/math/dp_sums16.cuh"},
                {"tile/math/family.cuh", "tile/math/products_wgmma.cuh"},
                {"tile/prepass/whole_dout.cuh", "tile/prepass/shared_dout.cuh"},
                {"tile/math/plain_score.cuh", "tile/math/given_score.cuh"},
                {"tile/walk/hidden.cuh", "tile/walk/hidden_anywhere.cuh"},
                {"tile/walk/hidden_by_intervals.cuh", "tile/walk/hidden_by_expression.cuh"},
                {"tile/walk/own_keys.cuh", "tile/walk/own_keys_in_order.cuh"},
                {"tile/walk/tiles.cuh", "tile/walk/listed_tiles.cuh"},
                {"tile/walk/visible.cuh", "tile/walk/lists.cuh"},
            }));
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
      const Roles roles = kernel.tile.family.roles();
      const int copying = roles == Roles::copier || roles == Roles::pairs ? 128 : 0;
      ASSERT_EQ(source.threads, kernel.tile.warps * 32 + copying) << source.name;
      ASSERT_GT(source.shared_bytes, 0) << "the kernel would not compare its own with it";
    }
  }
}

TEST(Emit, DeclaresTheParametersThatThePlanPacks) {
  const Arch& arch = find_arch("sm_80");
  for (const KernelSpec& kernel : Operation(resolved(AttentionSpec()), arch).distinct_kernels()) {
    std::string expected = "struct Params {\n";
    for (Operand f : fields_of(kernel))
      expected += "  " + std::string(type_of(f)) + " " + std::string(name_of(f)) + ";\n";
    EXPECT_EQ(occurrences(emit(kernel).text, expected + "};\n"), 1) << to_string(kernel.kind);
  }
}

TEST(Emit, TilesThatDoNotSuitAreRefused) {
  KernelSpec kernel =
      test::kernel_of(backward_dq, Pass::backward, {.gradient_kernels = Backward::split}, "sm_86");
  kernel.tile = parse_tile("mma 128x128 w8 s2 b1");
  test::expect_refusal([&] { emit(kernel); }, {"'mma 128x128 w8 s2 b1'", "backward_dq", "sm_86",
                                               "bytes of shared memory"});
}

TEST(Emit, ReadsTemplatesFromAFolderWhereOneIsNamed) {
  const KernelSpec kernel = test::kernel_of(forward, Pass::forward, {}, "sm_80");
  const KernelSource embedded = emit(kernel);
  EXPECT_EQ(emit(kernel, templates_in(SAGEBWD_SOURCE_DIR "/templates")).text, embedded.text)
      << "the embedded templates are stale: build again";
  test::TempDirectory folder;
  std::filesystem::create_directory(folder / "kernels");
  test::write_text(folder / "kernels/forward.cuh", "void KERNEL(int);\n");
  test::ScopedVariable named("SAGEBWD_TEMPLATE_DIR", folder.path());
  EXPECT_EQ(emit(kernel).text, embedded.text) << "the generator reads no environment";
  EXPECT_EQ(Settings::from_environment().template_dir, folder.path());
  EXPECT_NE(
      emit(kernel, templates_in(folder.path())).text.find("void " + embedded.name + "(int);\n"),
      std::string::npos);
  test::expect_refusal([&] { emit(kernel, templates_in("/nowhere")); },
                       {"kernels/forward.cuh", "SAGEBWD_TEMPLATE_DIR", "'/nowhere'"});
}

TEST(Templates, StandOnceAndAfterWhatTheyInclude) {
  const std::map<std::string, std::string, std::less<>> files = {
      {"a", "// a\n#pragma once\n\n#include \"b\"\n#include \"c\"\n\nint a;\n"},
      {"b", "// b\n#pragma once\n\n#include \"c\"\n\nint b;\n\n\nint b2;"},
      {"c", "#include \"a\"\n// \"c\"\n"},
      {"lost", "#include \"nowhere\"\n"}};
  const TemplateSource source = [&](std::string_view path) {
    const auto at = files.find(path);
    return at != files.end() ? at->second : embedded_template(path);
  };
  EXPECT_EQ(expanded("a", source), "// \"c\"\n\n// b\n\nint b;\n\nint b2;\n\n// a\n\nint a;\n");
  test::expect_refusal([&] { expanded("lost", source); }, {"no template 'nowhere'"});
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
    {quantize, Pass::backward, "sm_80", {64}},
    {key_mean, Pass::forward, "sm_80", {128}},
    {backward_dkv, Pass::backward, "sm_80", test::with_half_dp()},
    {forward, Pass::forward, "sm_90a", {.head_dim = 128, .max_logits = true}},
};

/// A file of tests/golden that is `text`, or is to be written anew.
void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = SAGEBWD_SOURCE_DIR "/tests/golden/" + name;
  if (std::getenv("SAGEBWD_UPDATE_GOLDEN"))
    test::write_text(path, text);
  const std::string kept = test::read_text(path);
  if (kept == text)
    return;
  size_t line = 1;
  for (size_t i = 0; i < kept.size() && kept[i] == text[i]; ++i)
    line += kept[i] == '\n';
  ADD_FAILURE() << "tests/golden/" << name
                << (kept.empty() ? " is missing"
                                 : " differs from line " + std::to_string(line) + " on")
                << ". If the change is meant, run this test with SAGEBWD_UPDATE_GOLDEN=1, "
                   "review `git diff tests/golden` and remove what is no longer written.";
}

/// A source has this of each name: a value, or a mark.
using Column = std::vector<std::pair<std::string, std::string>>;

/// A row for each name and a column for each source; "-" where it has none of that name.
std::string table_of(const std::vector<Column>& columns) {
  std::vector<std::string> names;
  for (const Column& column : columns) {
    auto place = names.begin(); // a new name stands behind the one before it
    for (const auto& [name, cell] : column) {
      auto found = std::find(names.begin(), names.end(), name);
      if (found == names.end())
        found = names.insert(place, name);
      place = found + 1;
    }
  }
  std::ostringstream text;
  for (const std::string& name : names) {
    text << std::left << std::setw(40) << name;
    for (const Column& column : columns) {
      const auto found = std::find_if(column.begin(), column.end(),
                                      [&](const auto& cell) { return cell.first == name; });
      text << ' ' << std::right << std::setw(6) << (found == column.end() ? "-" : found->second);
    }
    text << '\n';
  }
  return text.str();
}

TEST(Golden, SourcesAreUnchanged) {
  std::string names;
  std::set<std::string> heads; // what stands below the names
  std::vector<Column> constants, parameters, templates;
  for (const Golden& golden : kGolden) {
    const KernelSource source =
        emit(test::kernel_of(golden.kind, golden.pass, golden.spec, golden.arch));
    const size_t first = source.text.find('\n') + 1;
    names += source.text.substr(0, first);
    heads.insert(source.text.substr(first, source.text.find("\n//===-") - first));
    Column of_constants, of_parameters, of_templates;
    std::istringstream lines(configuration_of(source.text));
    for (std::string line; std::getline(lines, line);)
      if (const size_t value = line.find(" = "); line.starts_with("  "))
        of_parameters.emplace_back(line.substr(2), "x");
      else if (value != line.npos)
        of_constants.emplace_back(line.substr(0, value),
                                  line.substr(value + 3, line.size() - value - 4));
      else if (!line.empty() && line[0] != '/' && line != "struct Params {" && line != "};")
        of_constants.emplace_back(line, "x");
    for (const std::string& path : templates_in_text(source.text))
      of_templates.emplace_back(path, "x");
    constants.push_back(of_constants);
    parameters.push_back(of_parameters);
    templates.push_back(of_templates);
  }
  ASSERT_EQ(heads.size(), 1u);
  expect_golden("kernels.txt", "The sources of these kernels, a column for each.\n\n" + names +
                                   *heads.begin() + "\nconstants\n\n" + table_of(constants) +
                                   "\nparameters\n\n" + table_of(parameters) + "\ntemplates\n\n" +
                                   table_of(templates));
}

/// With it an editor and nvcc open every template as it is: each constant and each parameter of any
/// kernel, those that several have as the last one has it, whose blocks are small.
TEST(Golden, TheExampleConfigurationIsOfAllKernels) {
  AttentionSpec spec;
  spec.head_dim = 64;
  spec.causal = Causal::top_left;
  std::string constants, parameters;
  std::set<std::string> known;
  AttentionSpec fused = spec;
  fused.precision = Precision::gradients16, fused.deterministic = false;
  AttentionSpec largest = spec;
  largest.max_logits = true;
  const Arch& arch = find_arch("sm_80");
  for (const std::vector<KernelSpec>& kernels :
       {Operation(resolved(spec), arch).kernels(Pass::backward),
        Operation(resolved(spec), arch).kernels(Pass::forward),
        Operation(resolved(fused), arch).kernels(Pass::backward),
        Operation(resolved(largest), arch).kernels(Pass::forward)}) {
    for (auto kernel = kernels.rbegin(); kernel != kernels.rend(); ++kernel) {
      std::istringstream lines(configuration_of(emit(*kernel).text));
      for (std::string line; std::getline(lines, line);) {
        const bool parameter = line.starts_with("  ");
        const size_t value = line.find(" =");
        // A parameter's name is its last word; shared memory is of one kernel alone.
        const std::string name = parameter ? line.substr(line.rfind(' ')) : line.substr(0, value);
        if (line.empty() || line[0] == '#' || line[0] == '/' || line[0] == '}' ||
            line.starts_with("struct") || !known.insert(name).second)
          continue;
        if (name.ends_with(" SHARED_BYTES"))
          line = name + " = 0;";
        (parameter ? parameters : constants) += line + "\n";
      }
    }
  }
  expect_golden(
      "configuration.cuh",
      "//===- configuration.cuh - What a kernel is specialised by: an example ------===//\n"
      "//\n"
      "// Written by a test. The emitter puts one kernel's constants and parameters in the "
      "place of this\n// file, which stands for all kernels at once.\n"
      "//\n"
      "//===----------------------------------------------------------------------===//\n"
      "#pragma once\n"
      "#pragma nv_diag_suppress 177 // not every kernel uses every constant\n\n"
      "#include \"base.cuh\"\n\n"
      "#define KERNEL example\n\n" +
          constants + "\nstruct Params {\n" + parameters + "};\n");
}

} // namespace
