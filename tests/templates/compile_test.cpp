//===- compile_test.cpp - Default kernels compile without spills ------------===//
//
// With whatever NVRTC there is: no kernel spills except those that known_spills.txt lists for its
// version. Kernels that found_sound.txt lists are not compiled again, except one of each
// architecture.
//
//===----------------------------------------------------------------------===//

#include "generator/operation.h"
#include "tests/templates/covering.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/known_spills.h"
#include "tests/templates/nvrtc_fixture.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <set>

using namespace sagebwd;

namespace {

bool supports(const Nvrtc& nvrtc, std::string_view arch) {
  const std::vector<std::string> known = nvrtc.supported_archs();
  const std::string plain(arch.substr(0, arch.find_last_not_of("a") + 1));
  return std::find(known.begin(), known.end(), plain) != known.end();
}

test::KnownSpills expect_sound(const std::map<std::string, KernelSpec>& kernels) {
  test::KnownSpills known = test::known_spills();
  for (const auto& [label, kernel] : kernels) {
    try {
      const test::Compiled compiled = test::compile(kernel, /*want_ptx=*/false);
      EXPECT_EQ(known.objection(label, compiled.spill_bytes), "");
      // An array whose places are found at run time costs as much as a spill.
      EXPECT_TRUE(compiled.spill_bytes != 0 ||
                  compiled.log.find(" 0 bytes stack frame") != std::string::npos)
          << label << " keeps arrays in memory:\n"
          << compiled.log;
      for (const std::string& warning : compile_warnings(compiled.log))
        if (warning.find("spill") == std::string::npos)
          ADD_FAILURE() << label << ": " << warning;
      // More would not fit the launch bounds.
      EXPECT_LE(compiled.registers, 255) << label;
    } catch (const std::exception& error) {
      ADD_FAILURE() << label << ": " << error.what();
    }
  }
  return known;
}

/// The smallest kernel.
KernelSpec key_mean_of(const Arch& arch) {
  return Operation(resolved(AttentionSpec{.head_dim = 64}), arch).kernels(Pass::forward).front();
}

/// By architecture, so that they are compiled side by side.
class CompileTest : public test::WithNvrtc, public testing::WithParamInterface<const char*> {
protected:
  void SetUp() override {
    WithNvrtc::SetUp();
    if (!IsSkipped() && !supports(Nvrtc::instance(), GetParam()))
      GTEST_SKIP() << Nvrtc::instance().identity() << " does not know " << GetParam();
  }
};

TEST_P(CompileTest, DefaultKernelsHaveNeitherSpillsNorWarnings) {
  const std::map<std::string, KernelSpec> kernels = test::covering_kernels(find_arch(GetParam()));
  ASSERT_FALSE(kernels.empty());
  ASSERT_LE(kernels.size(), 280u); // in minutes
  test::FoundSound found_sound;
  found_sound.add_file("tests/templates/known_spills.txt");
  found_sound.add(kernels);
  if (found_sound.is_listed()) {
    const KernelSpec small = key_mean_of(find_arch(GetParam()));
    expect_sound({{std::string(GetParam()) + " " + kernel_name(small), small}});
    return;
  }
  const test::KnownSpills known = expect_sound(kernels);
  for (const std::string& line : known.stale(GetParam())) // ./run test shows these lines
    std::cout << "stale in known_spills.txt: " << line << "\n";
  std::cout << kernels.size() << " kernels\n";
  if (!HasFailure())
    found_sound.passed();
}

/// The kernels of the linear branch, of an estimated alpha, and those that quantise a share of dO,
/// of every dtype, number of channels and size of blocks.
TEST_P(CompileTest, LinearKernelsHaveNeitherSpillsNorWarnings) {
  if (test::is_twin(GetParam()))
    return;
  std::map<std::string, KernelSpec> kernels;
  for (const auto& [head_dim, dtype, queries, keys] : {std::tuple{128, DType::bf16, 128, 128},
                                                       {128, DType::fp16, 64, 64},
                                                       {64, DType::bf16, 128, 64},
                                                       {64, DType::fp16, 64, 128}}) {
    AttentionSpec spec;
    spec.head_dim = head_dim, spec.dtype = dtype;
    spec.sparse_q = queries, spec.sparse_kv = keys;
    for (const KernelSpec& kernel : kernels_beside(resolved(spec), find_arch(GetParam())))
      if (to_string(kernel.kind).starts_with("linear_") ||
          to_string(kernel.kind).starts_with("estimated_") ||
          to_string(kernel.kind).ends_with("_blocks"))
        kernels.emplace(std::string(GetParam()) + " " + kernel_name(kernel), kernel);
    spec.linear = LinearKeys::all;
    for (Granularity granularity : {Granularity::row, Granularity::block})
      for (const auto& [precision, name] : Words<Precision>::all) {
        spec.granularity = granularity, spec.precision = precision;
        if (granularity == Granularity::block && queries == 64)
          continue; // a group is of 128 queries
        const KernelSpec kernel = kernel_of(KernelKind::quantize, Pass::backward, resolved(spec),
                                            find_arch(GetParam()), {});
        kernels.emplace(std::string(GetParam()) + " " + kernel_name(kernel), kernel);
      }
  }
  ASSERT_EQ(kernels.size(), 56u + 24u);
  test::FoundSound found_sound;
  found_sound.add(kernels);
  if (found_sound.is_listed())
    return;
  expect_sound(kernels);
  if (!HasFailure())
    found_sound.passed();
}

/// Norm and RoPE of queries and keys, of every dtype and width, and of fewer channels.
TEST_P(CompileTest, FrontKernelsHaveNeitherSpillsNorWarnings) {
  if (test::is_twin(GetParam()))
    return;
  std::map<std::string, KernelSpec> kernels;
  for (int head_dim : {64, 72, 128, 256})
    for (DType dtype : {DType::bf16, DType::fp16})
      for (KernelKind kind :
           {KernelKind::front, KernelKind::front_gradients, KernelKind::front_gains,
            KernelKind::gate, KernelKind::gate_gradients}) {
        const KernelSpec kernel =
            kernel_of(kind, Pass::forward, *resolved({.head_dim = head_dim, .dtype = dtype}),
                      find_arch(GetParam()), {});
        kernels.emplace(std::string(GetParam()) + " " + kernel_name(kernel), kernel);
      }
  ASSERT_EQ(kernels.size(), 40u);
  test::FoundSound found_sound;
  found_sound.add(kernels);
  if (found_sound.is_listed())
    return;
  expect_sound(kernels);
  if (!HasFailure())
    found_sound.passed();
}
INSTANTIATE_TEST_SUITE_P(On, CompileTest, testing::ValuesIn(test::kArchs),
                         [](const auto& info) { return std::string(info.param); });

/// Which two values of which two fields meet among some specs.
template <size_t kFields>
std::set<std::array<int, 4>> meetings(const std::vector<std::array<int, kFields>>& rows) {
  std::set<std::array<int, 4>> met;
  for (const auto& f : rows)
    for (int i = 0; i < static_cast<int>(kFields); ++i)
      for (int j = i + 1; j < static_cast<int>(kFields); ++j)
        met.insert({i, f[static_cast<size_t>(i)], j, f[static_cast<size_t>(j)]});
  return met;
}

TEST(Covering, EveryTwoValuesMeetOnEveryArchitecture) {
  constexpr int kValues[] = {2, test::kForms, std::size(Words<Precision>::all), 2, 2, 2};
  constexpr int kFields = std::size(kValues);
  std::map<std::string, std::vector<std::array<int, kFields>>> rows; // by architecture
  for (const auto& [s, arch, usual] : test::covering_pairs())
    rows[std::string(arch->name)].push_back({s.head_dim == 128, test::form_of(s),
                                             static_cast<int>(s.precision), s.dtype == DType::fp16,
                                             s.causal == Causal::top_left, s.smooth_k});
  size_t all = 0;
  for (int i = 0; i < kFields; ++i)
    for (int j = i + 1; j < kFields; ++j)
      all += static_cast<size_t>(kValues[i] * kValues[j]);
  ASSERT_EQ(rows.size(), std::size(test::kArchs));
  for (const auto& [arch, found] : rows)
    EXPECT_EQ(meetings(found).size(), all) << arch;
}

/// Fields that quantize depends on; `packed` and `smooth_q` are not of every spec.
TEST(Covering, EveryTwoValuesMeetInQuantize) {
  constexpr size_t kFields = 9;
  constexpr std::array<int, kFields> kValues = {4, 4, test::kForms, 2, 2, 2, 2, 2, 2};
  for (const char* name : test::kArchs) {
    std::vector<std::array<int, kFields>> rows;
    for (const AttentionSpec& s : test::covering_quantize(find_arch(name))) {
      const std::map<int, int> dims = {{64, 0},  {56, 0},  {128, 1}, {120, 1}, {256, 2},
                                       {248, 2}, {104, 2}, {40, 2},  {32, 3},  {96, 3}};
      rows.push_back({dims.at(s.head_dim), static_cast<int>(s.precision), test::form_of(s),
                      s.dtype == DType::fp16, s.smooth_k, s.rotate, s.deterministic, s.packed,
                      s.smooth_v});
    }
    const auto met = meetings(rows);
    for (size_t i = 0; i < kFields; ++i)
      for (size_t j = i + 1; j < kFields; ++j)
        for (int a = 0; a < kValues[i]; ++a)
          for (int b = 0; b < kValues[j]; ++b) {
            const bool packed_block = i == 2 && a == test::block && j == 7 && b;
            EXPECT_NE(met.count({static_cast<int>(i), a, static_cast<int>(j), b}), packed_block)
                << name << ": fields " << i << " and " << j << ", values " << a << " and " << b;
          }
  }
}

} // namespace
