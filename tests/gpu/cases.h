//===- cases.h - The kernels that the GPU tests run ------------------------===//
#pragma once

#include "tests/gpu/case.h"
#include "tests/gpu/wide_cases.h"

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

namespace sagebwd::test {

/// Every value of every option, with every other at least once; both families.
inline const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = [] {
    using enum DType;
    using enum Precision;
    constexpr auto row = Granularity::row, block = Granularity::block;
    constexpr auto none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
    std::vector<Case> list = {
        {"D128_bf16_Row", {128, bf16, none, row}, {}},
        {"D128_fp16_Row_BottomRight", {128, fp16, bottom, row}, {}},
        {"D64_bf16_Row_TopLeft", {64, bf16, top, row}, {}},
        {"D64_fp16_Row", {64, fp16, none, row}, {}},
        {"D64_fp16_Dv16", {64, fp16, none, row, dv16}, {}},
        {"D64_bf16_Block", {64, bf16, none, block}, {}},
        {"D128_bf16_Row64", {128, bf16, none, row, six_of_seven, true, true, true, 64, 64}, {}},
        {"D64_bf16_Row64", {64, bf16, none, row, six_of_seven, true, true, true, 64, 64}, {}},
        {"D128_bf16_Block", {128, bf16, none, block}, {}},
        {"D64_fp16_Block_TopLeft", {64, fp16, top, block}, {}},
        {"D128_bf16_Qk16", {128, bf16, none, row, qk16}, {}},
        {"D64_fp16_Qk16_TopLeft", {64, fp16, top, row, qk16}, {}},
        {"D128_bf16_Block_Qk16_BottomRight", {128, bf16, bottom, block, qk16}, {}},
        {"D128_bf16_Dv16_TopLeft", {128, bf16, top, row, dv16}, {}},
        {"D64_fp16_Gradients16", {64, fp16, none, row, gradients16}, {}},
        {"D128_bf16_Block_Gradients16", {128, bf16, none, block, gradients16}, {}},
        {"D64_bf16_Row_TopLeft_NoSink",
         {64, bf16, top, row, six_of_seven, true, true, true, 64, 128, 0},
         {}},
        {"D128_bf16_Row_Unsmoothed", {128, bf16, none, row, six_of_seven, false, true}, {}},
        {"D64_fp16_Row_Unrotated", {64, fp16, none, row, six_of_seven, true, false}, {}},
        {"D128_bf16_Block_Plain", {128, bf16, none, block, six_of_seven, false, false}, {}},
    };
    struct Windowed {
      const char* name;
      AttentionSpec spec;
      int left, right;
      bool mma = false;
    };
    const std::vector<Case> widest = {
        {"D256_bf16_Row", {256, bf16, none, row}, {}},
        {"D256_fp16_Row_TopLeft", {256, fp16, top, row}, {}},
        {"D256_bf16_Block_BottomRight", {256, bf16, bottom, block}, {}},
        {"D256_fp16_Qk16", {256, fp16, none, row, qk16}, {}},
        {"D256_bf16_Dv16_TopLeft_Row64", {256, bf16, top, row, dv16, true, true, true, 64, 64}, {}},
        {"D256_fp16_Gradients16", {256, fp16, none, row, gradients16, false}, {}},
        {"D256_bf16_Gradients16_TopLeft", {256, bf16, top, row, gradients16}, {}},
        {"D256_fp16_Gradients16_BottomRight", {256, fp16, bottom, row, gradients16}, {}},
        {"D256_bf16_Dv16", {256, bf16, none, row, dv16}, {}},
        {"D256_fp16_Row64_BottomRight",
         {256, fp16, bottom, row, six_of_seven, true, true, true, 64, 64},
         {}},
        {"D256_bf16_Row_BottomRight_NoSink",
         {256, bf16, bottom, row, six_of_seven, true, true, true, 64, 128, 0},
         {}},
    };
    list.insert(list.end(), widest.begin(), widest.end());
    // Heads that do not fill the kernels' width.
    const std::vector<Case> part = {
        {"D40_bf16_Row_TopLeft", {40, bf16, top, row}, {}},
        {"D48_bf16_Gradients16", {48, bf16, none, row, gradients16}, {}},
        {"D32_fp16_Block", {32, fp16, none, block}, {}},
        {"D56_bf16_Qk16_BottomRight", {56, bf16, bottom, row, qk16}, {}},
        {"D72_fp16_Dv16_Unsmoothed", {72, fp16, none, row, dv16, false}, {}},
        {"D80_fp16_Row", {80, fp16, none, row}, {}},
        {"D96_bf16_Row_BottomRight", {96, bf16, bottom, row}, {}},
        {"D112_bf16_Gradients16_TopLeft", {112, bf16, top, row, gradients16}, {}},
        {"D120_fp16_Qk16", {120, fp16, none, row, qk16}, {}},
        {"D104_bf16_Block_TopLeft", {104, bf16, top, block}, {}},
        {"D160_bf16_Row", {160, bf16, none, row}, {}},
        {"D192_fp16_Gradients16_TopLeft", {192, fp16, top, row, gradients16}, {}},
        {"D184_bf16_Dv16_BottomRight", {184, bf16, bottom, row, dv16}, {}},
        {"D248_bf16_Block_Qk16", {248, bf16, none, block, qk16}, {}},
    };
    list.insert(list.end(), part.begin(), part.end());
    const std::vector<Case> mma = {
        {"Mma_D128_bf16_Row64", {128, bf16, none, row, six_of_seven, true, true, true, 64, 64}, {}},
        {"Mma_D64_fp16_Row_TopLeft",
         {64, fp16, top, row, six_of_seven, true, true, true, 64, 128},
         {}},
        {"Mma_D128_bf16_Block", {128, bf16, none, block}, {}},
        {"Mma_D128_fp16_Qk16_BottomRight",
         {128, fp16, bottom, row, qk16, true, true, true, 64, 64},
         {}},
        {"Mma_D64_bf16_Dv16", {64, bf16, none, row, dv16}, {}},
        {"Mma_D128_bf16_Gradients16_TopLeft", {128, bf16, top, row, gradients16}, {}},
        {"Mma_D256_bf16_Row_TopLeft", {256, bf16, top, row}, {}},
        {"Mma_D80_bf16_Row_TopLeft", {80, bf16, top, row}, {}},
        {"Mma_D40_fp16_Qk16", {40, fp16, none, row, qk16}, {}},
        {"Mma_D160_bf16_Gradients16_BottomRight", {160, bf16, bottom, row, gradients16}, {}},
        {"Mma_D256_fp16_Block_Gradients16", {256, fp16, none, block, gradients16}, {}},
    };
    for (Case c : mma) {
      c.tiles = mma_tiles(c.spec);
      list.push_back(c);
    }
    const std::pair<Case, const char*> fused[] = {
        {{"Fused_D64_bf16", {64, bf16, none, row, gradients16}, {}}, "mma 64x128 w8 s1 b1"},
        {{"Fused_D64_fp16_Unsmoothed", {64, fp16, none, row, gradients16, false}, {}},
         "mma 64x64 w4 s1 b2"},
        {{"Fused_D128_fp16_TopLeft", {128, fp16, top, row, gradients16}, {}},
         "mma 64x128 w8 s1 b1"},
        {{"Fused_D64_bf16_BottomRight_4Warps", {64, bf16, bottom, row, gradients16}, {}},
         "mma 64x64 w4 s2 b1"},
        {{"Fused_D128_bf16_Block_4Warps", {128, bf16, none, block, gradients16}, {}},
         "mma 64x64 w4 s1 b2"},
        {{"Fused_D64_bf16_SixOfSeven_TopLeft", {64, bf16, top, row}, {}}, "mma 64x128 w8 s1 b1"},
        {{"Fused_D128_fp16_SixOfSeven", {128, fp16, none, row}, {}}, "mma 64x128 w8 s1 b1"},
        {{"Fused_D88_bf16_SixOfSeven_TopLeft", {88, bf16, top, row}, {}}, "mma 64x128 w8 s1 b1"},
        {{"Fused_D40_fp16", {40, fp16, none, row, gradients16}, {}}, "mma 64x64 w4 s1 b2"},
        {{"Fused_D64_fp16_Qk16_Unsmoothed", {64, fp16, none, row, qk16, false}, {}},
         "mma 64x128 w8 s1 b1"},
    };
    for (auto [c, tile] : fused) {
      c.spec.deterministic = false;
      c.tiles = mma_tiles(c.spec);
      (*c.tiles)[KernelKind::backward] = parse_tile(tile);
      list.push_back(c);
    }
    // Fused and deterministic.
    const Windowed ordered[] = {
        {"Ordered_D64_bf16_TopLeft", {64, bf16, top, row}, -1, -1},
        {"Ordered_D128_fp16", {128, fp16, none, row}, -1, -1},
        {"Ordered_D128_bf16_BottomRight_NoSink",
         {128, bf16, bottom, row, six_of_seven, true, true, true, 64, 128, 0},
         -1,
         -1},
        {"Ordered_D88_bf16_TopLeft", {88, bf16, top, row}, -1, -1},
        {"Ordered_D40_fp16_Unsmoothed", {40, fp16, none, row, six_of_seven, false}, -1, -1},
        {"Ordered_D64_bf16_Qk16_BottomRight", {64, bf16, bottom, row, qk16}, -1, -1},
        {"Ordered_Window_D64_bf16", {64, bf16, none, row}, 100, 30},
        {"Ordered_Window_D128_fp16_TopLeft", {128, fp16, top, row}, 300, -1},
        {"Ordered_Window_D64_fp16_BottomRight", {64, fp16, bottom, row}, 20, -1},
    };
    for (const Windowed& o : ordered) {
      Case c{o.name, o.spec, {}};
      c.spec.window_left = o.left, c.spec.window_right = o.right;
      c.spec.gradient_kernels = Backward::fused;
      list.push_back(c);
    }
    for (const char* name : {"SmoothQ", "Packed"}) {
      Case c{std::string("Ordered_") + name + "_D128_bf16_TopLeft", {128, bf16, top, row}, {}};
      c.spec.gradient_kernels = Backward::fused;
      (name[0] == 'S' ? c.spec.smooth_q : c.spec.packed) = true;
      list.push_back(c);
    }
    // The default, which is fused where mma is a GPU's own family.
    list.push_back({"NotDeterministic_D64_bf16_TopLeft",
                    {64, bf16, top, row, gradients16, true, true, false},
                    {}});
    const std::pair<Case, const char*> fused_ws[] = {
        {{"FusedWs_D64_bf16", {64, bf16, none, row, gradients16}, {}}, "ws 64x128 w8 s4 b1"},
        {{"FusedWs_D64_fp16_TopLeft_Unsmoothed", {64, fp16, top, row, gradients16, false}, {}},
         "ws 64x128 w8 s2 b1"},
        {{"FusedWs_D64_bf16_Block_BottomRight", {64, bf16, bottom, block, gradients16}, {}},
         "ws 64x128 w8 s4 b1"},
        {{"FusedWs_D128_bf16", {128, bf16, none, row, gradients16}, {}}, "ws 64x128 w8 s2 b1"},
        {{"FusedWs_D128_fp16_TopLeft", {128, fp16, top, row, gradients16}, {}},
         "ws 64x128 w8 s2 b1"},
        {{"FusedWs_D72_fp16_TopLeft", {72, fp16, top, row, gradients16}, {}}, "ws 64x128 w8 s2 b1"},
        {{"FusedWs_D56_bf16", {56, bf16, none, row, gradients16}, {}}, "ws 64x128 w8 s4 b1"},
        {{"FusedWs_D128_bf16_BottomRight_NoSink",
          {128, bf16, bottom, row, gradients16, true, true, true, 64, 128, 0},
          {}},
         "ws 64x128 w8 s2 b1"},
    };
    for (auto [c, tile] : fused_ws) {
      c.spec.deterministic = false;
      c.tiles = {{KernelKind::backward, parse_tile(tile)}};
      list.push_back(c);
    }
    // Sums of dQ in FP16.
    for (const char* name :
         {"FusedWs_D64_bf16", "FusedWs_D64_fp16_TopLeft_Unsmoothed",
          "FusedWs_D64_bf16_Block_BottomRight", "FusedWs_D128_bf16", "FusedWs_D128_fp16_TopLeft",
          "FusedWs_D128_bf16_BottomRight_NoSink", "FusedWs_D72_fp16_TopLeft", "FusedWs_D56_bf16"}) {
      Case c = *std::find_if(list.begin(), list.end(),
                             [&](const Case& known) { return known.name == name; });
      c.name = "Fp16Sums" + c.name.substr(std::string("FusedWs").size());
      c.spec.dq_sums = DqSums::fp16;
      list.push_back(c);
    }
    Case large{"Wgmma8Warps_D64_bf16_Row128",
               {64, bf16, top, row, six_of_seven, true, true, true, 64, 128},
               {}};
    large.tiles = large_wgmma_tiles(large.spec);
    list.push_back(large);
    // Another family is the default of these.
    const Case others[] = {{"Wgmma_D64_fp16_Row", {64, fp16, none, row}, {}},
                           {"Wgmma_D128_bf16_Row", {128, bf16, none, row}, {}},
                           {"Wgmma_D256_bf16_Row_TopLeft", {256, bf16, top, row}, {}},
                           {"Wgmma_D256_fp16_Gradients16", {256, fp16, none, row, gradients16}, {}},
                           {"Wgmma_D112_bf16_Row_TopLeft", {112, bf16, top, row}, {}},
                           {"Wgmma_D56_fp16_Gradients16", {56, fp16, none, row, gradients16}, {}},
                           {"Wgmma_D200_bf16_Row", {200, bf16, none, row}, {}}};
    for (Case c : others) {
      c.tiles = family_tiles(c.spec, Family::wgmma);
      list.push_back(c);
    }
    // Three warpgroups of 16-bit operands.
    for (Case c :
         {Case{"Ws12Warps_D64_bf16_Gradients16_TopLeft", {64, bf16, top, row, gradients16}, {}},
          Case{"Ws12Warps_D64_fp16_Dv16", {64, fp16, none, row, dv16}, {}}}) {
      c.tiles = {{KernelKind::backward_dkv, parse_tile("ws 64x192 w12 s4 b1")}};
      list.push_back(c);
    }
    // Sums of dP in FP16.
    struct HalfDp {
      const char* name;
      AttentionSpec spec;
      const char* fused; ///< the tile of one kernel for all gradients, or null
    };
    const HalfDp half_dp[] = {
        {"HalfDp_D64_bf16", {64, bf16, none, row}, nullptr},
        {"HalfDp_D128_fp16_TopLeft", {128, fp16, top, row}, nullptr},
        {"HalfDp_D128_bf16_BottomRight_NoSink",
         {128, bf16, bottom, row, six_of_seven, true, true, true, 64, 64, 0},
         nullptr},
        {"HalfDp_D64_fp16_Block_TopLeft", {64, fp16, top, block}, nullptr},
        {"HalfDp_D128_bf16_Qk16_Unsmoothed", {128, bf16, none, row, qk16, false}, nullptr},
        {"HalfDp_D72_bf16_Dv16_TopLeft", {72, bf16, top, row, dv16}, nullptr},
        {"HalfDp_D128_fp16_Gradients16", {128, fp16, none, row, gradients16}, nullptr},
        {"HalfDp_D256_bf16_TopLeft", {256, bf16, top, row}, nullptr},
        {"HalfDp_D160_bf16_Gradients16", {160, bf16, none, row, gradients16}, nullptr},
        {"HalfDp_Fused_D64_bf16_TopLeft", {64, bf16, top, row}, "mma 64x128 w8 s1 b1"},
        {"HalfDp_Fused_D128_fp16", {128, fp16, none, row}, "mma 64x128 w8 s1 b1"},
        {"HalfDp_Fused_D40_bf16_Gradients16",
         {40, bf16, bottom, row, gradients16},
         "mma 64x64 w4 s2 b1"},
    };
    for (const HalfDp& h : half_dp) {
      Case c{h.name, h.spec, {}};
      c.spec.dp_sums = DpSums::fp16;
      c.spec.deterministic = !h.fused;
      c.tiles = mma_tiles(c.spec);
      if (h.fused)
        (*c.tiles)[KernelKind::backward] = parse_tile(h.fused);
      list.push_back(c);
    }
    Case half_window{"HalfDp_Window_D128_bf16", {128, bf16, none, row}, {}};
    half_window.spec.window_left = 70, half_window.spec.window_right = 20;
    Case half_smooth_q{"HalfDp_SmoothQ_D64_fp16_TopLeft", {64, fp16, top, row}, {}};
    half_smooth_q.spec.smooth_q = true;
    for (Case c : {half_window, half_smooth_q}) {
      c.spec.dp_sums = DpSums::fp16;
      c.tiles = mma_tiles(c.spec);
      list.push_back(c);
    }
    // Queries less their unit's mean.
    const Case smoothed[] = {
        {"SmoothQ_D64_bf16_Row_TopLeft", {64, bf16, top, row}, {}},
        {"SmoothQ_D128_fp16_Row", {128, fp16, none, row}, {}},
        {"SmoothQ_D128_bf16_Block_BottomRight", {128, bf16, bottom, block}, {}},
        {"SmoothQ_D256_bf16_Row", {256, bf16, none, row}, {}},
        {"SmoothQ_D72_fp16_Dv16_TopLeft", {72, fp16, top, row, dv16}, {}},
        {"SmoothQ_D64_bf16_Gradients16",
         {64, bf16, none, row, gradients16, false, true, false},
         {}},
        {"SmoothQ_D128_bf16_SixOfSeven_NotDeterministic",
         {128, bf16, top, row, six_of_seven, true, false, false},
         {}}};
    for (Case c : smoothed) {
      c.spec.smooth_q = true;
      list.push_back(c);
    }
    // Values less their mean.
    const Case values[] = {
        {"SmoothV_D64_bf16_Row", {64, bf16, none, row}, {}},
        {"SmoothV_D64_bf16_Row_TopLeft", {64, bf16, top, row}, {}},
        {"SmoothV_D128_fp16_Row_BottomRight", {128, fp16, bottom, row}, {}},
        {"SmoothV_D128_bf16_Block", {128, bf16, none, block}, {}},
        {"SmoothV_D256_bf16_Gradients16", {256, bf16, none, row, gradients16}, {}},
        {"SmoothV_D80_fp16_Qk16_Unsmoothed", {80, fp16, top, row, qk16, false}, {}},
        {"SmoothV_Mma_D128_bf16_Row_TopLeft", {128, bf16, top, row}, {}}};
    for (Case c : values) {
      c.spec.smooth_v = true;
      if (c.name.find("Mma") != std::string::npos)
        c.tiles = mma_tiles(c.spec);
      list.push_back(c);
    }
    // Windows: within a tile, over several, on one side, and of more than a unit's keys.
    const Windowed windowed[] = {
        {"Window_D64_bf16", {64, bf16, none, row}, 100, 30, false},
        {"Window_D128_fp16_TopLeft", {128, fp16, top, row}, 70, -1, false},
        {"Window_D128_bf16_Gradients16_BottomRight",
         {128, bf16, bottom, row, gradients16},
         300,
         -1,
         false},
        {"Window_D64_bf16_Block_TopLeft", {64, bf16, top, block}, 90, -1, false},
        {"Window_D128_fp16_Qk16_NarrowLeft", {128, fp16, none, row, qk16}, 0, -1, false},
        {"Window_D64_fp16_Dv16_Right", {64, fp16, none, row, dv16}, -1, 20, false},
        {"Window_D256_bf16_TopLeft", {256, bf16, top, row}, 40, -1, false},
        {"Window_D256_fp16_Gradients16", {256, fp16, none, row, gradients16}, 150, 0, false},
        {"Window_D80_bf16_TopLeft", {80, bf16, top, row}, 200, -1, false},
        {"Window_Mma_D64_bf16_TopLeft", {64, bf16, top, row}, 33, -1, true},
        {"Window_Mma_D128_fp16", {128, fp16, none, row}, 280, 64, true},
        {"Window_Mma_D128_bf16_Block", {128, bf16, none, block}, 65, 5, true},
        {"Window_Mma_D128_bf16_Qk16_BottomRight", {128, bf16, bottom, row, qk16}, 10, -1, true},
        {"Window_Mma_D256_bf16", {256, bf16, none, row}, 90, 3, true},
    };
    for (const Windowed& w : windowed) {
      Case c{w.name, w.spec, {}};
      c.spec.window_left = w.left, c.spec.window_right = w.right;
      if (w.mma)
        c.tiles = mma_tiles(c.spec);
      list.push_back(c);
    }
    Case fused_window = *std::find_if(list.begin(), list.end(),
                                      [](const Case& c) { return c.name == "FusedWs_D128_bf16"; });
    fused_window.name = "Window_FusedWs_D128_bf16";
    fused_window.spec.window_left = 77;
    list.push_back(fused_window);
    // These have packed sequences, which packed_test.cpp adds to others of these cases.
    const Windowed packed[] = {
        {"Packed_D64_bf16_TopLeft", {64, bf16, top, row}, -1, -1, false},
        {"Packed_D128_fp16_Gradients16_BottomRight",
         {128, fp16, bottom, row, gradients16},
         -1,
         -1,
         false},
        {"Packed_D256_bf16_Window", {256, bf16, none, row}, 100, 20, false},
        {"Packed_Mma_D128_bf16_TopLeft", {128, bf16, top, row}, -1, -1, true},
    };
    for (const Windowed& p : packed) {
      Case c{p.name, p.spec, {}};
      c.spec.window_left = p.left, c.spec.window_right = p.right, c.spec.packed = true;
      if (p.mma)
        c.tiles = mma_tiles(c.spec);
      list.push_back(c);
    }
    for (const std::vector<Case>& wide : {turns_cases(), very_wide_cases()})
      list.insert(list.end(), wide.begin(), wide.end());
    list.push_back({"Pair1Stage_D256_bf16_Row_TopLeft",
                    {256, bf16, top, row},
                    Tiles{{KernelKind::backward_dq, parse_tile("pair 64x128 w8 s1 b1")}}});
    return list;
  }();
  return cases;
}

inline std::vector<Case> cases_named(const std::vector<std::string>& names) {
  std::vector<Case> found;
  for (const Case& c : all_cases())
    if (std::find(names.begin(), names.end(), c.name) != names.end())
      found.push_back(c);
  if (found.size() != names.size())
    throw SpecError("a test names a case that does not exist");
  return found;
}

/// How GoogleTest shows a case.
inline void PrintTo(const Case& c, std::ostream* out) { *out << to_string(c.spec); }
inline std::string case_name(const testing::TestParamInfo<Case>& info) { return info.param.name; }

/// A test of one case on GPU 0, skipped where its tiles cannot run.
class CaseTest : public OnGpu, public testing::WithParamInterface<Case> {
protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped())
      return;
    const driver::DeviceInfo info = driver::device_info(0);
    const Arch& arch = arch_for_capability(info.major, info.minor);
    if (!runs_on(GetParam(), arch))
      GTEST_SKIP() << "wgmma needs sm_90a";
    start(arch);
  }
  virtual void start(const Arch&) { attention.emplace(GetParam().spec, 0, GetParam().tiles); }
  std::optional<Attention> attention;
};

} // namespace sagebwd::test
