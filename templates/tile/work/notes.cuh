//===- tile/work/notes.cuh - What the copier notes of tiles, and items of work -----===//
//
// A walk over lists costs whoever makes it time at every step, and registers. So where there are
// lists the copier alone walks. It notes in shared memory what the others need of each tile,
// between the wait for the stage's readers and the arrival that fills the stage.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/shared_memory.cuh"
#include "ptx/special.cuh"
#include "tile/memory/block_shape.cuh"

struct TileNote {
  u32 bits;

  TileNote() = default;
  /// `slot`, below 8, is that of the scales of the tile's run.
  __device__ __forceinline__ TileNote(u32 number, bool begins_run, int slot)
      : bits(number << 4 | slot << 1 | (begins_run ? 1 : 0)) {}
  /// Of what comes behind the last tile, as the first one of a run that would have this slot.
  static __device__ __forceinline__ TileNote end(int slot) { return {NO_TILE, true, slot}; }
  __device__ __forceinline__ explicit TileNote(u32 place) : bits(read_word(place)) {}

  __device__ __forceinline__ bool ends() const { return number() == NO_TILE; }
  __device__ __forceinline__ int number() const { return bits >> 4; }
  __device__ __forceinline__ bool begins_run() const { return (bits & 1) != 0; }
  __device__ __forceinline__ int slot() const { return bits >> 1 & 7; }
  /// Of the run before.
  template <int SLOTS> __device__ __forceinline__ int slot_before() const {
    return slot() > 0 ? slot() - 1 : SLOTS - 1;
  }

private:
  static constexpr int NO_TILE = (1 << 28) - 1;
};

/// Where a warp stands in the blocks of queries, items, that its thread block takes one after the
/// other: so the copier goes on to the next while others end one, and what a block does once, it
/// does for several. Of n blocks a head, block x takes x, x + gridDim.x, ... Without lists it takes
/// its own.
struct Item {
  int before = 0; ///< items that it has had
  int tiles = 0;  ///< that came into the ring with them
  int slot = 0;   ///< of the scales of the last run of these tiles

  /// Computed where it is needed: registers are short.
  template <int SIZE> __device__ __forceinline__ int first_query(const Params& p) const {
    const int block = read_block_x() + before * gridDim.x;
    return (CAUSAL ? ceil_div(p.seq_q, SIZE) - 1 - block : block) * SIZE;
  }
  template <int SIZE> __device__ __forceinline__ bool next(const Params& p) {
    ++before;
    return HAS_LISTS && read_block_x() + before * gridDim.x < ceil_div(p.seq_q, SIZE);
  }
};
