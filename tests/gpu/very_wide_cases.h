//===- very_wide_cases.h - The kernels of heads of more than 256 channels ----===//
#pragma once

#include "tests/gpu/case.h"

#include <vector>

namespace sagebwd::test {

/// Every value of every option that they have.
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
      c.spec.window_left = 90;
      c.spec.window_right = c.spec.causal == none ? 3 : kNoWindow;
    }
    if (c.name.starts_with("Team"))
      c.tiles = mma_tiles(c.spec, "sm_86");
  }
  return list;
}

} // namespace sagebwd::test
