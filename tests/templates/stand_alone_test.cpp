//===- stand_alone_test.cpp - Every template opens by itself ----------------===//
//
// With tests/golden/configuration.cuh each file compiles, for an editor or nvcc as here. That is of
// mma.sync; what only warp-specialised kernels have compiles with their own configurations. Files
// that found_sound.txt lists are not compiled again, except one.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/pointwise.h"
#include "generator/space.h"
#include "generator/templates.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <unistd.h>

using namespace sagebwd;

namespace {

/// Folders with the configuration and the family of kernels that differ from the example: of each
/// that is warp-specialised, and of that which forms all gradients in INT8. By its template.
class Configurations {
public:
  Configurations() {
    AttentionSpec spec;
    spec.head_dim = 64, spec.precision = Precision::gradients16;
    write(spec); // the split backward
    spec.head_dim = 128, spec.deterministic = false;
    write(spec); // that in one kernel
    spec = {};
    spec.head_dim = 256; // pairs of warpgroups
    write(spec);
    spec.precision = Precision::gradients16;
    write(spec);
    spec = {};
    spec.head_dim = 64, spec.gradient_kernels = Backward::fused; // which is of mma.sync
    for (const KernelSpec& k :
         Operation(resolved(spec), find_arch("sm_80")).kernels(Pass::backward))
      if (k.kind == KernelKind::backward)
        write(k);
    spec = {};
    spec.sparse_q = 128, spec.sparse_kv = 64; // lists of blocks
    for (const KernelSpec& k :
         Operation(resolved(spec), find_arch("sm_80")).distinct_kernels(/*backward=*/true)) {
      if (root_template_of(k).find("_bits") != std::string::npos ||
          root_template_of(k).find("order_lists") != std::string::npos ||
          root_template_of(k).find("/pack_") != std::string::npos ||
          root_template_of(k).find("_blocks.cuh") != std::string::npos ||
          root_template_of(k).find("/linear_") != std::string::npos ||
          root_template_of(k).find("/estimated_") != std::string::npos)
        write(k);
      if (k.kind == KernelKind::backward_dkv)
        write(k, "tile/walk/listed_tiles.cuh");
    }
    AttentionSpec between;
    between.intervals = 2;
    for (const KernelSpec& k :
         Operation(resolved(between), find_arch("sm_80")).distinct_kernels(/*backward=*/false)) {
      if (k.kind == KernelKind::interval_bits)
        write(k);
      if (k.kind == KernelKind::forward)
        write(k, "tile/walk/hidden_anywhere.cuh");
    }
    AttentionSpec spoken;
    spoken.mask = "doc[b, q] == doc[b, k]", spoken.score = "tanh(s + slope[h])";
    for (const KernelSpec& k :
         Operation(resolved(spoken), find_arch("sm_80")).distinct_kernels(/*backward=*/false)) {
      if (k.kind == KernelKind::mask_bits)
        write(k);
      if (k.kind == KernelKind::forward)
        write(k, "tile/walk/hidden_by_expression.cuh");
    }
    write(
        kernel_of(KernelKind::linear_sums, Pass::forward, *resolved(spec), find_arch("sm_90a"), {}),
        "tile/sla/matrix_sums_wgmma.cuh");
    for (KernelKind kind : {KernelKind::front, KernelKind::front_gradients, KernelKind::front_gains,
                            KernelKind::gate, KernelKind::gate_gradients})
      write(kernel_of(kind, Pass::forward, *resolved({}), find_arch("sm_80"), {}));
    AttentionSpec very_wide;
    very_wide.head_dim = 512;
    for (const char* arch : {"sm_80", "sm_90a"})
      for (Pass pass : {Pass::forward, Pass::backward})
        for (const KernelSpec& k : Operation(resolved(very_wide), find_arch(arch)).kernels(pass))
          if (k.tile != TileConfig())
            write(k);
    spec.linear = LinearKeys::complement;
    write(kernel_of(KernelKind::quantize, Pass::backward, *resolved(spec), find_arch("sm_80"), {}),
          "tile/prepass/shared_dout.cuh");
  }
  ~Configurations() { std::filesystem::remove_all(root_); }

  /// Empty for what is of every family.
  std::string of(std::string_view path) const {
    std::string kernel(path);
    if (path.starts_with("tile/math/fused_products") ||
        path.starts_with("tile/math/fused_gradients"))
      kernel = "kernels/backward_ws.cuh";
    if (path.starts_with("tile/walk/list") || path == "tile/walk/own_keys_in_order.cuh")
      kernel = "tile/walk/listed_tiles.cuh";
    if (path == "tile/walk/hidden_by_intervals.cuh" || path == "tile/walk/intervals.cuh")
      kernel = "tile/walk/hidden_anywhere.cuh";
    if (path == "tile/math/given_score.cuh")
      kernel = "tile/walk/hidden_by_expression.cuh";
    if (path == "tile/sla/features.cuh" || path == "tile/sla/channel_matrix.cuh" ||
        path == "tile/sla/token_sums.cuh" || path == "tile/sla/mixture.cuh")
      kernel = "kernels/linear_dout.cuh";
    if (path == "tile/sla/block_sums.cuh" || path == "tile/sla/summed_blocks.cuh" ||
        path == "tile/sla/matrix_sums.cuh")
      kernel = "kernels/linear_sums.cuh";
    if (path == "tile/sla/matrix_sums_wgmma.cuh")
      kernel = path;
    if (path == "tile/sla/best_blocks.cuh")
      kernel = "kernels/top_blocks.cuh";
    if (path.starts_with("tile/prepass/front_"))
      kernel = "kernels/front.cuh";
    if (path == "tile/sla/pooled_keys.cuh")
      kernel = "kernels/estimated_rest.cuh";
    if (path == "tile/math/column_start.cuh")
      kernel = "kernels/backward_dkv_ws.cuh";
    if (path == "tile/memory/chunks.cuh" || path.starts_with("tile/math/team_"))
      kernel = "kernels/forward_team.cuh";
    if (path == "tile/math/pair_softmax.cuh")
      kernel = "kernels/forward_pair.cuh";
    if (path == "tile/memory/panels.cuh")
      kernel = "kernels/backward_dq_halves.cuh";
    if (path == "tile/walk/query_pairs.cuh")
      kernel = "kernels/backward_dkv_pair.cuh";
    if (path == "tile/walk/pair.cuh")
      kernel = "kernels/backward_dq_pair.cuh";
    if (path.starts_with("tile/dq/dq_sums8") || path.starts_with("tile/dq/dq_order"))
      kernel = "kernels/backward_fused.cuh";
    const auto found = folders_.find(kernel);
    return found == folders_.end() ? "" : found->second;
  }

  /// Gives what was written, in order.
  const std::vector<std::string>& bases() const { return bases_; }

private:
  void write(const AttentionSpec& spec) {
    const ResolvedSpec s = resolved(spec);
    const Arch& arch = find_arch("sm_90a");
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& k :
           Operation(s, arch, default_tiles(s, arch, Family::ws)).kernels(pass))
        if (k.tile.family.roles() != Roles::alike)
          write(k);
  }
  void write(const KernelSpec& k) { write(k, std::string(root_template_of(k))); }
  void write(const KernelSpec& k, const std::string& path) {
    const std::filesystem::path folder = root_ / std::to_string(count_++);
    std::filesystem::create_directories(folder);
    const std::string text = emit(k).text;
    const size_t from = text.find("//===- configuration.cuh");
    const size_t end = text.find("};", text.find("struct Params {", from)) + 3;
    std::string base = text.substr(from, end - from);
    base.insert(base.find('\n') + 1,
                "#pragma once\n#include \"base.cuh\"\n#define KERNEL example\n");
    std::ofstream(folder / "configuration.cuh") << base;
    const auto stand_in = [&](const char* place, const std::string& other) {
      std::filesystem::create_directories((folder / place).parent_path());
      std::ofstream(folder / place) << "#pragma once\n#include \"" << other << "\"\n";
    };
    stand_in("tile/math/family.cuh",
             "tile/math/products_" + value_text(k.tile.family.instruction()) + ".cuh");
    if (is_sparse(k.attention))
      stand_in("tile/walk/visible.cuh", "tile/walk/lists.cuh");
    if (hides_anywhere(k.attention))
      stand_in("tile/walk/hidden.cuh", "tile/walk/hidden_anywhere.cuh");
    if (!k.attention.mask.empty()) {
      stand_in("tile/walk/hidden_by_intervals.cuh", "tile/walk/hidden_by_expression.cuh");
      std::ofstream(folder / "mask_expression.cuh") << "#pragma once\n" << mask_source(k.attention);
      std::ofstream(folder / "mask_ranges.cuh") << "#pragma once\n"
                                                << mask_ranges_source(k.attention);
    }
    if (has_score(k.attention)) {
      stand_in("tile/math/plain_score.cuh", "tile/math/given_score.cuh");
      std::ofstream(folder / "score_expression.cuh")
          << "#pragma once\n"
          << score_source(k.attention, k.kind == KernelKind::forward);
    }
    folders_[path] = folder.string();
    bases_.push_back(base);
  }

  std::filesystem::path root_ = std::filesystem::temp_directory_path() /
                                ("sagebwd-stand-alone-" + std::to_string(::getpid()));
  int count_ = 0;
  std::map<std::string, std::string> folders_;
  std::vector<std::string> bases_;
};

class StandAloneTest : public test::WithNvrtc {};

void expect_alone(std::string_view path, const std::string& folder) {
  std::string source = "#include \"" + std::string(path) + "\"\n";
  if (!path.starts_with("kernels/"))
    source += "extern \"C\" __global__ void example() {}\n";
  std::vector<std::string> options = {"--include-path=" SAGEBWD_SOURCE_DIR "/templates",
                                      "--include-path=" SAGEBWD_SOURCE_DIR "/tests/golden"};
  if (!folder.empty())
    options.insert(options.begin(), "--include-path=" + folder);
  try {
    const Compilation compilation =
        Nvrtc::instance().compile("example", source, "sm_90a", false, options);
    EXPECT_EQ(compile_warnings(compilation.log), std::vector<std::string>()) << path;
    EXPECT_GT(compilation.registers, 0) << path;
  } catch (const std::exception& error) {
    ADD_FAILURE() << path << ": " << error.what();
  }
}

TEST_F(StandAloneTest, EachTemplateIncludesWhatItUses) {
  const Configurations specialised;
  test::FoundSound found_sound; // the folders that are given, by what is in them
  found_sound.add_file("tests/templates/stand_alone_test.cpp");
  found_sound.add_file("tests/golden/configuration.cuh");
  for (const std::string& base : specialised.bases())
    found_sound.add(base);
  int kernels = 0;
  for (const auto& [path, text] : embedded_templates()) {
    found_sound.add(path);
    found_sound.add(text);
    kernels += path.starts_with("kernels/");
  }
  EXPECT_EQ(kernels, 46);
  if (found_sound.is_listed())
    return expect_alone("base.cuh", "");
  for (const auto& [path, text] : embedded_templates())
    expect_alone(path, specialised.of(path));
  if (!HasFailure())
    found_sound.passed();
}

} // namespace
