//===- tile/math/fused_products.cuh - 16-bit products of a fused backward, sm_90a ----===//
//
// A warpgroup owns 64 keys and forms products over 64 queries. dS^T lies in shared memory as rows
// of keys, a panel of 64 queries (tile/memory/swizzle.cuh): as it is it multiplies Q for dK, and
// read transposed it multiplies K for dQ, which sums over the keys of all warpgroups.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/ldmatrix.cuh"
#include "tile/math/products.cuh"
#include "tile/memory/fragments.cuh"
#include "tile/walk/place.cuh"

constexpr int DS_ROW_BYTES = TOKENS_PER_TILE * 2;
constexpr int DS_STEP = 16 * DS_ROW_BYTES; ///< of 16 keys

/// An address in shared memory, divided by 16, as descriptors of products have it.
struct Address16 {
  u32 channel_scales;
  __device__ __forceinline__ explicit Address16(u32 channel_scales)
      : channel_scales(channel_scales) {}
  static __device__ __forceinline__ Address16 of_address(u32 address) {
    return Address16(address >> 4);
  }
  __device__ __forceinline__ Address16 operator+(int bytes) const {
    return Address16(channel_scales + bytes / 16);
  }
};

/// A tile of tokens by channels as the caller's tensors have it, B with its channels contiguous.
__device__ __forceinline__ u64 channels_descriptor(Address16 tile) {
  return descriptor_in_units < 128,
         SUM_CHANNELS == 64 ? 16 : PANEL_BYTES < VALUE_ROW_BYTES >> (tile.channel_scales);
}
constexpr u64 CHANNELS_STEP = 16 * PITCH<VALUE_ROW_BYTES> / 16; ///< of 16 tokens, in a descriptor

/// The rows of K and V that are a warpgroup's, A of S and dP: in registers where there are some
/// left, else where they lie in shared memory.
template <int ROW_BYTES, bool IN_REGISTERS> struct KeptRows {
  u32 fragments[ROW_BYTES / 32][4];
  __device__ __forceinline__ void load(u32 tile) {
    const u32 lane_address = tile + a_lane_offset<ROW_BYTES>();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step)
      load_fragment<ROW_BYTES>(fragments[step], lane_address, warp_id() % 4 * 16, step);
  }
};
template <int ROW_BYTES> struct KeptRows<ROW_BYTES, false> {
  u64 descriptor;
  __device__ __forceinline__ void load(u32 tile) {
    descriptor = descriptor_in_units<PITCH<ROW_BYTES>>(Address16::of_address(tile).channel_scales);
  }
};
template <bool IN_REGISTERS>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4],
                                             const KeptRows<SCORE_ROW_BYTES, IN_REGISTERS>& rows,
                                             Address16 tile) {
  const u64 b = descriptor_in_units<PITCH<SCORE_ROW_BYTES>>(tile.channel_scales);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < SCORE_STEPS; ++step) {
    const u64 step_b = advance<SCORE_ROW_BYTES>(b, step);
    if constexpr (IN_REGISTERS)
      wgmma_8<true>(s, rows.fragments[step], step_b, step > 0);
    else
      wgmma_s8(s, advance<SCORE_ROW_BYTES>(rows.descriptor, step), step_b, step > 0);
  }
  wgmma_commit();
}
template <bool IN_REGISTERS>
__device__ __forceinline__ void
issue_values(float (*s)[4], const KeptRows<VALUE_ROW_BYTES, IN_REGISTERS>& rows, Address16 tile) {
  const u64 b = descriptor_in_units<PITCH<VALUE_ROW_BYTES>>(tile.channel_scales);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step) {
    const u64 step_b = advance<VALUE_ROW_BYTES>(b, step);
    if constexpr (IN_REGISTERS)
      wgmma_16_registers<Element>(s, rows.fragments[step], step_b, step > 0);
    else
      wgmma_16<Element>(s, advance<VALUE_ROW_BYTES>(rows.descriptor, step), step_b, step > 0);
  }
  wgmma_commit();
}

/// sums += A (64 queries' columns in registers) x a tile.
__device__ __forceinline__ void issue_from_registers(Sums& sums, const u32 (&a)[4][4],
                                                     Address16 tile) {
  const u64 b = channels_descriptor(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (SUM_CHANNELS == 128)
      wgmma_16_transposed_wide<Element>(sums.x, a[step], b + step * CHANNELS_STEP, true);
    else
      wgmma_16_transposed<Element>(sums.x, a[step], b + step * CHANNELS_STEP, true);
  }
  wgmma_commit();
}
/// Multiplies too, with A from the warpgroup's rows of dS^T.
__device__ __forceinline__ void issue_from_rows(Sums& sums, Address16 own_ds, Address16 tile) {
  const u64 a = descriptor_in_units<DS_ROW_BYTES>(own_ds.channel_scales),
            b = channels_descriptor(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_16_tiles<Element, SUM_CHANNELS, false>(sums.x, advance<DS_ROW_BYTES>(a, step),
                                                 b + step * CHANNELS_STEP, true);
  wgmma_commit();
}

/// dQ's part of 64 queries and BLOCK_KV keys: a warpgroup takes half of the channels, so that no
/// sum is formed twice.
constexpr int DQ_CHANNELS = HEAD_DIM / 2;
template <int CHANNELS = DQ_CHANNELS>
__device__ __forceinline__ void issue_dq(float (*x)[4], Address16 ds, Address16 key_rows,
                                         int half) {
  // Half of the channels is one panel of two, or half of the rows of the only one.
  constexpr int HALF_BYTES = HEAD_DIM == 128 ? PANEL_BYTES<VALUE_ROW_BYTES> : CHANNELS * 2;
  const u64 a = descriptor_in_units<DS_ROW_BYTES>(ds.channel_scales);
  const u64 b = descriptor_in_units<128>((key_rows + half * HALF_BYTES).channel_scales);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step)
    wgmma_16_tiles<Element, CHANNELS, true>(
        x, a + step * DS_STEP / 16, b + row_offset<VALUE_ROW_BYTES>(step * 16) / 16, step > 0);
  wgmma_commit();
}

/// dS^T or P^T in 16 bits, as pack_fragments() leaves it, to the rows of the warp's keys.
__device__ __forceinline__ void write_rows(u32 ds, const u32 (&ds16)[4][4]) {
  // Each four matrices are keys, 8 keys on, and both in the next chunk of queries.
  const int lane = lane_id(), matrix = lane / 8;
  const u32 place =
      ds + (row_offset<DS_ROW_BYTES>(first_token_of_warp(threadIdx.x)) +
            (matrix % 2 * 8 + lane % 8) * DS_ROW_BYTES + ((matrix / 2 ^ lane % 8) << 4));
#pragma unroll
  for (int step = 0; step < 4; ++step)
    stmatrix_x4(place ^ step << 5, ds16[step]);
}
