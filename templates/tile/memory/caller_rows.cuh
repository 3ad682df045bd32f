//===- tile/memory/caller_rows.cuh - Bulk copies of rows of 16 bits ------------------===//
//
// They copy from a tensor of the caller, in boxes of 64 tokens by 64 channels. Behind a packed
// sequence's last token the next one's begin, which must not be read for zeros (they may be
// infinite): there rows come from padded swizzled tiles, which the pre-pass has written.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/bulk_copy.cuh"
#include "tile/math/products.cuh"
#include "tile/walk/place.cuh"

/// Starts copying the 64 tokens from `token` of a head on, a panel every `PITCH_BYTES`; of a packed
/// sequence from their swizzled tiles.
template <int PITCH_BYTES = PANEL_BYTES<VALUE_ROW_BYTES>>
__device__ __forceinline__ void copy_caller_rows(u32 to, const TensorMap& map, const Element* image,
                                                 int token, int head, int batch, u32 barrier) {
  constexpr int BYTES = PANEL_BYTES<VALUE_ROW_BYTES>;
#pragma unroll
  for (int panel = 0; panel < HEAD_DIM / 64; ++panel) {
    if constexpr (PACKED)
      bulk_copy(to + panel * PITCH_BYTES, image + panel * (BYTES / 2), BYTES, barrier);
    else
      tensor_copy(to + panel * PITCH_BYTES, map, panel * 64, token, head, batch, barrier);
  }
}
