//===- tile/memory/chunks.cuh - Tiles come through a ring, a chunk at a time ----------===//
//
// For heads of which shared memory does not hold whole tiles: layouts/team.cuh says what a chunk
// is. All warps take each chunk, one after the other. A walk's tiles have CHUNKS of them each, a
// multiple of the ring's slots, so that a chunk's slot is known as the kernel is compiled.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/team.cuh"
#include "ptx/cp_async.cuh"
#include "tile/memory/fragments.cuh"

constexpr int SLOTS = TeamLayout::SLOTS, SLOT_BYTES = TeamLayout::SLOT_BYTES;
constexpr int PANEL_ROW = 128;                       ///< bytes of a row of a panel
constexpr int STEPS_A_CHUNK = PANEL_ROW / 32;        ///< along what S and dP sum
constexpr int SCORE_CHUNKS = HEAD_DIM / PANEL_ROW;   ///< of a tile's rows in 8 bits
constexpr int ROW_CHUNKS = HEAD_DIM * 2 / PANEL_ROW; ///< of a tile's rows in 16 bits
constexpr int PANEL_CHANNELS = PANEL_ROW / 2;        ///< of a panel in 16 bits
constexpr int TURNED_CHUNKS = HEAD_DIM * TOKENS_PER_TILE / SLOT_BYTES; ///< of a transposed tile
static_assert(WARPS == TeamLayout::WARPS && HEAD_DIM == WARPS * 64, "a warp sums 64 channels");

/// Gives where the block's shared memory begins, of which its layout takes BYTES, as the host
/// knows.
template <int BYTES> __device__ __forceinline__ u32 shared_base() {
  static_assert(SHARED_BYTES == 0 || BYTES == SHARED_BYTES, "the host has another layout");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return static_cast<u32>(__cvta_generic_to_shared(shared_memory));
}

/// Starts copying ROWS rows of a panel of a tensor of 16 bits. Rows and channels that it has not
/// become zeros.
template <int ROWS>
__device__ __forceinline__ void load_panel(u32 to, const Element* from, s64 stride, int valid_rows,
                                           int channels) {
  constexpr int CHUNKS = PANEL_ROW / 16;
  const int thread = copying_thread(), chunk = thread % CHUNKS;
  asm("" : "+l"(from)); // else what panels have in common is kept over a whole loop
#pragma unroll
  for (int turn = 0; turn < ROWS; turn += THREADS / CHUNKS) {
    const int row = turn + thread / CHUNKS;
    const bool valid = row < valid_rows && is_channel(chunk * 8, channels);
    cp_async_16_or_zeros(to + chunk_offset<PANEL_ROW>(row, chunk),
                         valid ? from + row * stride + chunk * 8 : from, valid);
  }
}

/// Starts copying the ROWS rows from `first` on of PANELS panels of a copy, which has whole tiles.
template <int ROWS, int PANELS>
__device__ __forceinline__ void load_own_rows(u32 to, const void* copy, s64 first) {
  static_assert(ROWS == TILE_ROWS || TILE_ROWS % ROWS == 0);
  const s64 tile = first / TILE_ROWS * (PANELS * SLOT_BYTES) + first % TILE_ROWS * PANEL_ROW;
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    load_swizzled<ROWS * PANEL_ROW>(to + panel * (ROWS * PANEL_ROW), copy,
                                    tile + panel * SLOT_BYTES);
}

/// The ring. load(k) starts copying chunk k of the tile at which a walk stands, of the next tile if
/// k is CHUNKS or more, to slot_of(k).
template <int CHUNKS> struct ChunkRing {
  static_assert(CHUNKS % SLOTS == 0);
  u32 address;

  __device__ __forceinline__ u32 slot_of(int k) const { return address + k % SLOTS * SLOT_BYTES; }
  template <typename Load> __device__ __forceinline__ void begin(const Load& load) const {
#pragma unroll
    for (int k = 0; k < SLOTS - 1; ++k) {
      load(k);
      cp_async_commit();
    }
  }
  /// Waits until chunk k is there and everybody has read the one before it, in whose place another
  /// one is brought. Gives the slot.
  template <typename Load> __device__ __forceinline__ u32 take(int k, const Load& load) const {
    cp_async_wait<SLOTS - 2>();
    __syncthreads();
    load(k + SLOTS - 1);
    cp_async_commit();
    return slot_of(k);
  }
};
