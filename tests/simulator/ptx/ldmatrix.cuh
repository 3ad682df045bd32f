#pragma once

namespace simulator {

/// r[m] of a lane: row lane / 4 of matrix m, its 4 bytes from 4 * (lane % 4) on; transposed, as
/// 16-bit elements: rows 2 (lane % 4) and the next, column lane / 4.
template <bool TRANSPOSED> void ldmatrix(u32 (&r)[4], u32 address, int line) {
  struct Part {
    const char* row;
    u32 (&r)[4];
  } mine{lane().at(address, 16), r};
  together("ldmatrix", line, mine, [](Lanes<Part> lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int row = lane / 4, place = lane % 4;
        const auto element = [&](int row, int column) -> u32 {
          return reinterpret_cast<const u16*>(lanes[8 * matrix + row].row)[column];
        };
        lanes[lane].r[matrix] = TRANSPOSED
                                    ? element(2 * place, row) | element(2 * place + 1, row) << 16
                                    : element(row, 2 * place) | element(row, 2 * place + 1) << 16;
      }
  });
}

} // namespace simulator

inline void ldmatrix_x4(u32 (&r)[4], u32 address, int line = __builtin_LINE()) {
  simulator::ldmatrix<false>(r, address, line);
}
inline void ldmatrix_x4_transposed(u32 (&r)[4], u32 address, int line = __builtin_LINE()) {
  simulator::ldmatrix<true>(r, address, line);
}

inline void stmatrix_x4(u32 address, const u32 (&r)[4], int line = __builtin_LINE()) {
  struct Part {
    char* row;
    const u32 (&r)[4];
  } mine{simulator::lane().at(address, 16), r};
  simulator::lane().wrote(address, 16);
  simulator::together("stmatrix", line, mine, [](simulator::Lanes<Part> lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix)
        reinterpret_cast<u32*>(lanes[8 * matrix + lane / 4].row)[lane % 4] = lanes[lane].r[matrix];
  });
}

inline u32 transpose_8x8(u32 two, int line = __builtin_LINE()) {
  struct Part {
    u32 two, turned;
  } mine{two, 0};
  simulator::together("movmatrix", line, mine, [](simulator::Lanes<Part> lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      const int column = lane / 4;
      const auto element = [&](int row) {
        return lanes[4 * row + column / 2].two >> 16 * (column % 2) & 0xffff;
      };
      lanes[lane].turned = element(2 * (lane % 4)) | element(2 * (lane % 4) + 1) << 16;
    }
  });
  return mine.turned;
}
