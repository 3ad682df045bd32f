//===- tile/memory/ring.cuh - Stages of shared memory, filled by one warp, read by others ---===//
//
// A producer fills stage after stage by bulk copies and consumers empty them. Each stage has two
// barriers: `full` ends a phase when its bytes have come, `empty` when every consuming warp has
// read them. Producer and consumers walk over the stages alike, so that they agree on phases.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/block_shape.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp_roles.cuh"

/// Says in which stage of a ring the tile of this number lies, and whether in an odd round.
template <int DEPTH> struct PipelineState {
  static_assert(DEPTH >= 1);
  int stage;
  u32 parity;
  __device__ __forceinline__ explicit PipelineState(int tile)
      : stage(static_cast<u32>(tile) % DEPTH), parity(static_cast<u32>(tile) / DEPTH & 1) {}
};
using RingState = PipelineState<STAGES>;

/// The barriers of a ring in shared memory.
template <int CONSUMING_WARPS, int DEPTH = STAGES> struct Ring {
  using State = PipelineState<DEPTH>;
  static constexpr int BYTES = ring_bytes(DEPTH);
  u32 barriers;

  __device__ __forceinline__ u32 full(const State& at) const { return barriers + at.stage * 8; }
  __device__ __forceinline__ u32 empty(const State& at) const {
    return barriers + (DEPTH + at.stage) * 8;
  }
  /// One thread calls this.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < DEPTH; ++stage) {
      init_mbarrier(barriers + stage * 8, 1);
      init_mbarrier(barriers + (DEPTH + stage) * 8, 32 * CONSUMING_WARPS);
    }
  }
  /// The producer calls this: it waits until the stage may be filled. In the first round nobody has
  /// anything to read.
  __device__ __forceinline__ void wait_until_empty(const State& at) const {
    wait_for_phase(empty(at), at.parity ^ 1, "readers of a stage");
  }
  /// Waits so, and announces what will come.
  __device__ __forceinline__ void begin_filling(const State& at, u32 bytes) const {
    wait_until_empty(at);
    arrive_expecting(full(at), bytes);
  }
  /// Announces too; with lists `message` comes to `address`, where nobody reads the one before any
  /// more.
  __device__ __forceinline__ void begin_filling(const State& at, u32 bytes, u32 address,
                                                u32 message) const {
    wait_until_empty(at);
    if constexpr (HAS_LISTS)
      write_word(address, message);
    arrive_expecting(full(at), bytes);
  }
  __device__ __forceinline__ void wait_until_full(const State& at) const {
    wait_for_phase(full(at), at.parity, "copies into a stage");
  }
  /// Each consuming thread calls this once it has read all it will. One lane could speak for its
  /// warp behind a __syncwarp(), but racecheck does not see that.
  __device__ __forceinline__ void release(const State& at) const { arrive(empty(at)); }
};
