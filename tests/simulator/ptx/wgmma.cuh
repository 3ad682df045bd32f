#pragma once

inline void wgmma_fence() { simulator::lane().allow_products(); }
inline void wgmma_commit() { simulator::lane().commit_products(); }
template <int PENDING> void wgmma_wait() { simulator::lane().wait_for_products(PENDING); }
inline void fence_async_proxy() { simulator::lane().publish_copies(); }

template <int PITCH_BYTES> u64 matrix_descriptor(u32 address) {
  constexpr u64 SWIZZLE = PITCH_BYTES == 128 ? 1 : 2;
  return SWIZZLE << 62 | static_cast<u64>(8 * PITCH_BYTES >> 4) << 32 | 1ull << 16 |
         static_cast<u64>((address & 0x3ffff) >> 4);
}

namespace simulator {
template <class T> constexpr Element kElement = Element::bf16;
template <> constexpr Element kElement<fp16> = Element::fp16;

inline void from_tiles(Element element, int columns, void* d, u64 a, u64 b, bool accumulate) {
  lane().multiply({element, columns, false, accumulate, d, false, {}, a, b});
}
inline void from_registers(Element element, int columns, bool transposed, void* d,
                           const u32 (&a)[4], u64 b, bool accumulate) {
  lane().multiply(
      {element, columns, transposed, accumulate, d, true, {a[0], a[1], a[2], a[3]}, 0, b});
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
template <typename T>
void wgmma_16_transposed(float (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  simulator::from_registers(simulator::kElement<T>, 64, true, d, a, b, accumulate);
}

/// The sums' addresses are known to the simulator: the compiler keeps them in memory.
template <typename Sum> void hold(Sum (&)[4]) {}
