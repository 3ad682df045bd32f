//===- tile/walk/tile_messages.cuh - The producer's messages about tiles, and work tiles -----===//
//
// A walk over lists costs whoever makes it time at every step, and registers. So where there are
// lists the producer warp alone walks. It writes to shared memory what the others need of each
// tile, between the wait for the stage's readers and the arrival that fills the stage.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/shared_memory.cuh"
#include "ptx/special.cuh"
#include "tile/memory/block_shape.cuh"
#include "tile/walk/hidden.cuh"

struct TileMessage {
  u32 bits;

  TileMessage() = default;
  /// `buffer`, below 8, is that of the scales of the tile's run.
  __device__ __forceinline__ TileMessage(u32 number, bool begins_run, int buffer,
                                         bool hides_part = false)
      : bits(number << NUMBER_FROM | (HIDES_ANYWHERE && hides_part ? 16 : 0) | buffer << 1 |
             (begins_run ? 1 : 0)) {}
  /// Says that no tile is left. It counts as the first one of a run that would have this buffer.
  static __device__ __forceinline__ TileMessage end(int buffer) { return {NO_TILE, true, buffer}; }
  __device__ __forceinline__ explicit TileMessage(u32 place) : bits(read_word(place)) {}

  __device__ __forceinline__ bool ends() const { return number() == NO_TILE; }
  __device__ __forceinline__ int number() const { return bits >> NUMBER_FROM; }
  __device__ __forceinline__ bool hides_part() const { return HIDES_ANYWHERE && (bits & 16) != 0; }
  __device__ __forceinline__ bool begins_run() const { return (bits & 1) != 0; }
  __device__ __forceinline__ int buffer() const { return bits >> 1 & 7; }
  /// Gives the buffer of the run before.
  template <int BUFFERS> __device__ __forceinline__ int buffer_before() const {
    return buffer() > 0 ? buffer() - 1 : BUFFERS - 1;
  }

private:
  static constexpr int NUMBER_FROM = HIDES_ANYWHERE ? 5 : 4;
  static constexpr int NO_TILE = (1 << (32 - NUMBER_FROM)) - 1;
};

/// A warp is at this one of the blocks of queries, work tiles, that its thread block takes one
/// after the other: so the producer goes on to the next while consumers end one, and what a block
/// does once, it does for several. Block x takes blocks x, x + gridDim.x, ... of a head. Without
/// lists it takes its own.
struct WorkTile {
  int before = 0; ///< work tiles that it has had
  int tiles = 0;  ///< that came into the ring with them
  int buffer = 0; ///< of the scales of the last run of these tiles

  /// Computed where it is needed: registers are short.
  template <int SIZE> __device__ __forceinline__ int first_query(const Params& p) const {
    const int block = read_block_x() + before * gridDim.x;
    return (LATER_FIRST ? ceil_div(p.seq_q, SIZE) - 1 - block : block) * SIZE;
  }
  template <int SIZE> __device__ __forceinline__ bool next(const Params& p) {
    ++before;
    return HAS_LISTS && read_block_x() + before * gridDim.x < ceil_div(p.seq_q, SIZE);
  }
};
