//===- tile/ring.cuh - Stages of shared memory, filled by one warp, read by others --===//
//
// A producer fills stage after stage by bulk copies and consumers empty them. Each stage has two
// barriers: `full` ends a phase when its bytes have come, `empty` when every consuming warp has
// read them. Producer and consumers walk over the stages alike, so that they agree on phases.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp_roles.cuh"

static_assert((STAGES & (STAGES - 1)) == 0, "a tile's number alone says where it lies");

/// Where the tile of this number lies in the ring, and whether in an odd round.
struct RingPlace {
  int stage;
  u32 parity;
  __device__ __forceinline__ explicit RingPlace(int tile)
      : stage(tile & (STAGES - 1)), parity(static_cast<u32>(tile) / STAGES & 1) {}
};

/// The barriers of a ring in shared memory.
template <int CONSUMING_WARPS> struct Ring {
  static constexpr int BYTES = 2 * STAGES * 8;
  u32 barriers;

  __device__ __forceinline__ u32 full(const RingPlace& at) const { return barriers + at.stage * 8; }
  __device__ __forceinline__ u32 empty(const RingPlace& at) const {
    return barriers + (STAGES + at.stage) * 8;
  }
  /// By one thread.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_mbarrier(barriers + stage * 8, 1);
      init_mbarrier(barriers + (STAGES + stage) * 8, 32 * CONSUMING_WARPS);
    }
  }
  /// By the producer: waits until the stage may be filled. In the first round nobody has anything
  /// to read.
  __device__ __forceinline__ void wait_until_empty(const RingPlace& at) const {
    wait_for_phase(empty(at), at.parity ^ 1);
  }
  /// And announces what will come.
  __device__ __forceinline__ void begin_filling(const RingPlace& at, u32 bytes) const {
    wait_until_empty(at);
    arrive_expecting(full(at), bytes);
  }
  __device__ __forceinline__ void wait_until_full(const RingPlace& at) const {
    wait_for_phase(full(at), at.parity);
  }
  /// By each consuming thread, once it has read all it will. One lane could speak for its warp
  /// behind a __syncwarp(), but racecheck does not see that.
  __device__ __forceinline__ void release(const RingPlace& at) const { arrive(empty(at)); }
};
