#pragma once

inline void ldmatrix_x4(u32 (&r)[4], u32 address, int line = __builtin_LINE()) {
  simulator::lane().load_matrices(r, address, false, line);
}
inline void ldmatrix_x4_transposed(u32 (&r)[4], u32 address, int line = __builtin_LINE()) {
  simulator::lane().load_matrices(r, address, true, line);
}
inline void stmatrix_x4(u32 address, const u32 (&r)[4], int line = __builtin_LINE()) {
  simulator::lane().store_matrices(address, r, line);
}
inline u32 transpose_8x8(u32 two, int line = __builtin_LINE()) {
  return simulator::lane().transpose(two, line);
}
