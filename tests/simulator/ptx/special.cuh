#pragma once

inline int read_thread_index() { return static_cast<int>(threadIdx.x); }
inline int read_block_x() { return static_cast<int>(blockIdx.x); }
inline int read_block_y() { return blockIdx.y; }
inline void read_block_yz(int& y, int& z) {
  y = static_cast<int>(blockIdx.y);
  z = static_cast<int>(blockIdx.z);
}
template <typename Int> Int opaque(Int x) { return x; }
template <int N, int M> void order_behind(u32&, const u32 (&)[N][M], u32) {}
struct LaneMasks {
  u32 below, self, above;
};
inline LaneMasks read_lane_masks() {
  const u32 self = 1u << threadIdx.x % 32;
  return {self - 1, self, ~(2 * self - 1)};
}
