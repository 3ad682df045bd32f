//===- tile/packed.cuh - Sequences that lie one behind the other -------------===//
//
// PACKED: a tensor holds the tokens of several sequences, and where each begins stands in device
// memory alone. The host knows how many sequences and tokens there are, so neither a launch nor a
// graph depends on lengths: for tiles of SIZE tokens there are tokens / SIZE places and one more a
// sequence, and those of sequence b begin at first[b] / SIZE + b, which leaves each sequence at
// least as many as it has tiles. So lie its tokens in the padded copies, its units and its chunks,
// and so are blocks numbered: each looks up whose it is.
//
// Sequences of a batch that are padded to one length count as packed, each with the tokens that are
// used; in the caller's tensors they lie apart.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/stream_order.cuh"

/// To so many tokens copies of a sequence are padded.
constexpr int PADDED_TOKENS = 128;

/// The block's sequence, behind what else the block has in shared memory.
struct PackedPlace {
  int sequence;
  int block; ///< the block's number in it
  int first_query, queries, first_key, keys;
};
static_assert(!PACKED || sizeof(PackedPlace) <= PLACE_BYTES, "the host launches with so many more bytes");
__device__ __forceinline__ PackedPlace& packed_place() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return *reinterpret_cast<PackedPlace*>(shared_memory + PLACE_OFFSET);
}

/// The sequence that has a place: the last that begins there or before. A warp asks for 32 at once.
template <int SIZE>
__device__ __forceinline__ int sequence_of(const int* first, int sequences, int place) {
  int low = 0, count = sequences; // it is one of `count` from `low` on
  while (count > 1) {
    const int step = ceil_div(count, 32), offset = lane_id() * step;
    const bool begun =
        offset < count && maximum(0, first[low + offset]) / SIZE + low + offset <= place;
    const int last = 31 - __clz(__ballot_sync(~0u, begun) | 1);
    low += last * step;
    count = minimum(step, count - last * step);
  }
  return low;
}

/// Tokens of a sequence, which lie within the tensor whatever memory says.
__device__ __forceinline__ void find_tokens(const int* firsts, const int* lengths, int sequence,
                                            int tokens, int& first, int& length) {
  first = maximum(0, minimum(firsts[sequence], tokens));
  const int room = maximum(0, minimum(firsts[sequence + 1], tokens) - first);
  length = lengths == nullptr ? room : maximum(0, minimum(lengths[sequence], room));
}

/// Finds the block's sequence by its place among those of its queries or keys; false where that has
/// no such tile. All threads call this. REVERSED: its last tile comes first.
template <int SIZE, bool OF_QUERIES, bool REVERSED = false>
__device__ __forceinline__ bool enter_sequence(const Params& p, int place) {
  begin_in_stream_order();
  if (warp_id() == 0) {
    const int* first = OF_QUERIES ? p.first_queries : p.first_keys;
    const int sequence = sequence_of<SIZE>(first, p.sequences, place);
    if (lane_id() == 0) {
      PackedPlace at;
      at.sequence = sequence;
      find_tokens(p.first_queries, p.lengths_q, sequence, p.seq_q, at.first_query, at.queries);
      find_tokens(p.first_keys, p.lengths_kv, sequence, p.seq_kv, at.first_key, at.keys);
      at.block = place - (OF_QUERIES ? at.first_query : at.first_key) / SIZE - sequence;
      if (REVERSED)
        at.block = ceil_div(OF_QUERIES ? at.queries : at.keys, SIZE) - 1 - at.block;
      packed_place() = at;
    }
  }
  __syncthreads();
  return packed_place().block >= 0 && packed_place().block * SIZE < (OF_QUERIES ? packed_place().queries : packed_place().keys);
}
