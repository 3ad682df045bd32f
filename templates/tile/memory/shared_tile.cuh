//===- tile/memory/shared_tile.cuh - Bringing tiles into shared memory --------------===//
//
// This file copies swizzled tiles, and rows of the caller's tensors, which become tiles on their
// way.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/special.cuh"
#include "tile/memory/swizzle.cuh"
#include "tile/walk/place.cuh"

/// threadIdx.x, read again (ptx/special.cuh).
__device__ __forceinline__ int reread_thread() {
  const int thread = read_thread_index();
  __builtin_assume(thread >= 0 && thread < WARPS * 32);
  return thread;
}
/// This thread's number for copies; with LEAN_COPIES without registers over the whole loop.
__device__ __forceinline__ int copying_thread() {
  if constexpr (LEAN_COPIES)
    return reread_thread();
  __builtin_assume(threadIdx.x < WARPS * 32);
  return threadIdx.x;
}

/// How a block copies rows panel by panel: this thread takes `chunk` of `row` and of each ROWS-th
/// row behind it, in every panel, a constant further on in the tile.
template <int ROW_BYTES, int THREADS> struct Copier {
  static constexpr int CHUNKS = CHUNKS_A_PANEL<ROW_BYTES>;
  static constexpr int ROWS = THREADS / CHUNKS;
  static constexpr int PANELS = ROW_BYTES / PITCH<ROW_BYTES>;
  static_assert(ROWS % 8 == 0 && TILE_ROWS % ROWS == 0, "the swizzle repeats every 8 rows");
  int row, chunk;
  __device__ __forceinline__ Copier() {
    const int thread = copying_thread();
    row = thread / CHUNKS;
    chunk = thread % CHUNKS;
  }
  /// Forms the row here, once: the compiler forms it in a loop that copies, each time.
  __device__ __forceinline__ void hold() { row = opaque(row); }
  __device__ __forceinline__ u32 first() const { return chunk_offset<ROW_BYTES>(row, chunk); }
  static __device__ __forceinline__ u32 place(int turn, int panel) {
    return row_offset<ROW_BYTES>(turn) + panel * PANEL_BYTES<ROW_BYTES>;
  }
};

/// Starts copying BYTES of swizzled tiles, `offset` behind `source`. Each warp copies consecutive
/// 512 bytes a turn: then all that a thread copies lies within the reach of the copies' immediate
/// offsets, and only its sum of `source` and `offset` takes registers, for the time of the copy.
template <int BYTES>
__device__ __forceinline__ void load_swizzled(u32 destination, const void* source, s64 offset = 0) {
  constexpr int REACH = 2048; // immediate offsets are -REACH to REACH - 1
  constexpr int TURN_BYTES = 512, TURNS = BYTES / (WARPS * TURN_BYTES);
  static_assert(TURNS * WARPS * TURN_BYTES == BYTES);
  if constexpr (TURNS * TURN_BYTES > 2 * REACH) {
    load_swizzled<BYTES / 2>(destination, source, offset);
    load_swizzled<BYTES / 2>(destination + BYTES / 2, source, offset + BYTES / 2);
    return;
  }
  constexpr int MIDDLE = TURNS * TURN_BYTES > REACH ? REACH : 0;
  const int thread = copying_thread();
  const int own = thread / 32 * (TURNS * TURN_BYTES) + thread % 32 * 16 + MIDDLE;
  offset += own;
  asm("" : "+l"(offset)); // else sums with `source` are kept over a whole loop,
  const char* from = static_cast<const char*>(source) + offset;
  u32 to = destination + own;
  asm("" : "+l"(from), "+r"(to)); // else they are formed again for each copy
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    cp_async_16(to + (turn * TURN_BYTES - MIDDLE), from + (turn * TURN_BYTES - MIDDLE));
}
/// Starts copying ROWS rows of a strided tensor; rows at or past `valid_rows` become zeros, and so
/// do channels that it has not.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const void* source, s64 row_stride_bytes,
                                          int valid_rows, int channels,
                                          const Copier<ROW_BYTES, THREADS>& copy = {}) {
  using Copy = Copier<ROW_BYTES, THREADS>;
  const char* from =
      static_cast<const char*>(source) + copy.row * row_stride_bytes + copy.chunk * 16;
  const u32 to = tile + copy.first();
  const s64 turn_stride = row_stride_bytes * Copy::ROWS;
  const int first = (ROW_BYTES < HEAD_DIM * 2 ? first_channel() : 0) + copy.chunk * 8;
  if (ALL_CHANNELS && valid_rows >= ROWS) {
#pragma unroll
    for (int turn = 0; turn < ROWS; turn += Copy::ROWS, from += turn_stride) {
#pragma unroll
      for (int panel = 0; panel < Copy::PANELS; ++panel)
        cp_async_16(to + Copy::place(turn, panel), from + panel * PITCH<ROW_BYTES>);
    }
  } else {
#pragma unroll
    for (int turn = 0; turn < ROWS; turn += Copy::ROWS, from += turn_stride) {
      const bool valid = copy.row + turn < valid_rows;
      const char* row = valid ? from : static_cast<const char*>(source);
#pragma unroll
      for (int panel = 0; panel < Copy::PANELS; ++panel) // of no bytes no address is looked at
        cp_async_16_or_zeros(to + Copy::place(turn, panel), row + panel * PITCH<ROW_BYTES>,
                             valid && is_channel(first + panel * (PITCH<ROW_BYTES> / 2), channels));
    }
  }
}
/// Starts copying COUNT floats (a multiple of 4).
template <int COUNT, int THREADS>
__device__ __forceinline__ void load_floats(u32 destination, const float* source) {
#pragma unroll
  for (int i = 0; i < COUNT / 4; i += THREADS) {
    const int index = i + copying_thread();
    if (index < COUNT / 4)
      cp_async_16(destination + index * 16, source + index * 4);
  }
}
/// Does so where `wanted`. A branch would have sm_100's ptxas and its successors' hold in ordinary
/// registers what a loop around it walks over.
template <int COUNT, int THREADS>
__device__ __forceinline__ void load_floats_if(u32 destination, const float* source, bool wanted) {
#pragma unroll
  for (int i = 0; i < COUNT / 4; i += THREADS) {
    const int index = i + copying_thread();
    cp_async_16_if(destination + index * 16, source + index * 4, wanted && index < COUNT / 4);
  }
}
