//===- spec.cpp - Fuzzes the readers of specs and tiles --------------------===//

#include "generator/definition.h"
#include "generator/space.h"
#include "tests/fuzz/target.h"

using namespace sagebwd;

std::vector<std::string> seeds() {
  return {"bf16",
          "fp16",
          "none",
          "top-left",
          "bottom-right",
          "row",
          "block",
          "six-of-seven",
          "qk16",
          "sm_90a",
          "mma 128x64 w8 s2 b1",
          "wgmma 64x128 w4 s1 b3",
          "d128 bf16 causal=none row 64x64 six-of-seven smooth_k rotate deterministic",
          "d64 causal=top-left no-rotate 64x128 window_left=3"};
}

unsigned first_random() { return 2; }
std::string resealed(std::string input) { return input; }

namespace {

/// Accepted text prints as it was read; other text raises SpecError and nothing else.
template <typename Parse> void check(Parse parse, const std::string& text) {
  try {
    require(to_string(parse(text)) == text);
  } catch (const SpecError& error) {
    require(*error.what() != 0);
  }
}

/// Some of a line's words are a spec as well: what is printed of it is read back as the same.
void check_spec(const std::string& text) {
  try {
    const AttentionSpec spec = parse_spec(text);
    require(parse_spec(to_string(spec)) == spec);
  } catch (const SpecError& error) {
    require(*error.what() != 0);
  }
}

/// A tile may come from a record that somebody else wrote: judging it must be safe, whatever it is.
void check_tile_everywhere(const std::string& text) {
  TileConfig tile;
  try {
    tile = parse_tile(text);
  } catch (const SpecError&) {
    return;
  }
  require(parse_tile(to_string(tile)) == tile);
  for (const Arch& arch : all_archs())
    for (int head_dim : {64, 128}) {
      AttentionSpec spec;
      spec.head_dim = head_dim;
      spec = *resolved(spec);
      for (KernelKind kind : tiled_kernels())
        if (objection(kind, spec, tile, arch).empty())
          require(shared_bytes(kind, spec, tile) <= arch.max_shared_bytes);
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check_spec(text);
  check(parse_word<DType>, text);
  check(parse_word<Causal>, text);
  check(parse_word<Granularity>, text);
  check(parse_word<Precision>, text);
  check_tile_everywhere(text);
  try {
    require(find_arch(text).name == text);
  } catch (const SpecError&) {
  }
  return 0;
}
