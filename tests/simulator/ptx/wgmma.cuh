#pragma once

#include "ptx/element.cuh"

inline void wgmma_fence() { simulator::lane().allow_products(); }
inline void wgmma_commit() { simulator::lane().commit_products(); }
template <int PENDING> void wgmma_wait() { simulator::lane().wait_for_products(PENDING); }
inline void fence_async_proxy() { simulator::lane().publish_copies(); }

template <int PITCH_BYTES>
constexpr u64 DESCRIPTOR_HIGH = (PITCH_BYTES == 128  ? 1u
                                 : PITCH_BYTES == 64 ? 2u
                                                     : 0u)
                                    << 30 |
                                8 * PITCH_BYTES >> 4;
template <int PANEL = 16> u32 descriptor_low(u32 address) {
  return static_cast<u32>(PANEL >> 4) << 16 | (address & 0x3ffff) >> 4;
}
template <int PITCH_BYTES, int PANEL = 16> u64 matrix_descriptor(u32 address) {
  return DESCRIPTOR_HIGH<PITCH_BYTES> << 32 | descriptor_low<PANEL>(address);
}
template <int PITCH_BYTES, int PANEL = 16> u64 descriptor_in_units(u32 units) {
  return matrix_descriptor<PITCH_BYTES, PANEL>(units << 4);
}

namespace simulator {
inline void from_tiles(Element element, int columns, void* d, u64 a, u64 b, bool accumulate) {
  lane().multiply({element, columns, false, false, accumulate, d, false, {}, a, b});
}
inline void from_registers(Element element, int columns, bool transposed, void* d,
                           const u32 (&a)[4], u64 b, bool accumulate) {
  lane().multiply(
      {element, columns, transposed, false, accumulate, d, true, {a[0], a[1], a[2], a[3]}, 0, b});
}
template <bool SIGNED> constexpr Element kByte = SIGNED ? Element::s8 : Element::u8;
} // namespace simulator

inline void wgmma_s8(int (*d)[4], u64 a, u64 b, bool accumulate) {
  simulator::from_tiles(simulator::Element::s8, 64, d, a, b, accumulate);
}
inline void wgmma_s8_wide(int (*d)[4], u64 a, u64 b, bool accumulate) {
  simulator::from_tiles(simulator::Element::s8, 128, d, a, b, accumulate);
}
template <bool SIGNED> void wgmma_8(int (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kByte<SIGNED>, 64, false, d, a, b, accumulate);
}
template <bool SIGNED> void wgmma_8_wide(int (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kByte<SIGNED>, 128, false, d, a, b, accumulate);
}
template <typename T, typename Sum> void wgmma_16(Sum (*d)[4], u64 a, u64 b, bool accumulate) {
  simulator::from_tiles(simulator::kElement<T>, 64, d, a, b, accumulate);
}
template <typename T> void wgmma_16_wide(int (*d)[4], u64 a, u64 b, bool accumulate) {
  simulator::from_tiles(simulator::kElement<T>, 128, d, a, b, accumulate);
}
inline void wgmma_bf16_start(int (*d)[4], const u32 (&a)[4], u64 b) {
  simulator::from_registers(simulator::Element::bf16, 64, false, d, a, b, false);
}
inline void wgmma_bf16_start_wide(int (*d)[4], const u32 (&a)[4], u64 b) {
  simulator::from_registers(simulator::Element::bf16, 128, false, d, a, b, false);
}
template <typename T>
void wgmma_16_transposed(float (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kElement<T>, 64, true, d, a, b, accumulate);
}
template <typename T>
void wgmma_16_registers(float (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kElement<T>, 64, false, d, a, b, accumulate);
}
template <typename T>
void wgmma_16_transposed_wide(float (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kElement<T>, 128, true, d, a, b, accumulate);
}
template <typename T, int COLUMNS, bool A_TRANSPOSED>
void wgmma_16_tiles(float (*d)[4], u64 a, u64 b, bool accumulate) {
  simulator::lane().multiply(
      {simulator::kElement<T>, COLUMNS, true, A_TRANSPOSED, accumulate, d, false, {}, a, b});
}

/// The sums' addresses are known to the simulator: the compiler keeps them in memory.
template <typename Sum> void hold(Sum (&)[4]) {}
