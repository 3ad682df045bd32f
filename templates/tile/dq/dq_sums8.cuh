//===- tile/dq/dq_sums8.cuh - The same in INT8 ---------------------------------===//
//
// dQ's dS has a scale for each query and all keys of the block, which are its quantisation group.
// Warps find a query's maximum together in shared memory; after a barrier each quantises what it
// has. A column of accumulators is a query and A's rows are to be queries: with the bytes of keys g
// and g + 8 side by side as one 16-bit element, movmatrix turns 16 keys x 8 queries at a time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/dq/dq_sums.cuh"
#include "tile/math/magic_start.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/memory/fragments.cuh"
#include "tile/memory/key_layout.cuh"

/// The first of the two queries, neighbours, whose maxima this lane ends up with.
__device__ __forceinline__ int own_column() {
  const int lane = lane_id();
  return (lane >> 4 & 1) * 32 + (lane >> 3 & 1) * 16 + (lane >> 2 & 1) * 8 + (lane & 3) * 2;
}

/// A lane hands HALF of the maxima of 2 * HALF columns over to another and takes that one's.
template <int HALF> __device__ __forceinline__ void keep_half(float (&m)[16]) {
  const bool upper = lane_id() & 2 * HALF;
#pragma unroll
  for (int k = 0; k < HALF; ++k) {
    const float given = upper ? m[k] : m[k + HALF], kept = upper ? m[k + HALF] : m[k];
    m[k] = max_nan(kept, __shfl_xor_sync(~0u, given, 2 * HALF));
  }
}

/// Raises the queries' maxima to the magnitudes of this warp's dS^T. A lane hands over half of its
/// columns, 16 at first, at each of three exchanges.
__device__ __forceinline__ void raise_maxima(u32 maxima, const float (&ds)[8][4]) {
  float m[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    m[2 * j] = max_magnitude(fabsf(ds[j][0]), ds[j][2]);
    m[2 * j + 1] = max_magnitude(fabsf(ds[j][1]), ds[j][3]);
  }
  keep_half<8>(m);
  keep_half<4>(m);
  keep_half<2>(m);
#pragma unroll
  for (int k = 0; k < 2; ++k)
    raise_float(maxima + (own_column() + k) * 4, m[k]);
}

/// dQ of a block that owns keys, tile by tile: what a warp adds to its share of the sums.
class DqInInt8 {
public:
  static constexpr int SUMS = DqShare::CHANNELS / 8; ///< n8 tiles of channels

  __device__ __forceinline__ explicit DqInInt8(u32 shared)
      : shared_(shared), maxima_(shared + LAYOUT.maxima) {}

  /// Starts copying what stays for the whole walk. A barrier follows.
  __device__ __forceinline__ void load(const Params& p, const KeyHead& at, int first_key) const {
    load_swizzled<BLOCK_KV * HEAD_DIM>(shared_ + LAYOUT.dq_keys,
                                       p.kt8 + (at.padded_key() + first_key) * HEAD_DIM);
    const s64 scale_block =
        at.first_key_scale_block<CHANNEL_TOKENS_KV>() + first_key / CHANNEL_TOKENS_KV;
    load_floats<HEAD_DIM, THREADS>(shared_ + LAYOUT.channels,
                                   p.kt8_scale + scale_block * (CHANNEL_VECTORS * HEAD_DIM) +
                                       CHANNEL_SCALE * HEAD_DIM);
    clear(maxima_);
  }
  /// dS^T of a tile is known. A barrier follows.
  __device__ __forceinline__ void raise_scales(const float (&ds)[8][4]) const {
    raise_maxima(maxima_, ds);
  }
  /// Before write(), when the maxima are whole.
  __device__ __forceinline__ void begin_write() const {
    clear(maxima_ ^ LAYOUT.set_bytes);
    const float2 largest = read_float2(maxima_ + own_column() * 4);
    const u32 place = inverses() + sigma_slot(own_column()) * 4;
    write_float(place, fast_scale<SIGNED_LEVELS>(largest.x).inverse);
    write_float(place + 4, fast_scale<SIGNED_LEVELS>(largest.y).inverse);
    __syncwarp();
  }
  /// Columns 8j of this warp's dS^T in 8 bits, by the queries' scales: [query][slot of key]. Behind
  /// the last a barrier follows.
  __device__ __forceinline__ void write(const float (&ds)[4], int j) const {
    const float2 by = read_float2(inverses() + j / 2 * 64 + j % 2 * 8 + (lane_id() & 3) * 16);
    const u32 keys_side_by_side = pack_scaled<true>(ds[0], ds[2], ds[1], ds[3], by.x, by.y);
    // Bytes of keys 2t, 2t + 8, 2t + 1, 2t + 9 of one query: the slots' order is 2t, 2t + 1, ..
    const u32 word = __byte_perm(transpose_8x8(keys_side_by_side), 0, 0x3120);
    write_word(shared_ + LAYOUT.ds + chunk_offset<BLOCK_KV>(8 * j + lane_id() / 4, warp_id()) +
                   (lane_id() & 3) * 4,
               word);
  }
  /// The warp's share of dS K, and the scales of its queries, whose next maxima then are others.
  __device__ __forceinline__ void multiply(int (&products)[SUMS][4], float (&row)[2]) {
    static_assert(exact_with_magic(SIGNED_LEVELS, SIGNED_LEVELS, BLOCK_KV));
    const DqShare own;
    const u32 rows =
        shared_ + LAYOUT.ds + a_lane_offset<BLOCK_KV>() + row_offset<BLOCK_KV>(own.first_row);
    const u32 columns = shared_ + LAYOUT.dq_keys + b_lane_offset<TOKEN_ROW_BYTES>() +
                        own.first_channel * TOKEN_ROW_BYTES;
    const MagicStart start;
#pragma unroll
    for (int step = 0; step < BLOCK_KV / 32; ++step) {
      u32 a[4];
      load_fragment<BLOCK_KV>(a, rows, 0, step);
#pragma unroll
      for (int pair = 0; pair < SUMS / 2; ++pair) {
        u32 b[4];
        load_fragment<TOKEN_ROW_BYTES>(b, columns + step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES),
                                       pair * 16, step % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int(&sum)[4] = products[2 * pair + half];
          if (step == 0)
            mma_s8(sum, a, b[2 * half], b[2 * half + 1], start.bits);
          else
            mma_s8(sum, a, b[2 * half], b[2 * half + 1], sum);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row[r] = fast_scale<SIGNED_LEVELS>(
                   read_float(maxima_ + (own.first_row + lane_id() / 4 + 8 * r) * 4))
                   .value;
    maxima_ ^= LAYOUT.set_bytes;
  }
  /// Adds it to the sums of the tile's queries.
  __device__ __forceinline__ void add_to(float* sums, const int (&products)[SUMS][4],
                                         const float (&row)[2]) const {
    const DqShare own;
    const u32 channels = shared_ + LAYOUT.channels + own.first_channel * 4;
#pragma unroll
    for (int pair = 0; pair < SUMS / 2; ++pair) {
      const float4 scale_block = read_columns(channels, pair);
      const float of_column[4] = {scale_block.x, scale_block.y, scale_block.z, scale_block.w};
      float x[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[half][i] = (__int_as_float(products[2 * pair + half][i]) - MAGIC) *
                       (row[i >> 1] * of_column[2 * half + (i & 1)]);
      }
      add_to_memory(sums + own.first_row * HEAD_DIM, own.first_channel + pair * 16, x);
    }
  }

private:
  /// This warp's copy of the inverse scales.
  __device__ __forceinline__ u32 inverses() const {
    return shared_ + LAYOUT.inverses + warp_id() * LAYOUT.set_bytes;
  }
  static __device__ __forceinline__ void clear(u32 maxima) {
    if (threadIdx.x < TOKENS_PER_TILE)
      write_float(maxima + threadIdx.x * 4, 0);
  }

  u32 shared_;
  u32 maxima_; ///< of dS, two sets in turn
};
