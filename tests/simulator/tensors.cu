//===- tensors.cu - Tensor copies and what wgmma reads of them, for tests ----===//
//
// A box is brought to shared memory and written out as it lies there. Warpgroups may then multiply
// 64 of its rows each by all of them, or, transposed, the identity by panels of 16 rows.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "mistakes.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

constexpr int SHARED_BYTES = 1024 + 64 * 1024;
constexpr int PLACE_OFFSET = SHARED_BYTES, PLACE_BYTES = 0; // of no packed sequences

struct Params {
  TensorMap map;
  int first[4];
  u32 bytes;
  u32 pitch; ///< 64 or 128, else there are no products
  int columns;
  bool transposed;
  unsigned char* box;
  int* products; ///< [64 a warpgroup][columns], or floats
  int mistake;
};

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 barrier = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  const u32 tile = barrier + 1024;
  if (threadIdx.x == 0) {
    init_mbarrier(barrier, 1);
    publish_mbarriers();
    arrive_expecting(barrier, p.bytes);
    tensor_copy(tile, p.map, p.first[0], p.first[1], p.first[2], p.first[3], barrier);
  }
  __syncthreads();
  wait_for_phase(barrier, 0);
  if (threadIdx.x == 0)
    __builtin_memcpy(p.box, shared_memory + 1024, p.bytes);
  if (p.pitch == 0)
    return;

  if (p.mistake == WGMMA_BY_THREE_WARPS && warp_id() == 3)
    return;
  int d[32][4];
  const auto descriptor = [&](u32 address) {
    return p.pitch == 128 ? matrix_descriptor<128>(address) : matrix_descriptor<64>(address);
  };
  wgmma_fence();
  if (p.transposed) {
    const int row = lane_id() / 4, column = lane_id() % 4 * 2;
    const u32 one = row / 2 * 2 == column ? 0x3f80u << row % 2 * 16 : 0;
    // The distance between panels stands where matrix_descriptor() has 16 bytes.
    simulator::from_registers(simulator::Element::bf16, p.columns, true, d, {one, 0, 0, one},
                              descriptor(tile) ^ (1 ^ 16 * 128 >> 4) << 16, false);
  } else {
    const u32 rows = tile + warp_id() / 4 * 64 % p.columns * p.pitch;
    for (u32 byte = 0; byte < p.pitch; byte += 32)
      simulator::from_tiles(simulator::Element::s8, p.columns, d, descriptor(rows + byte),
                            descriptor(tile + byte), byte != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int j = 0; j < p.columns / 8; ++j)
    for (int i = 0; i < 4; ++i)
      p.products[(warp_id() * 16 + lane_id() / 4 + i / 2 * 8) * p.columns + j * 8 +
                 lane_id() % 4 * 2 + i % 2] = d[j][i];
}
