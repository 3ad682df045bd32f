//===- kernels/mask_bits.cuh - Lists of blocks from a mask's expression -------===//
//
// A list has the blocks of keys of which some query of its block sees a key, as far as the mask's
// expression says; the word behind each says in which of them it hides some scores. An
// expression that depends on no batch or head has lists of one.
//
//===----------------------------------------------------------------------===//

#include "mask_expression.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/list_bits.cuh"

/// A warp finds whether queries see some and all of the keys. It stops where both are known.
struct Seen {
  bool some, all;
};
__device__ __forceinline__ Seen seen_of(const Params& p, const Sight& sight, int first_query,
                                        int first_key) {
  const int end = minimum(first_query + SPARSE_Q, p.seq_q);
  Seen seen = {false, true};
  for (int query = first_query; query < end && (!seen.some || seen.all); ++query) {
    bool some = false, all = true;
#pragma unroll
    for (int i = 0; i < SPARSE_KV / 32; ++i) {
      const int key = first_key + i * 32 + lane_id();
      if (key >= p.seq_kv)
        continue;
      const bool seen_here = sight.sees(query, key);
      some = some || seen_here, all = all && seen_here;
    }
    seen.some = seen.some || __ballot_sync(~0u, some) != 0;
    seen.all = seen.all && __ballot_sync(~0u, all) == ~0u;
  }
  return seen;
}

/// A block makes a word of a list, a warp every WARPS-th of its blocks of keys.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  __shared__ u32 of_warps[WARPS][2];
  begin_in_stream_order();
  const int words = row_words(p) / ROW_STEP;
  const int word = blockIdx.x % words, list = blockIdx.x / words;
  const int head = blockIdx.y, batch = blockIdx.z;
  u32 listed = 0, in_part = 0;
  for (int i = warp_id(); i < WORD_BITS && word * WORD_BITS + i < key_blocks(p); i += WARPS) {
    const Seen seen =
        seen_of(p, {p, batch, head}, list * SPARSE_Q, (word * WORD_BITS + i) * SPARSE_KV);
    listed |= static_cast<u32>(seen.some) << i;
    in_part |= static_cast<u32>(seen.some && !seen.all) << i;
  }
  if (lane_id() == 0)
    of_warps[warp_id()][0] = listed, of_warps[warp_id()][1] = in_part;
  __syncthreads();
  if (threadIdx.x >= ROW_STEP)
    return;
  u32 bits = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp)
    bits |= of_warps[warp][threadIdx.x];
  const s64 row = (static_cast<s64>(batch) * p.heads + head) * query_blocks(p) + list;
  p.packed_bits[row * row_words(p) + word * ROW_STEP + threadIdx.x] = bits;
}
