//===- widths_test.cpp - No template compiles for a width that nobody built -===//
//
// A kernel of a further width must not be silently wrong: some threads would have no channel, a
// table would lack a number, or sums would no longer be exact. So templates refuse it.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "runtime/error.h"
#include "tests/templates/nvrtc_fixture.h"

#include <regex>

using namespace sagebwd;

namespace {

class WidthsTest : public test::WithNvrtc {};

std::string with_constant(const std::string& text, const std::string& constant, int value) {
  const std::regex line("(constexpr int " + constant + ") = [0-9]+;");
  EXPECT_TRUE(std::regex_search(text, line)) << constant;
  return std::regex_replace(text, line, "$1 = " + std::to_string(value) + ";");
}

/// NVRTC's log; empty where it compiles.
std::string refusal(const std::string& text, std::string_view arch) {
  try {
    Nvrtc::instance().compile("width", text, arch);
  } catch (const CompileError& error) {
    return error.log;
  }
  return "";
}

/// The kernels that read the caller's tensors first. No operation runs without one of them.
std::vector<KernelSpec> first_kernels(AttentionSpec spec) {
  std::vector<KernelSpec> found;
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel : Operation(resolved(spec), find_arch("sm_80")).kernels(pass))
      if (kernel.kind == KernelKind::key_mean || kernel.kind == KernelKind::quantize)
        found.push_back(kernel);
  return found;
}

TEST_F(WidthsTest, FirstKernelsOfAnOperationRefuseThoseThatNobodyBuilt) {
  for (Precision precision : {Precision::six_of_seven, Precision::qk16, Precision::gradients16}) {
    AttentionSpec spec;
    spec.head_dim = 256, spec.precision = precision;
    const std::vector<KernelSpec> kernels = first_kernels(spec);
    ASSERT_GE(kernels.size(), 2u);
    for (const KernelSpec& kernel : kernels)
      for (int width : {192, 512}) {
        SCOPED_TRACE(kernel_name(kernel) + " for " + std::to_string(width));
        EXPECT_NE(refusal(with_constant(emit(kernel).text, "HEAD_DIM", width), kernel.arch.name)
                      .find("static assertion failed"),
                  std::string::npos);
      }
  }
}

/// Their start is a number with room for 256 channels (MAGIC). The layout of a launch of 512 would
/// suit, so it is not what refuses them.
TEST_F(WidthsTest, INT8ScoresOfMmaAreRefusedWhereTheirSumsAreInexact) {
  AttentionSpec spec;
  spec.head_dim = 256;
  int tried = 0;
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel : Operation(resolved(spec), find_arch("sm_80")).kernels(pass)) {
      if (!definition_of(kernel).tiling)
        continue;
      SCOPED_TRACE(kernel_name(kernel));
      const std::string text =
          with_constant(with_constant(emit(kernel).text, "HEAD_DIM", 512), "SHARED_BYTES", 0);
      EXPECT_NE(refusal(text, "sm_80").find("exact_with_magic(127, 127, HEAD_DIM)"),
                std::string::npos);
      ++tried;
    }
  EXPECT_EQ(tried, 3);
}

} // namespace
