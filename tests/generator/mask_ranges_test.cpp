//===- mask_ranges_test.cpp - What masks give over blocks, by ranges --------===//

#include "generator/templates.h"
#include "tests/cache/temp_directory.h"
#include "tests/generator/expressions.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

using namespace sagebwd;

namespace {

/// What the templates take from elsewhere. A warp has one lane here.
const char kAround[] = R"(
#include <cstdio>
#define __device__
#define __forceinline__ inline
#define INFINITY_F __builtin_inff()
using u32 = unsigned;
using s64 = long long;
constexpr float LOG2_E = 1, LN_2 = 1;
inline int minimum(int a, int b) { return a < b ? a : b; }
inline int maximum(int a, int b) { return a > b ? a : b; }
inline int lane_id() { return 0; }
float tanh_approx(float), exp2_approx(float), log2_approx(float), fabsf(float), sqrtf(float),
    powf(float, float), __fmaf_rn(float, float, float);
inline int __ldg(const int* at) { return *at; }
inline int __shfl_xor_sync(u32, int value, int) { return value; }
)";
/// The ranges of drawn operands, all of whose indices are asked.
const char kRanges[] = R"(
template <typename Read> Ints range_of(Ints i, Ints j, const Read& read) {
  Ints found = read(clamped(i.least), clamped(j.least));
  for (int a = clamped(i.least); a <= clamped(i.greatest); ++a)
    for (int b = clamped(j.least); b <= clamped(j.greatest); ++b)
      found = {minimum(found.least, read(a, b)), maximum(found.greatest, read(a, b))};
  return found;
}
Ints read_doc(Ints i, Ints j) {
  return range_of(i, j, [](int a, int b) { return read_doc(a, b); });
}
Ints read_length(Ints i) { return range_of(i, 0, [](int a, int) { return read_length(a); }); }
)";

std::string without_includes(std::string text) {
  for (size_t at; (at = text.find("#include")) != std::string::npos ||
                  (at = text.find("#pragma")) != std::string::npos;)
    text.erase(at, text.find('\n', at) - at);
  return text;
}

std::vector<Expression> drawn_masks(unsigned seed, size_t count) {
  std::vector<Expression> masks;
  test::Drawer drawer(seed, false);
  while (masks.size() < count) {
    const std::string text = drawer.boolean(1 + static_cast<int>(masks.size() % 4)).text;
    if (text.size() > kMostCharacters)
      continue;
    const Expression mask = parse_mask(text, &test::kDrawnOperands);
    bool of_ints = mask.nodes().size() > 1;
    for (const Expression::Node& node : mask.nodes())
      of_ints = of_ints && node.type != ValueType::real;
    if (of_ints)
      masks.push_back(mask);
  }
  return masks;
}

/// A block of queries and keys near one of the places where ints are extreme, or where they are
/// not: a few positions, or one.
struct Block {
  int b, h, q, k, size;
};
std::vector<Block> drawn_blocks() {
  std::vector<Block> blocks;
  test::Drawer drawer(8, false);
  for (int i = 0; i < 24; ++i) {
    const Point at = drawer.point();
    const int size = i % 3 == 0 ? 1 : 6;
    const auto held = [&](int first) { return std::min(first, INT32_MAX - size + 1); };
    blocks.push_back({at.b, at.h, held(at.q), held(at.k), size});
  }
  return blocks;
}

TEST(MaskRanges, HoldEveryValueOfABlock) {
  const std::vector<Expression> masks = drawn_masks(7, 150);
  const std::vector<Block> blocks = drawn_blocks();
  std::string functions, calls;
  for (size_t i = 0; i < masks.size(); ++i) {
    const CudaText cuda = to_cuda_of_ranges(masks[i]);
    const std::string name = "f" + std::to_string(i);
    functions += "Truth " + name + "(int b, int h, Ints q, Ints k) {\n" + cuda.statements +
                 "return " + cuda.result + ";\n}\n";
    calls +=
        "print(" + name + "(p.b, p.h, {p.q, p.q + (p.size - 1)}, {p.k, p.k + (p.size - 1)}));\n";
  }
  test::TempDirectory folder;
  const std::string program = folder.path() + "/program";
  std::ofstream source(program + ".cpp");
  source << kAround;
  for (const char* path :
       {"tile/math/expressions.cuh", "tile/math/extremes.cuh", "tile/math/ranges.cuh"})
    source << without_includes(embedded_template(path));
  source << test::kDrawnElements << kRanges << functions
         << "struct Block { int b, h, q, k, size; };\n"
            "void print(Truth x) { std::printf(\"%d %d\\n\", x.may_hold, x.may_fail); }\n"
            "int main() {\nconst Block blocks[] = {\n";
  for (const Block& p : blocks) // INT_MIN is no literal
    source << "{" << p.b << ", " << p.h << ", int(" << p.q << "LL), int(" << p.k << "LL), "
           << p.size << "},\n";
  source << "};\nfor (const Block& p : blocks) {\n" << calls << "}\n}\n";
  source.close();
  ASSERT_EQ(
      std::system(("c++ -std=c++17 -O0 -fsanitize=undefined -fsanitize-undefined-trap-on-error"
                   " -o '" +
                   program + "' '" + program + ".cpp'")
                      .c_str()),
      0);

  std::FILE* values = ::popen(("'" + program + "'").c_str(), "r");
  int decided = 0;
  for (const Block& p : blocks)
    for (const Expression& mask : masks) {
      int may_hold = 0, may_fail = 0;
      ASSERT_EQ(std::fscanf(values, "%d %d", &may_hold, &may_fail), 2) << to_string(mask);
      decided += may_hold != may_fail;
      for (int i = 0; i < p.size * p.size; ++i) {
        const Point at = {p.b, p.h, p.q + i / p.size, p.k + i % p.size, 0};
        const bool holds = evaluate(mask, at, test::drawn_operands(mask)) != 0;
        ASSERT_TRUE(holds ? may_hold : may_fail)
            << to_string(mask) << " at q " << at.q << ", k " << at.k << " of a block of " << p.size;
      }
    }
  EXPECT_EQ(::pclose(values), 0);
  // Ranges that hold anything would be right, too, and of no use.
  EXPECT_GT(decided, static_cast<int>(masks.size() * blocks.size()) * 3 / 4);
}

} // namespace
