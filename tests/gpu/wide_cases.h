//===- wide_cases.h - Kernels of wide heads in little shared memory ----------===//
#pragma once

#include "tests/gpu/case.h"

#include <vector>

namespace sagebwd::test {

/// Wide heads in 99 KB, where parts of a tile take turns in shared memory.
inline std::vector<Case> turns_cases() {
  using enum DType;
  using enum Precision;
  constexpr auto row = Granularity::row;
  constexpr auto none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  std::vector<Case> turns = {
      {"Turns_D256_bf16_BottomRight", {256, bf16, bottom, row}, {}},
      {"Turns_D256_fp16_Gradients16_TopLeft", {256, fp16, top, row, gradients16}, {}},
      {"Turns_D200_bf16_Row64", {200, bf16, none, row, six_of_seven, true, true, true, 64, 64}, {}},
      {"Turns_HalfDp_D256_fp16_TopLeft", {256, fp16, top, row}, {}},
      {"Turns_HalfDp_D256_bf16_Gradients16", {256, bf16, none, row, gradients16}, {}},
      {"Turns_HalfDp_D160_fp16_Gradients16_BottomRight", {160, fp16, bottom, row, gradients16}, {}},
      {"Turns_SmoothQ_D160_bf16", {160, bf16, none, row}, {}},
      {"Turns_Window_D256_bf16", {256, bf16, none, row}, {}},
      {"Turns_Packed_D256_fp16_TopLeft", {256, fp16, top, row}, {}}};
  for (int i : {3, 4, 5})
    turns[i].spec.dp_sums = DpSums::fp16;
  turns[6].spec.smooth_q = true;
  turns[7].spec.window_left = 90, turns[7].spec.window_right = 3;
  turns[8].spec.packed = true;
  for (Case& c : turns) {
    c.tiles = mma_tiles(c.spec, "sm_86");
  }
  return turns;
}

/// Heads of more than 256 channels: every value of every option that they have.
inline std::vector<Case> very_wide_cases() {
  using enum DType;
  using enum Precision;
  constexpr auto row = Granularity::row;
  constexpr auto none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  std::vector<Case> list = {
      {"D512_bf16_Row", {512, bf16, none, row}, {}},
      {"D512_fp16_Row_TopLeft", {512, fp16, top, row}, {}},
      {"D512_fp16_Gradients16", {512, fp16, none, row, gradients16, false}, {}},
      {"D512_bf16_Gradients16_BottomRight", {512, bf16, bottom, row, gradients16}, {}},
      {"D512_bf16_Row_BottomRight_NoSink",
       {512, bf16, bottom, row, six_of_seven, true, false, true, 64, 64, 0},
       {}},
      {"D264_bf16_Row_TopLeft", {264, bf16, top, row}, {}},
      {"D320_fp16_Gradients16_TopLeft", {320, fp16, top, row, gradients16}, {}},
      {"D384_bf16_Row", {384, bf16, none, row}, {}},
      {"Window_D512_bf16", {512, bf16, none, row}, {}},
      {"Window_D384_fp16_Gradients16_TopLeft", {384, fp16, top, row, gradients16}, {}},
      {"Packed_D512_bf16_Row_TopLeft", {512, bf16, top, row}, {}},
      {"Packed_D320_fp16_Gradients16_Window", {320, fp16, none, row, gradients16}, {}},
      // Those of all other GPUs, where sm_90a has its own.
      {"Team_D512_bf16_Row_TopLeft", {512, bf16, top, row}, {}},
      {"Team_D512_fp16_Gradients16_BottomRight", {512, fp16, bottom, row, gradients16}, {}},
      {"Team_D264_bf16_Row", {264, bf16, none, row}, {}},
      {"Team_Window_D320_bf16", {320, bf16, none, row}, {}},
      {"Team_Packed_D384_fp16_Gradients16", {384, fp16, none, row, gradients16}, {}},
  };
  for (Case& c : list) {
    c.spec.packed = c.name.find("Packed") != std::string::npos;
    if (c.name.find("Window") != std::string::npos) {
      c.spec.window_left = 83; // at 129 and 300 tokens half of 16 queries see all of 16 keys
      c.spec.window_right = c.spec.causal == none ? 3 : kNoWindow;
    }
    if (c.name.starts_with("Team"))
      c.tiles = mma_tiles(c.spec, "sm_86");
  }
  return list;
}

} // namespace sagebwd::test
