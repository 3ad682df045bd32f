//===- kernels/mask_bits.cuh - Lists of blocks from a mask's expression -------===//
//
// A list has the blocks of keys of which some query of its block sees a key, as far as the mask's
// expression says; the word behind each says in which of them it hides some scores. An
// expression that depends on no batch or head has lists of one. Most blocks are decided by ranges
// of what the expression reads; only of the others each score is asked for.
//
//===----------------------------------------------------------------------===//

#include "mask_expression.cuh"
#include "mask_ranges.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/list_bits.cuh"

constexpr int AT_ONCE = 4; ///< queries, whose reads of tables overlap

/// A warp finds whether queries see some and all of the keys. It stops where both are known.
struct Seen {
  bool some, all;
};
__device__ __forceinline__ Seen seen_of(const Params& p, int batch, int head, int first_query,
                                        int first_key) {
  const int end = minimum(first_query + SPARSE_Q, p.seq_q);
  const Truth in_block = SightOfBlocks{p, batch, head}.sees(
      Ints(first_query, end - 1), Ints(first_key, minimum(first_key + SPARSE_KV, p.seq_kv) - 1));
  if (in_block.is_known())
    return {in_block.may_hold, in_block.may_hold};
  const Sight sight = {p, batch, head};
  Seen seen = {false, true};
  for (int first = first_query; first < end && (!seen.some || seen.all); first += AT_ONCE) {
    bool some = false, all = true;
#pragma unroll
    for (int i = 0; i < SPARSE_KV / 32; ++i) {
      const int key = first_key + i * 32 + lane_id();
      if (key >= p.seq_kv)
        continue;
#pragma unroll
      for (int query = first; query < first + AT_ONCE; ++query) {
        const bool seen_here = sight.sees(minimum(query, end - 1), key);
        some = some || seen_here, all = all && seen_here;
      }
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
    const Seen seen = seen_of(p, batch, head, list * SPARSE_Q, (word * WORD_BITS + i) * SPARSE_KV);
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
