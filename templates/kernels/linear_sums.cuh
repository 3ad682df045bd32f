//===- kernels/linear_sums.cuh - What lists leave out, for each block of queries --===//
//
// query_sums and query_norms are sums of key_states and key_norms over the blocks of keys that a
// list does not name; with one_sum they are one sum over all blocks.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/sla/block_sums.cuh"

/// The lists of a warp's results, which are blocks of queries of all heads that share keys. A lane
/// has a word of them: of WORDS words that follow one another in a list, lanes have the first of
/// their results, then lanes the second.
template <int WORDS> struct ListsOfQueries {
  static constexpr int RESULTS = WORD_BITS / WORDS; ///< of a warp
  const u32* words = nullptr;                       ///< of this lane; null: nothing is listed

  __device__ __forceinline__ ListsOfQueries(const Params& p, const KeyHead& at, int first_result) {
    const int blocks = query_blocks(p), result = first_result + lane_id() % RESULTS;
    if (!p.one_sum && result < at.heads * blocks)
      words = p.row_bits + at.batch * p.row_stride_b +
              (at.kv_head * at.heads + result / blocks) * p.row_stride_h +
              static_cast<s64>(result % blocks) * row_words(p) + lane_id() / RESULTS;
  }
  __device__ __forceinline__ u32 read(const SummedBlocks<WORDS>& at) const {
    if (words == nullptr || at.first + lane_id() / RESULTS * WORD_BITS >= at.count)
      return 0;
    return __ldg(words + at.first / WORD_BITS);
  }
  static __device__ __forceinline__ u32 of_result(u32 word) { return word; }
};

/// Block (results of vectors, then runs of columns of tiles of results, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const KeyHead at = key_head(p);
  const int lists = at.heads * query_blocks(p);
  const s64 first_result = p.one_sum ? at.flat_kv_head : at.flat_kv_head * lists;
  const s64 first_term = at.flat_kv_head * key_blocks(p);
  BlockSums of;
  of.matrices = p.key_states + first_term * MATRIX_ELEMENTS;
  of.norms = p.key_norms + first_term * HEAD_DIM;
  of.sums = p.query_sums + first_result * MATRIX_ELEMENTS;
  of.norm_sums = p.query_norms + first_result * HEAD_DIM;
  of.heads = 1;
  of.count = key_blocks(p);
  of.most_results = lists;
  of.results = p.one_sum ? 1 : lists;
  sum_over_blocks<ListsOfQueries>(p, at, of);
}
