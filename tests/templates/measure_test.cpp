//===- measure_test.cpp - Rates are measured of what their names say --------===//
#include "runtime/measure.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"

#include <map>

using namespace sagebwd;

namespace {

class MeasureTest : public test::WithNvrtc {};

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++found;
  return found;
}

/// The PTX of each entry point, by its name.
std::map<std::string, std::string> entries_of(const std::string& ptx) {
  const std::string mark = ".entry sagebwd_measure_";
  std::map<std::string, std::string> entries;
  for (size_t at = ptx.find(mark), next; at != std::string::npos; at = next) {
    next = ptx.find(mark, at + 1);
    const size_t name = at + mark.size();
    entries[ptx.substr(name, ptx.find('(', name) - name)] = ptx.substr(at, next - at);
  }
  return entries;
}

/// Not where it was found sound before; the next test compiles it in any case.
TEST_F(MeasureTest, EveryArchitectureCompilesIt) {
  test::FoundSound found_sound;
  found_sound.add_file("tests/templates/measure_test.cpp");
  found_sound.add(measure_source());
  if (found_sound.is_listed())
    return;
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"}) {
    SCOPED_TRACE(arch);
    const Compilation compilation = Nvrtc::instance().compile("measure", measure_source(), arch);
    EXPECT_EQ(compile_warnings(compilation.log), std::vector<std::string>());
    EXPECT_EQ(compilation.spill_bytes, 0);
  }
  if (!HasFailure())
    found_sound.passed();
}

/// A turn's 64 units are unrolled, and nothing else multiplies.
TEST_F(MeasureTest, EachEntryHoldsItsUnits) {
  const auto entries = entries_of(
      Nvrtc::instance().compile("measure", measure_source(), "sm_90a", /*want_ptx=*/true).ptx);
  const std::vector<std::string> names = measured_names();
  ASSERT_EQ(entries.size(), names.size());
  struct Expected {
    const char* entry;
    const char* instruction;
    int times;
  };
  const Expected all[] = {
      {"mma_s8", "s32.s8.s8.s32", 64},
      {"mma_u8", "s32.u8.s8.s32", 64},
      {"mma_bf16", "f32.bf16.bf16.f32", 64},
      {"mma_half_sums", "f16.f16.f16.f16", 64},
      {"ffma", "fma.rn.f32", 256},
      {"mma_s8_ffma", "s32.s8.s8.s32", 64},
      {"mma_s8_ffma", "fma.rn.f32", 256},
      {"mma_mixed", "s32.s8.s8.s32", 64},
      {"mma_mixed", "f32.bf16.bf16.f32", 64},
      {"pack_s8", "cvt.rni.s32.f32", 256},
      {"ex2", "ex2.approx", 64},
      {"ldmatrix", "ldmatrix.sync", 64},
      {"mma_s8", "fma.rn.f32", 0},
      {"ffma", "mma.sync", 0},
      {"ex2", "mma.sync", 0},
  };
  for (const Expected& expected : all) {
    ASSERT_TRUE(entries.contains(expected.entry)) << expected.entry;
    EXPECT_EQ(count(entries.at(expected.entry), expected.instruction), expected.times)
        << expected.entry << " " << expected.instruction;
  }
  // Operands are converted once besides.
  EXPECT_GE(count(entries.at("int_to_float"), "cvt.rn.f32.s32"), 64);
}

} // namespace
