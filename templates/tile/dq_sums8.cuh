//===- tile/dq_sums8.cuh - The same in INT8 ---------------------------------===//
//
// dQ's dS has a scale for each query and all keys of the block, which are its quantisation group.
// Warps find a query's maximum together in shared memory; after a barrier each quantises what it
// has. A column of accumulators is a query and A's rows are to be queries: with the bytes of keys g
// and g + 8 side by side as one 16-bit element, movmatrix turns 16 keys x 8 queries at a time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/fused_dq.cuh"
#include "tile/dq_sums.cuh"
#include "tile/fragments.cuh"
#include "tile/magic_start.cuh"
#include "tile/quantizer.cuh"

constexpr FusedDqLayout DQ_LAYOUT(SHAPE, WITH_DQ);

/// The first of the two queries, neighbours, whose maxima this lane ends up with.
__device__ __forceinline__ int own_column() {
  const int lane = lane_id();
  return (lane >> 4 & 1) * 32 + (lane >> 3 & 1) * 16 + (lane >> 2 & 1) * 8 + (lane & 3) * 2;
}

/// Of the maxima of 2 * HALF columns a lane hands HALF over to another, whose it takes.
template <int HALF> __device__ __forceinline__ void keep_half(float (&m)[16]) {
  const bool upper = lane_id() & 2 * HALF;
#pragma unroll
  for (int k = 0; k < HALF; ++k) {
    const float given = upper ? m[k] : m[k + HALF], kept = upper ? m[k + HALF] : m[k];
    m[k] = max_nan(kept, __shfl_xor_sync(~0u, given, 2 * HALF));
  }
}

/// Raises the queries' maxima to the magnitudes of this warp's dS^T. Of 16 columns a lane hands
/// over half at each of three exchanges.
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

/// This warp's dS^T in 8 bits, by the queries' scales, to `tile`: [query][slot of key].
template <int KEYS>
__device__ __forceinline__ void write_score_gradients8(u32 tile, u32 maxima, u32 inverses,
                                                       const float (&ds)[8][4]) {
  inverses += warp_id() * DQ_LAYOUT.set_bytes;
  const float2 largest = read_float2(maxima + own_column() * 4);
  const u32 place = inverses + sigma_slot(own_column()) * 4;
  write_float(place, fast_scale<SIGNED_LEVELS>(largest.x).inverse);
  write_float(place + 4, fast_scale<SIGNED_LEVELS>(largest.y).inverse);
  __syncwarp();
  const int lane = lane_id();
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float4 by = read_columns(inverses, pair);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&x)[4] = ds[2 * pair + half];
      const u32 keys_side_by_side =
          pack_scaled<true>(x[0], x[2], x[1], x[3], half ? by.z : by.x, half ? by.w : by.y);
      // Bytes of keys 2t, 2t + 8, 2t + 1, 2t + 9 of one query: the slots' order is 2t, 2t + 1, ..
      const u32 word = __byte_perm(transpose_8x8(keys_side_by_side), 0, 0x3120);
      write_word(tile + chunk_offset<KEYS>(8 * (2 * pair + half) + lane / 4, warp_id()) +
                     (lane & 3) * 4,
                 word);
    }
  }
}

/// dQ's part of 64 queries and the block's keys, of which `keys` holds the transposed tiles.
template <int KEYS>
__device__ __forceinline__ void add_to_dq8(float* sums, u32 tile, u32 keys, u32 maxima,
                                           u32 channels) {
  const DqShare own;
  static_assert(exact_with_magic(SIGNED_LEVELS, SIGNED_LEVELS, KEYS));
  u32 a[KEYS / 32][4];
  const u32 rows = tile + a_lane_offset<KEYS>() + row_offset<KEYS>(own.first_row);
#pragma unroll
  for (int step = 0; step < KEYS / 32; ++step)
    load_fragment<KEYS>(a[step], rows, 0, step);
  float row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    row[r] =
        fast_scale<SIGNED_LEVELS>(read_float(maxima + (own.first_row + lane_id() / 4 + 8 * r) * 4))
            .value;

  const u32 columns = keys + b_lane_offset<TOKEN_ROW_BYTES>() + own.first_channel * TOKEN_ROW_BYTES;
  const MagicStart start;
#pragma unroll
  for (int pair = 0; pair < DqShare::CHANNELS / 16; ++pair) {
    int products[2][4];
#pragma unroll
    for (int step = 0; step < KEYS / 32; ++step) {
      u32 b[4];
      load_fragment<TOKEN_ROW_BYTES>(b, columns + step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES),
                                     pair * 16, step % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (step == 0)
          mma_s8(products[half], a[step], b[2 * half], b[2 * half + 1], start.bits);
        else
          mma_s8(products[half], a[step], b[2 * half], b[2 * half + 1], products[half]);
      }
    }
    const float4 unit = read_columns(channels + own.first_channel * 4, pair);
    const float of_column[4] = {unit.x, unit.y, unit.z, unit.w};
    float x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[half][i] = (__int_as_float(products[half][i]) - MAGIC) *
                     (row[i >> 1] * of_column[2 * half + (i & 1)]);
    }
    add_to_memory(sums + own.first_row * HEAD_DIM, own.first_channel + pair * 16, x);
  }
}
