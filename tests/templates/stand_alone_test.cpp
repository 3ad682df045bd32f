//===- stand_alone_test.cpp - Every template opens by itself ----------------===//
//
// With tests/golden/configuration.cuh each file compiles, for an editor or nvcc as here.
//
//===----------------------------------------------------------------------===//

#include "generator/templates.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class StandAloneTest : public test::WithNvrtc {};

TEST_F(StandAloneTest, EachTemplateIncludesWhatItUses) {
  int kernels = 0;
  for (const auto& [path, text] : embedded_templates()) {
    const bool kernel = path.starts_with("kernels/");
    kernels += kernel;
    std::string source = "#include \"" + std::string(path) + "\"\n";
    if (!kernel)
      source += "extern \"C\" __global__ void example() {}\n";
    try {
      const Compilation compilation =
          Nvrtc::instance().compile("example", source, "sm_90a", false,
                                    {"--include-path=" SAGEBWD_SOURCE_DIR "/templates",
                                     "--include-path=" SAGEBWD_SOURCE_DIR "/tests/golden"});
      EXPECT_EQ(compile_warnings(compilation.log), std::vector<std::string>()) << path;
      EXPECT_GT(compilation.registers, 0) << path;
    } catch (const std::exception& error) {
      ADD_FAILURE() << path << ": " << error.what();
    }
  }
  EXPECT_EQ(kernels, 6);
}

} // namespace
