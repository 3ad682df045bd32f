//===- products.cpp - A warp's matrix products ------------------------------===//
//
// Fragments are those of the PTX ISA, which templates/ptx/mma.cuh describes: with g = lane / 4 and
// t = lane % 4 a lane holds rows g and g + 8 of A and D, and column g of B.
//
//===----------------------------------------------------------------------===//

#include "tests/simulator/products.h"
#include "tests/simulator/formats.h"

#include <cstdint>
#include <cstring>

namespace simulator {

namespace {

constexpr int kRows = 16, kDepth = 32, kMostColumns = 256; // kDepth in bytes
constexpr int kFewest = 8;                                 ///< columns, those of an mma.sync

// Each CPU gets code of the same source, which is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

using Bytes = uint8_t[kDepth];

template <class Byte>
[[gnu::always_inline]] inline void widen(int16_t (*to)[kDepth], const Bytes* from, int count) {
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < kDepth; ++k)
      to[i][k] = static_cast<Byte>(from[i][k]);
}
[[gnu::always_inline]] inline void add_byte_products(int* d, int columns, const Bytes* a,
                                                     bool a_signed, const Bytes* b) {
  int16_t rows[kRows][kDepth], wide[kMostColumns][kDepth];
  a_signed ? widen<int8_t>(rows, a, kRows) : widen<uint8_t>(rows, a, kRows);
  widen<int8_t>(wide, b, columns);
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < columns; ++column) {
      int sum = 0;
      for (int k = 0; k < kDepth; ++k)
        sum += rows[row][k] * wide[column][k];
      d[row * columns + column] += sum;
    }
}

FOR_EACH_CPU void add_products(int* d, int columns, const Bytes* a, bool a_signed, const Bytes* b) {
  columns == kFewest ? add_byte_products(d, kFewest, a, a_signed, b)
                     : add_byte_products(d, columns, a, a_signed, b);
}

template <float (*VALUE)(unsigned)>
[[gnu::always_inline]] inline void add_products(float* d, int columns, const Bytes* a,
                                                const Bytes* b) {
  float rows[kRows][kDepth / 2], wide[kDepth / 2][kMostColumns];
  uint16_t bits[kMostColumns];
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(bits, a[row], kDepth);
    for (int k = 0; k < kDepth / 2; ++k)
      rows[row][k] = VALUE(bits[k]);
  }
  for (int k = 0; k < kDepth / 2; ++k) {
    for (int column = 0; column < columns; ++column)
      std::memcpy(&bits[column], &b[column][2 * k], 2);
    for (int column = 0; column < columns; ++column)
      wide[k][column] = VALUE(bits[column]);
  }
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth / 2; ++k)
      for (int column = 0; column < columns; ++column)
        d[row * columns + column] += rows[row][k] * wide[k][column];
}
FOR_EACH_CPU void add_bf16_products(float* d, int columns, const Bytes* a, const Bytes* b) {
  columns == kFewest ? add_products<float_of_bf16>(d, kFewest, a, b)
                     : add_products<float_of_bf16>(d, columns, a, b);
}
FOR_EACH_CPU void add_fp16_products(float* d, int columns, const Bytes* a, const Bytes* b) {
  columns == kFewest ? add_products<float_of_fp16>(d, kFewest, a, b)
                     : add_products<float_of_fp16>(d, columns, a, b);
}

/// This one has sums in FP16, of `kFewest` columns. The PTX ISA leaves open how they are rounded.
/// Here the exact sum of the 16 products and of c is rounded once, to nearest even.
FOR_EACH_CPU void add_halves(uint16_t* d, const Bytes* a, const Bytes* b) {
  double rows[kRows][kDepth / 2], wide[kDepth / 2][kFewest];
  uint16_t bits[kDepth / 2];
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(bits, a[row], kDepth);
    for (int k = 0; k < kDepth / 2; ++k)
      rows[row][k] = float_of_fp16(bits[k]);
  }
  for (int column = 0; column < kFewest; ++column) {
    std::memcpy(bits, b[column], kDepth);
    for (int k = 0; k < kDepth / 2; ++k)
      wide[k][column] = float_of_fp16(bits[k]);
  }
  for (int row = 0; row < kRows; ++row) {
    double sums[kFewest] = {};
    for (int k = 0; k < kDepth / 2; ++k)
      for (int column = 0; column < kFewest; ++column)
        sums[column] += rows[row][k] * wide[k][column];
    uint16_t* sum = d + row * kFewest;
    for (int column = 0; column < kFewest; ++column)
      sum[column] =
          static_cast<uint16_t>(fp16_of_double(sums[column] + float_of_fp16(sum[column])));
  }
}

/// Both operands' bytes: rows of A, and columns of B.
struct Operands {
  int columns;
  Bytes a[kRows], b[kMostColumns];

  void take_a(int lane, const unsigned (&word)[4]) {
    for (int i = 0; i < 4; ++i)
      std::memcpy(&a[lane / 4 + i % 2 * 8][lane % 4 * 4 + i / 2 * 16], &word[i], 4);
  }
  void take_b(int lane, const unsigned (&word)[2]) {
    for (int i = 0; i < 2; ++i)
      std::memcpy(&b[lane / 4][lane % 4 * 4 + i * 16], &word[i], 4);
  }

  /// d(lane) and c(lane) give a lane's sums; c may give nullptr, for zeros. Where COLUMNS says how
  /// many there are, loops over them have a length that the compiler knows.
  template <int COLUMNS = 0, class D, class C>
  void multiply(Element element, const D& d, const C& c) const {
    const int columns = COLUMNS > 0 ? COLUMNS : this->columns;
    constexpr size_t kPair = 2 * sizeof(int32_t);
    int32_t sums[kRows * kMostColumns];                     // or floats, by their bits
    const auto exchange = [&](int lane, const auto& move) { // two pairs a tile of 8 columns
      int32_t* row = sums + lane / 4 * columns + lane % 4 * 2;
      for (int tile = 0; tile < columns / 8; ++tile)
        for (int half = 0; half < 2; ++half)
          move((2 * tile + half) * kPair, row + half * 8 * columns + tile * 8);
    };
    for (int lane = 0; lane < 32; ++lane) {
      const char* from = static_cast<const char*>(c(lane));
      if (from)
        exchange(lane, [&](size_t at, int32_t* pair) { std::memcpy(pair, from + at, kPair); });
      else
        exchange(lane, [&](size_t, int32_t* pair) { std::memset(pair, 0, kPair); });
    }
    float* floats = reinterpret_cast<float*>(sums); // compiled with -fno-strict-aliasing
    if (element == Element::bf16)
      add_bf16_products(floats, columns, a, b);
    else if (element == Element::fp16)
      add_fp16_products(floats, columns, a, b);
    else
      add_products(sums, columns, a, element == Element::s8, b);
    for (int lane = 0; lane < 32; ++lane) {
      char* to = static_cast<char*>(d(lane));
      exchange(lane, [&](size_t at, int32_t* pair) { std::memcpy(to + at, pair, kPair); });
    }
  }
};

/// A matrix descriptor names a tile in shared memory: its rows are 16, 64 or 128 bytes apart, eight
/// of them to a stride, 16-byte chunks swizzled by the address's bits 7 to 9. Bytes further on in a
/// row lie in the next panel.
class Tile {
public:
  Tile(unsigned long long descriptor, const char* shared, unsigned shared_bytes)
      : start_((descriptor & 0x3fff) << 4), panels_((descriptor >> 16 & 0x3fff) << 4),
        stride_((descriptor >> 32 & 0x3fff) << 4), pitch_(kPitches[descriptor >> 62]),
        shared_(shared), shared_bytes_(shared_bytes) {}

  /// 16 bytes or fewer within a chunk.
  const char* at(int row, int byte) const {
    unsigned place = start_ + row / 8 * stride_ + row % 8 * pitch_ + byte % pitch_;
    if (byte >= static_cast<int>(pitch_))
      place += byte / pitch_ * panels_;
    place ^= (place >> 7 & (pitch_ / 16 - 1)) << 4;
    if (place + 16 > shared_bytes_ + place % 16)
      lane().fail("wgmma reads beyond shared memory, at", place);
    return shared_ + place;
  }

private:
  static constexpr unsigned kPitches[] = {16, 128, 64, 32}; // of each swizzle
  unsigned start_, panels_, stride_, pitch_;
  const char* shared_;
  unsigned shared_bytes_;
};

} // namespace

void multiply(const WarpProduct* const* lanes) {
  Operands operands;
  operands.columns = 8;
  for (int lane = 0; lane < 32; ++lane) {
    operands.take_a(lane, reinterpret_cast<const unsigned(&)[4]>(*lanes[lane]->a));
    operands.take_b(lane, lanes[lane]->b);
  }
  const auto d = [&](int lane) { return lanes[lane]->d; };
  const auto c = [&](int lane) { return lanes[lane]->c; };
  if (lanes[0]->element != Element::fp16_half_sums)
    return operands.multiply<kFewest>(lanes[0]->element, d, c);
  uint16_t sums[kRows][kFewest]; // a lane has two pairs
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half)
      std::memcpy(&sums[lane / 4 + 8 * half][lane % 4 * 2],
                  static_cast<const char*>(lanes[lane]->c) + 4 * half, 4);
  add_halves(sums[0], operands.a, operands.b);
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half)
      std::memcpy(static_cast<char*>(lanes[lane]->d) + 4 * half,
                  &sums[lane / 4 + 8 * half][lane % 4 * 2], 4);
}

void multiply(const GroupProduct* lanes, int warp, const char* shared, unsigned shared_bytes) {
  const GroupProduct& all = lanes[0];
  Operands operands;
  operands.columns = all.columns;
  const Tile a(all.a_tile, shared, shared_bytes), b(all.b_tile, shared, shared_bytes);
  if (all.a_in_registers)
    for (int lane = 0; lane < 32; ++lane)
      operands.take_a(lane, lanes[lane].a);
  else if (all.a_transposed)
    for (int row = 0; row < kRows; ++row)
      for (int k = 0; k < kDepth / 2; ++k)
        std::memcpy(&operands.a[row][2 * k], a.at(k, 2 * (warp * kRows + row)), 2);
  else
    for (int row = 0; row < kRows; ++row)
      for (int byte = 0; byte < kDepth; byte += 16)
        std::memcpy(&operands.a[row][byte], a.at(warp * kRows + row, byte), 16);
  for (int column = 0; column < all.columns; ++column)
    if (all.transposed)
      for (int k = 0; k < kDepth / 2; ++k)
        std::memcpy(&operands.b[column][2 * k], b.at(k, 2 * column), 2);
    else
      for (int byte = 0; byte < kDepth; byte += 16)
        std::memcpy(&operands.b[column][byte], b.at(column, byte), 16);
  const auto sums = [&](int lane) { return lanes[lane].d; };
  operands.multiply(all.element, sums,
                    [&](int lane) { return all.accumulate ? lanes[lane].d : nullptr; });
}

} // namespace simulator
