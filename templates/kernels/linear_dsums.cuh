//===- kernels/linear_dsums.cuh - What lists leave out, for each block of keys ----===//
//
// key_dsums and key_dnorms are sums of query_dsums and query_dnorms over the blocks of queries, of
// all heads that share the keys, whose lists do not name a block of keys; with one_sum they are one
// sum over all blocks.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/sla/block_sums.cuh"
#include "tile/walk/turned_bits.cuh"

/// What is read of a list at once: the bits of a warp's results.
template <int WORDS> struct BitsOfResults { using Type = u32; };
template <> struct BitsOfResults<2> { using Type = u16; };

/// The lists that name a warp's results, which are blocks of keys, from a multiple of their number
/// on. A lane has bits of them: the first of WORDS parts of its word are those of a block of
/// queries, the next those of the block WORD_BITS behind it. Turned over, lanes have the first word
/// of their results, then lanes the second.
template <int WORDS> struct ListsOfKeys {
  static constexpr int RESULTS = WORD_BITS / WORDS; ///< of a warp
  using Bits = typename BitsOfResults<WORDS>::Type;
  const Bits* bits; ///< of this lane's block of the head's first queries; null: nothing is listed
  s64 stride;       ///< from a head to the next
  int words_a_list;

  __device__ __forceinline__ ListsOfKeys(const Params& p, const KeyHead& at, int first_result)
      : bits(nullptr), stride(p.row_stride_h), words_a_list(row_words(p)) {
    if (!p.one_sum && first_result < key_blocks(p))
      bits = reinterpret_cast<const Bits*>(p.row_bits + at.batch * p.row_stride_b +
                                           at.kv_head * at.heads * p.row_stride_h +
                                           static_cast<s64>(lane_id()) * words_a_list) +
             first_result / RESULTS;
  }
  __device__ __forceinline__ u32 read(const SummedBlocks<WORDS>& at) const {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int first = at.first + i * WORD_BITS;
      if (bits != nullptr && first + lane_id() < at.count)
        word |=
            u32{__ldg(bits + (at.head * stride + static_cast<s64>(first) * words_a_list) * WORDS)}
            << i * RESULTS;
    }
    return word;
  }
  static __device__ __forceinline__ u32 of_result(u32 word) { return turn_over(word); }
};

/// Block (results of vectors, then runs of columns of tiles of results, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const KeyHead at = key_head(p);
  const int lists = at.heads * query_blocks(p);
  const s64 first_result = p.one_sum ? at.flat_kv_head : at.flat_kv_head * key_blocks(p);
  const s64 first_term = at.flat_kv_head * lists;
  BlockSums of;
  of.matrices = p.query_dsums + first_term * MATRIX_ELEMENTS;
  of.norms = p.query_dnorms + first_term * HEAD_DIM;
  of.sums = p.key_dsums + first_result * MATRIX_ELEMENTS;
  of.norm_sums = p.key_dnorms + first_result * HEAD_DIM;
  of.heads = p.one_sum ? 1 : at.heads;
  of.count = p.one_sum ? lists : query_blocks(p);
  of.most_results = key_blocks(p);
  of.results = p.one_sum ? 1 : key_blocks(p);
  sum_over_blocks<ListsOfKeys>(p, at, of);
}
