//===- tile/shared_tile.cuh - Tiles in shared memory, conflict-free --------===//
//
// A tile is rows of ROW_BYTES (64, 128, 256 or 512) in 16-byte chunks. Chunk c of row r lies at
// place c ^ f(r), so that the 8 rows of one ldmatrix matrix fall into 8 different bank groups:
// f(r) = r % 8, or (r / 2) % 4 where two rows share a 128-byte line. Tiles start at multiples of
// 1024 bytes, hence a step of 32 bytes along a row is an XOR of the address.
//
//===----------------------------------------------------------------------===//

template <int ROW_BYTES> __device__ __forceinline__ u32 swizzle(int row) {
  return ROW_BYTES == 64 ? (row >> 1) & 3 : row & 7;
}
template <int ROW_BYTES> __device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ swizzle<ROW_BYTES>(row)) << 4);
}

/// This lane's part of the address of an A fragment (16 rows x 32 bytes), to be added to a tile.
template <int ROW_BYTES> __device__ __forceinline__ u32 a_lane_offset() {
  const int lane = lane_id();
  return chunk_offset<ROW_BYTES>(lane & 15, lane >> 4);
}
/// The same for two B fragments: 16 rows of the tile, which are 16 columns of B, x 32 bytes.
template <int ROW_BYTES> __device__ __forceinline__ u32 b_lane_offset() {
  const int lane = lane_id();
  return chunk_offset<ROW_BYTES>((lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
}
/// Fragment at `row` (a multiple of 16) and 32-byte step `step` of the tile that `lane_address`
/// (tile + lane offset) lies in. As B: columns 0-7 in r[0], r[1], columns 8-15 in r[2], r[3].
template <int ROW_BYTES>
__device__ __forceinline__ void load_fragment(u32 (&r)[4], u32 lane_address, int row, int step) {
  ldmatrix_x4(r, (lane_address ^ (step << 5)) + row * ROW_BYTES);
}

/// Starts copying a dense tile.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_dense_tile(u32 tile, const void* source) {
  constexpr int CHUNKS = ROW_BYTES / 16, ROWS_A_TURN = THREADS / CHUNKS;
  const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const char* from = static_cast<const char*>(source) + threadIdx.x * 16;
#pragma unroll
  for (int turn = 0; turn < ROWS; turn += ROWS_A_TURN)
    cp_async_16(tile + chunk_offset<ROW_BYTES>(row + turn, chunk), from + turn * ROW_BYTES);
}
/// Starts copying ROWS rows of a strided tensor; rows at or past `valid_rows` become zeros.
template <int ROWS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const void* source, s64 row_stride_bytes,
                                          int valid_rows) {
  constexpr int CHUNKS = ROW_BYTES / 16, ROWS_A_TURN = THREADS / CHUNKS;
  const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
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
    const int index = i + threadIdx.x;
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
