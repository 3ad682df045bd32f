#pragma once

#include "ptx/element.cuh"

inline void mma_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  simulator::lane().multiply({simulator::Element::s8, d, a, {b0, b1}, c});
}
inline void mma_u8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  simulator::lane().multiply({simulator::Element::u8, d, a, {b0, b1}, c});
}
inline void mma_16_half_sums(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[2]) {
  simulator::lane().multiply({simulator::Element::fp16_half_sums, d, a, {b0, b1}, c});
}
template <typename T>
void mma_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  simulator::lane().multiply({simulator::kElement<T>, d, a, {b0, b1}, c});
}
