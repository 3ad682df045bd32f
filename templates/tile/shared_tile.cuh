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

/// This thread's number for copies. With LEAN_COPIES it is read afresh each time, so that what is
/// computed from it does not occupy registers over the whole loop.
__device__ __forceinline__ int copying_thread() {
  int thread = threadIdx.x;
  if constexpr (LEAN_COPIES)
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Starts copying a dense tile.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_dense_tile(u32 tile, const void* source) {
  constexpr int CHUNKS = ROW_BYTES / 16, ROWS_A_TURN = THREADS / CHUNKS;
  const int thread = copying_thread(), row = thread / CHUNKS, chunk = thread % CHUNKS;
  const char* from = static_cast<const char*>(source) + thread * 16;
#pragma unroll
  for (int turn = 0; turn < ROWS; turn += ROWS_A_TURN)
    cp_async_16(tile + chunk_offset<ROW_BYTES>(row + turn, chunk), from + turn * ROW_BYTES);
}
/// Starts copying ROWS rows of a strided tensor; rows at or past `valid_rows` become zeros.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const void* source, s64 row_stride_bytes,
                                          int valid_rows) {
  constexpr int CHUNKS = ROW_BYTES / 16, ROWS_A_TURN = THREADS / CHUNKS;
  const int thread = copying_thread(), row = thread / CHUNKS, chunk = thread % CHUNKS;
  const char* from = static_cast<const char*>(source) + row * row_stride_bytes + chunk * 16;
  const s64 turn_stride = row_stride_bytes * ROWS_A_TURN;
  if (valid_rows >= ROWS) {
#pragma unroll
    for (int turn = 0; turn < ROWS; turn += ROWS_A_TURN, from += turn_stride)
      cp_async_16(tile + chunk_offset<ROW_BYTES>(row + turn, chunk), from);
  } else {
#pragma unroll
    for (int turn = 0; turn < ROWS; turn += ROWS_A_TURN, from += turn_stride) {
      const bool valid = row + turn < valid_rows;
      cp_async_16_or_zeros(tile + chunk_offset<ROW_BYTES>(row + turn, chunk),
                           valid ? static_cast<const void*>(from) : source, valid);
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
__device__ __forceinline__ float read_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ float2 read_float2(u32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float4 read_float4(u32 address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}
__device__ __forceinline__ void write_float(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
