//===- tile/fused_dq.cuh - dQ beside dK and dV, or nothing ------------------===//
//
// What a block that owns keys does for dQ with each tile of 64 queries (tile/dq_sums.cuh), at the
// places where it belongs. WITH_DQ = false, all of it is nothing.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/dq_sums8.cuh"
#include "tile/place.cuh"

class FusedDq {
  static constexpr bool INT8 = DQ_LAYOUT.int8_dq, IN_16_BITS = WITH_DQ && DQ16;

public:
  __device__ __forceinline__ explicit FusedDq(u32 base)
      : keys_(base), ds_(base + DQ_LAYOUT.ds), scales_(base + DQ_LAYOUT.scales), maxima_(scales_) {}

  /// Starts copying what stays for the whole walk.
  __device__ __forceinline__ void load(const Params& p, const KeyHead& at, int first_key) const {
    const s64 before = (at.padded_key() + first_key) * HEAD_DIM;
    if constexpr (IN_16_BITS)
      load_image<BLOCK_KV * VALUE_ROW_BYTES>(keys_, p.k_rows + before);
    if constexpr (INT8) {
      load_image<BLOCK_KV * HEAD_DIM>(keys_, p.kt8 + before);
      const s64 unit = at.first_key_unit<CHANNEL_TOKENS_KV>() + first_key / CHANNEL_TOKENS_KV;
      load_floats<HEAD_DIM, THREADS>(scales_ + DQ_LAYOUT.channels,
                                     p.kt8_scale + unit * (CHANNEL_VECTORS * HEAD_DIM) +
                                         CHANNEL_SCALE * HEAD_DIM);
      clear(maxima_);
    }
  }
  /// dS^T of a tile is known.
  __device__ __forceinline__ void raise_scales(const float (&ds)[8][4]) const {
    if constexpr (INT8)
      raise_maxima(maxima_, ds);
  }
  /// It goes to shared memory; `ds16` holds it packed where it has 16 bits. A barrier follows.
  __device__ __forceinline__ void write(const float (&ds)[8][4], const u32 (&ds16)[4][4]) const {
    if constexpr (IN_16_BITS)
      write_score_gradients(ds_, ds16);
    if constexpr (INT8) {
      __syncthreads(); // the maxima are whole, and the other set is read no more
      write_score_gradients8<BLOCK_KV>(ds_, maxima_, scales_ + DQ_LAYOUT.inverses, ds);
      clear(other_maxima());
    }
  }
  /// dQ's part is added to the sums of the tile's queries. A barrier comes before the next write.
  __device__ __forceinline__ void add_to(float* sums) {
    if constexpr (IN_16_BITS)
      add_to_dq<BLOCK_KV>(sums, ds_, keys_);
    if constexpr (INT8) {
      add_to_dq8<BLOCK_KV>(sums, ds_, keys_, maxima_, scales_ + DQ_LAYOUT.channels);
      maxima_ = other_maxima();
    }
  }

private:
  __device__ __forceinline__ u32 other_maxima() const { return maxima_ ^ DQ_LAYOUT.set_bytes; }
  static __device__ __forceinline__ void clear(u32 maxima) {
    if (threadIdx.x < TOKENS_PER_TILE)
      write_float(maxima + threadIdx.x * 4, 0);
  }

  u32 keys_, ds_, scales_;
  u32 maxima_; ///< of dS, two sets in turn
};
