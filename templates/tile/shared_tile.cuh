//===- tile/shared_tile.cuh - Tiles in shared memory, conflict-free --------===//
//
// A tile is 64 rows of ROW_BYTES (64, 128 or 256) in 16-byte chunks. Rows of 256 bytes are split
// into two panels of 64 rows x 128 bytes. Chunk c of row r lies at place c ^ f(r), so that the 8
// rows of one ldmatrix matrix fall into 8 different bank groups: f(r) = r % 8, or (r / 2) % 4 for
// rows of 64 bytes, two of which share a line. These are the 128- and 64-byte swizzles that wgmma
// reads. Tiles start at multiples of 1024 bytes, hence a step of 32 bytes along a row is an XOR of
// the address.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/special.cuh"

constexpr int TILE_ROWS = 64;

/// Bytes from one row of a panel to the next, and of a panel.
template <int ROW_BYTES> constexpr int PITCH = ROW_BYTES < 128 ? ROW_BYTES : 128;
template <int ROW_BYTES> constexpr int PANEL_BYTES = TILE_ROWS* PITCH<ROW_BYTES>;
template <int ROW_BYTES> constexpr int CHUNKS_A_PANEL = PITCH<ROW_BYTES> / 16;

/// The place of a row in tiles that lie one after the other.
template <int ROW_BYTES> __device__ __forceinline__ u32 row_offset(int row) {
  return row / TILE_ROWS * (TILE_ROWS * ROW_BYTES) + row % TILE_ROWS * PITCH<ROW_BYTES>;
}
template <int ROW_BYTES> __device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
  const int swizzle = ROW_BYTES == 64 ? (row >> 1) & 3 : row & 7;
  const int panel = chunk / CHUNKS_A_PANEL<ROW_BYTES>, place = chunk % CHUNKS_A_PANEL<ROW_BYTES>;
  return row_offset<ROW_BYTES>(row) + panel * PANEL_BYTES<ROW_BYTES> + ((place ^ swizzle) << 4);
}

/// threadIdx.x, read anew (ptx/special.cuh).
__device__ __forceinline__ int read_thread_anew() {
  const int thread = read_thread_index();
  __builtin_assume(thread >= 0 && thread < WARPS * 32);
  return thread;
}
/// This thread's number for copies; with LEAN_COPIES without registers over the whole loop.
__device__ __forceinline__ int copying_thread() {
  if constexpr (LEAN_COPIES)
    return read_thread_anew();
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
  __device__ __forceinline__ u32 first() const { return chunk_offset<ROW_BYTES>(row, chunk); }
  static __device__ __forceinline__ u32 place(int turn, int panel) {
    return row_offset<ROW_BYTES>(turn) + panel * PANEL_BYTES<ROW_BYTES>;
  }
};

/// Starts copying a dense tile.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_dense_tile(u32 tile, const void* source) {
  using Copy = Copier<ROW_BYTES, THREADS>;
  const Copy copy;
  const char* from = static_cast<const char*>(source) + copy.row * ROW_BYTES + copy.chunk * 16;
  asm("" : "+l"(from)); // formed once: turns are constants that the copies' instructions hold
  const u32 to = tile + copy.first();
#pragma unroll
  for (int turn = 0; turn < ROWS; turn += Copy::ROWS) {
#pragma unroll
    for (int panel = 0; panel < Copy::PANELS; ++panel)
      cp_async_16(to + Copy::place(turn, panel),
                  from + turn * ROW_BYTES + panel * PITCH<ROW_BYTES>);
  }
}
/// Starts copying ROWS rows of a strided tensor; rows at or past `valid_rows` become zeros.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const void* source, s64 row_stride_bytes,
                                          int valid_rows) {
  using Copy = Copier<ROW_BYTES, THREADS>;
  const Copy copy;
  const char* from =
      static_cast<const char*>(source) + copy.row * row_stride_bytes + copy.chunk * 16;
  const u32 to = tile + copy.first();
  const s64 turn_stride = row_stride_bytes * Copy::ROWS;
  if (valid_rows >= ROWS) {
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
      for (int panel = 0; panel < Copy::PANELS; ++panel)
        cp_async_16_or_zeros(to + Copy::place(turn, panel), row + panel * PITCH<ROW_BYTES>, valid);
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
