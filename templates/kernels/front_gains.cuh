//===- kernels/front_gains.cuh - Gradients of gains from their parts --------===//
//
// dq_gain and dk_gain are sums of what blocks of kernels/front_gradients have: over sequences and
// tokens, and over heads if these share their gains. The order of the sums is always the same.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/prepass/front_rows.cuh"

constexpr int ROWS_AT_ONCE = THREADS / FRONT_GAIN_CHANNELS;

template <typename Side>
__device__ __forceinline__ void add_parts(const Params& p, const Side& of, int head, int group,
                                          const float* parts, float* to) {
  __shared__ float of_rows[ROWS_AT_ONCE][FRONT_GAIN_CHANNELS];
  const bool per_head = of.gain_step() != 0;
  if (parts == nullptr || head >= (per_head ? of.heads() : 1))
    return;
  const int own = static_cast<int>(threadIdx.x) % FRONT_GAIN_CHANNELS;
  const int channel = group * FRONT_GAIN_CHANNELS + own;
  const int rows = ceil_div(of.tokens(), front_tokens(HEAD_DIM)) *
                   (per_head ? 1 : ceil_div(of.heads(), p.front_heads)); // of a sequence
  float sum = 0;
#pragma unroll 8
  for (int row = threadIdx.x / FRONT_GAIN_CHANNELS; row < p.sequences * rows; row += ROWS_AT_ONCE)
    sum += __ldg(parts + front_gain_part(p, of, row / rows, head, row % rows) + channel);
  of_rows[threadIdx.x / FRONT_GAIN_CHANNELS][own] = sum;
  __syncthreads();
  if (threadIdx.x >= FRONT_GAIN_CHANNELS)
    return;
  sum = 0;
#pragma unroll
  for (int row = 0; row < ROWS_AT_ONCE; ++row)
    sum += of_rows[row][own];
  to[static_cast<s64>(head) * of.gain_step() + channel] = sum;
}

/// Block (channels, of heads of queries, behind them of heads of keys).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const int groups = p.channels / FRONT_GAIN_CHANNELS;
  const int place = static_cast<int>(blockIdx.x) / groups;
  const int group = static_cast<int>(blockIdx.x) % groups;
  if (place < p.heads)
    add_parts(p, FrontSide<bool, Params>{false, p}, place, group, p.q_gain_parts, p.dq_gain);
  else
    add_parts(p, FrontSide<bool, Params>{true, p}, place - p.heads, group, p.k_gain_parts,
              p.dk_gain);
}
