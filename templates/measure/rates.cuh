//===- measure/rates.cuh - How fast an SM does what the kernels are made of -===//
//
// `sagebwd doctor --measure` compiles run<RATE>() once a rate. Each warp does UNITS units a turn,
// in CHAINS chains that wait for nothing but themselves; what comes out is stored, so that nothing
// can be left out. Operands come from memory, for what ptxas knows it need not compute.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

/// In the order of the table in runtime/measure.cpp.
enum class Rate {
  mma_s8,
  mma_u8,
  mma_bf16,
  mma_half_sums, ///< of fp16, summed in fp16
  ffma,          ///< four a unit
  mma_s8_ffma,   ///< one product and four FFMA a unit
  mma_mixed,     ///< of the warps of a scheduler half do mma_s8, half mma_bf16
  int_to_float,
  pack_s8, ///< four values to a word a unit
  ex2,
  ldmatrix, ///< 512 bytes a unit
};

struct MeasureParams {
  u64* clocks;  ///< of each block
  u32* results; ///< of each thread; operands before
  int turns;
};

constexpr int MEASURE_THREADS = 512; ///< four warps for each scheduler
constexpr int CHAINS = 8;
constexpr int UNITS = 64;
constexpr int MEASURE_TILE_BYTES = 16384;

/// All that any rate works on; what one does not use is gone after compilation.
struct Chains {
  int integers[CHAINS][4];
  float floats[CHAINS][4];
  u32 halves[CHAINS][2];
  u32 a[4], b[2];
  u32 address, loaded = 0;

  __device__ __forceinline__ Chains(u32 operand, u32 tile) : address(tile + lane_id() * 16) {
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        integers[chain][i] = static_cast<int>(operand * (4 * chain + i + 1));
        floats[chain][i] = static_cast<float>(integers[chain][i]);
      }
      halves[chain][0] = operand * (4 * chain + 1);
      halves[chain][1] = operand * (4 * chain + 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = operand + i;
    b[0] = operand ^ 1;
    b[1] = operand ^ 2;
  }

  __device__ __forceinline__ void multiply_add(int chain) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      floats[chain][i] = __fmaf_rn(floats[chain][i], __uint_as_float(a[0]), __uint_as_float(b[0]));
  }

  /// One unit. No address comes twice in a turn or in the next: ptxas would read it once.
  template <Rate RATE> __device__ __forceinline__ void unit(int number, int turn) {
    const int chain = number % CHAINS;
    int(&sum)[4] = integers[chain];
    float(&x)[4] = floats[chain];
    if constexpr (RATE == Rate::mma_s8 || RATE == Rate::mma_s8_ffma)
      mma_s8(sum, a, b[0], b[1], sum);
    if constexpr (RATE == Rate::mma_u8)
      mma_u8(sum, a, b[0], b[1], sum);
    if constexpr (RATE == Rate::mma_bf16)
      mma_16<bf16>(x, a, b[0], b[1], x);
    if constexpr (RATE == Rate::mma_half_sums)
      mma_16_half_sums(halves[chain], a, b[0], b[1], halves[chain]);
    if constexpr (RATE == Rate::ffma || RATE == Rate::mma_s8_ffma)
      multiply_add(chain);
    if constexpr (RATE == Rate::int_to_float)
      x[0] = static_cast<float>(__float_as_int(x[0]));
    if constexpr (RATE == Rate::pack_s8) {
      // Each chain takes from the next ones, so that no pair stays the same.
      x[0] = __uint_as_float(pack_s8(x[0], floats[(chain + 1) % CHAINS][0],
                                     floats[(chain + 2) % CHAINS][0],
                                     floats[(chain + 3) % CHAINS][0]));
    }
    if constexpr (RATE == Rate::ex2)
      x[0] = exp2_approx(x[0]);
    if constexpr (RATE == Rate::ldmatrix) {
      u32 matrices[4];
      ldmatrix_x4(matrices, address + (turn & 7) * 512 + number * 128);
      loaded ^= matrices[0] ^ matrices[1];
      loaded ^= matrices[2] ^ matrices[3];
    }
  }

  __device__ __forceinline__ u32 result() const {
    u32 all = loaded;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
      all ^= halves[chain][0] ^ halves[chain][1];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        all ^= integers[chain][i] ^ __float_as_uint(floats[chain][i]);
    }
    return all;
  }
};

template <Rate RATE> __device__ __forceinline__ void turns(Chains& chains, int count) {
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
#pragma unroll
    for (int number = 0; number < UNITS; ++number)
      chains.unit<RATE>(number, turn);
  }
}

template <Rate RATE> __device__ __forceinline__ void run(const MeasureParams& p) {
  __shared__ __align__(128) u32 tile[MEASURE_TILE_BYTES / 4];
  const int thread = blockIdx.x * MEASURE_THREADS + threadIdx.x;
  for (int i = threadIdx.x; i < MEASURE_TILE_BYTES / 4; i += MEASURE_THREADS)
    tile[i] = i;
  Chains chains(p.results[thread], static_cast<u32>(__cvta_generic_to_shared(tile)));
  __syncthreads();
  const u64 start = clock64();
  if constexpr (RATE == Rate::mma_mixed) {
    // Warps go round the four schedulers.
    if (warp_id() / 4 % 2 == 0)
      turns<Rate::mma_s8>(chains, p.turns);
    else
      turns<Rate::mma_bf16>(chains, p.turns);
  } else {
    turns<RATE>(chains, p.turns);
  }
  p.results[thread] = chains.result();
  __syncthreads();
  if (threadIdx.x == 0)
    p.clocks[blockIdx.x] = clock64() - start;
}
