//===- ring.cu - A producer and two consumers, to test the simulator ---------===//
//
// A producing warp brings tiles of 256 floats into a ring; two warpgroups sum them, each its half,
// and take turns by named barriers. All blocks add their sums to one row. `mistake` says what is to
// go wrong.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "mistakes.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/warp_roles.cuh"
#include "ptx/wgmma.cuh"

constexpr int THREADS = 384, STAGES = 3, CONSUMERS = 256, TILE_BYTES = CONSUMERS * 4;
constexpr int FULL = 0, EMPTY = FULL + STAGES * 8, ORDER = EMPTY + STAGES * 8, RING = 128,
              SUMS = RING + STAGES * TILE_BYTES, SHARED_BYTES = SUMS + TILE_BYTES;
constexpr int PLACE_OFFSET = SHARED_BYTES, PLACE_BYTES = 0; // of no packed sequences

struct Params {
  const float* tiles; ///< [block][tile][256]
  float* sums;        ///< [256]
  u32* orders;        ///< [block]
  int count;
  int mistake;
};

struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES)
      stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void produce(const Params& p, u32 shared) {
  const float* from = p.tiles + static_cast<s64>(blockIdx.x) * p.count * CONSUMERS;
  Place place;
  for (int tile = 0; tile < p.count; ++tile, place.advance()) {
    const u32 full = shared + FULL + place.stage * 8;
    if (p.mistake != NO_WAIT_FOR_EMPTY)
      wait_for_phase(shared + EMPTY + place.stage * 8, place.parity ^ 1);
    const int more = p.mistake == TOO_MANY_BYTES ? 16 : p.mistake == TOO_FEW_BYTES ? -16 : 0;
    arrive_expecting(full, TILE_BYTES + more);
    if (p.mistake == ARRIVAL_TOO_MANY)
      arrive(full);
    // In two halves: either may come first.
    const u32 to = shared + RING + place.stage * TILE_BYTES + (p.mistake == MISALIGNED ? 8 : 0);
    if (p.mistake != COPY_FORGOTTEN || tile != 1)
      bulk_copy(to, from + tile * CONSUMERS, TILE_BYTES / 2, full);
    bulk_copy(to + TILE_BYTES / 2, from + tile * CONSUMERS + CONSUMERS / 2, TILE_BYTES / 2, full);
  }
}

template <int THREADS_OF_BARRIER>
__device__ __forceinline__ void take_turn(const Params& p, u32 shared, int group) {
  named_barrier_sync<THREADS_OF_BARRIER>(1 + group);
  if (threadIdx.x % 128 == 0)
    simulator::in_shared<u32>(shared + ORDER) =
        simulator::in_shared<u32>(shared + ORDER) * 3 + group + 1;
  if (p.mistake != NO_BAR_ARRIVE)
    named_barrier_arrive<CONSUMERS>(2 - group);
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, int group) {
  Place place;
  float sum = 0;
  if (group == 1) // the first turn is the other's
    named_barrier_arrive<CONSUMERS>(1);
  for (int tile = 0; tile < p.count; ++tile, place.advance()) {
    const u32 parity = p.mistake == WRONG_PARITY        ? place.parity ^ 1
                       : p.mistake == PARITY_NOT_TURNED ? 0
                                                        : place.parity;
    if (p.mistake != NO_WAIT_FOR_FULL)
      wait_for_phase(shared + FULL + place.stage * 8, parity);
    const u32 element = shared + RING + place.stage * TILE_BYTES + threadIdx.x * 4;
    if (p.mistake != ARRIVAL_BEFORE_READ)
      sum += read_float(element);
    __syncwarp();
    if (elected() && !(p.mistake == NO_ARRIVE && threadIdx.x < 32))
      arrive(shared + EMPTY + place.stage * 8);
    if (p.mistake == ARRIVAL_BEFORE_READ)
      sum += read_float(element);
    if (p.mistake == WRONG_COUNT && group == 1)
      take_turn<THREADS>(p, shared, group);
    else if (p.mistake == NOT_WHOLE_WARPS)
      take_turn<CONSUMERS - 1>(p, shared, group);
    else
      take_turn<CONSUMERS>(p, shared, group);
  }
  if (group == 0) // the last arrival was nobody's
    named_barrier_sync<CONSUMERS>(1);
  write_float(shared + SUMS + threadIdx.x * 4, sum);
  if (p.mistake != NO_PROXY_FENCE)
    fence_async_proxy();
  named_barrier_sync<CONSUMERS>(3);
  if (threadIdx.x < 32 && elected()) {
    bulk_add(p.sums, shared + SUMS, TILE_BYTES / 2);
    bulk_commit();
    bulk_add(p.sums + CONSUMERS / 2, shared + SUMS + TILE_BYTES / 2, TILE_BYTES / 2);
    bulk_commit();
    if (p.mistake != NO_WAIT_READ)
      bulk_wait_read<0>();
    p.orders[blockIdx.x] = simulator::in_shared<u32>(shared + ORDER);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_mbarrier(shared + FULL + stage * 8, 1);
      if (p.mistake != NO_INIT)
        init_mbarrier(shared + EMPTY + stage * 8, CONSUMERS / 32);
    }
    if (p.mistake == INITIALISED_TWICE)
      init_mbarrier(shared + FULL, 1);
    if (p.mistake != NO_PUBLISH)
      publish_mbarriers();
    write_word(shared + (p.mistake == WRITTEN_OVER ? FULL : ORDER), 0);
  }
  if (p.mistake != NO_SYNCTHREADS)
    __syncthreads();
  const int group = warp_id() / 4;
  if (group == 2) {
    if (p.mistake == GIVEN_BY_THREE_WARPS && warp_id() == 11)
      return;
    if (p.mistake == TOO_FEW_GIVEN)
      give_registers<32>();
    else if (p.mistake == MORE_THAN_HELD)
      give_registers<176>();
    else
      give_registers<24>();
    if (warp_id() != 8)
      return;
    if (p.mistake == ELECTED_BY_HALF && lane_id() < 16)
      return;
    if (elected())
      produce(p, shared);
  } else {
    take_registers<240>();
    consume(p, shared, group);
  }
  __syncthreads(); // of those that are still here
}
