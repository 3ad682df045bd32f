//===- kernels/front_gains.cuh - Gradients of gains from their parts --------===//
//
// dq_gain and dk_gain are sums of what blocks of kernels/front_gradients have: over sequences and
// tokens, and over heads if these share their gains. The order of the sums is always the same.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/prepass/front_rows.cuh"

constexpr int ROWS_AT_ONCE = THREADS / FRONT_GAIN_CHANNELS;

/// Block (channels, of heads of queries, behind them of heads of keys).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  __shared__ float of_rows[ROWS_AT_ONCE][FRONT_GAIN_CHANNELS];
  begin_in_stream_order();
  const int groups = p.channels / FRONT_GAIN_CHANNELS;
  const int place = static_cast<int>(blockIdx.x) / groups;
  const bool is_of_keys = place >= p.heads;
  const int head = is_of_keys ? place - p.heads : place;
  const FrontTensor of = is_of_keys ? front_keys(p) : front_queries(p);
  const float* parts = is_of_keys ? p.k_gain_parts : p.q_gain_parts;
  const bool per_head = of.gain_step != 0;
  if (parts == nullptr || head >= (per_head ? of.heads : 1))
    return;
  const int own = static_cast<int>(threadIdx.x) % FRONT_GAIN_CHANNELS;
  const int channel = static_cast<int>(blockIdx.x) % groups * FRONT_GAIN_CHANNELS + own;
  const int chunks = ceil_div(of.tokens, front_tokens(HEAD_DIM));
  // The rows of a sequence, of one head or of all, lie one behind the other.
  const s64 rows = per_head ? chunks : static_cast<s64>(chunks) * of.heads;
  float sum = 0;
  for (int batch = 0; batch < p.sequences; ++batch) {
    const s64 first = (static_cast<s64>(batch) * of.heads + head) * chunks;
    const float* from = parts + first * p.channels + channel;
#pragma unroll 8
    for (s64 row = threadIdx.x / FRONT_GAIN_CHANNELS; row < rows; row += ROWS_AT_ONCE)
      sum += __ldg(from + row * p.channels);
  }
  of_rows[threadIdx.x / FRONT_GAIN_CHANNELS][own] = sum;
  __syncthreads();
  if (threadIdx.x >= FRONT_GAIN_CHANNELS)
    return;
  sum = 0;
#pragma unroll
  for (int row = 0; row < ROWS_AT_ONCE; ++row)
    sum += of_rows[row][own];
  (is_of_keys ? p.dk_gain : p.dq_gain)[static_cast<s64>(head) * of.gain_step + channel] = sum;
}
