//===- tile/walk/packed.cuh - Sequences that lie one behind the other -------------===//
//
// PACKED: a tensor holds the tokens of several sequences, and where each begins stands in device
// memory alone. The host knows how many sequences and tokens there are, so neither a launch nor a
// graph depends on lengths: for tiles of SIZE tokens there are tokens / SIZE places and one more a
// sequence, and those of sequence b begin at first[b] / SIZE + b, which leaves each sequence at
// least as many as it has tiles. So do its tokens lie in the padded copies, its scale blocks and
// its chunks, and so are blocks numbered: each looks up whose it is.
//
// Sequences of a batch that are padded to one length count as packed, each with the tokens that are
// used; in the caller's tensors they are separate.
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
static_assert(!PACKED || sizeof(PackedPlace) <= PLACE_BYTES,
              "the host launches with so many more bytes");
/// Read where it is asked for: registers are short.
__device__ __forceinline__ volatile PackedPlace& packed_place() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return *reinterpret_cast<volatile PackedPlace*>(shared_memory + PLACE_OFFSET);
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
struct Tokens {
  int first, length;
  __device__ __forceinline__ Tokens(const int* firsts, const int* lengths, int sequence, int all) {
    first = maximum(0, minimum(firsts[sequence], all));
    const int room = maximum(0, minimum(firsts[sequence + 1], all) - first);
    length = lengths == nullptr ? room : maximum(0, minimum(lengths[sequence], room));
  }
};

/// Finds the block's sequence by its place among those of its queries or keys; false where that has
/// no such tile. All threads call this. REVERSED: its last tile comes first.
template <int SIZE, bool OF_QUERIES, bool REVERSED = false>
__device__ __forceinline__ bool enter_sequence(const Params& p, int place) {
  begin_in_stream_order();
  if (warp_id() == 0) {
    const int* first = OF_QUERIES ? p.first_queries : p.first_keys;
    const int sequence = sequence_of<SIZE>(first, p.sequences, place);
    if (lane_id() == 0) {
      volatile PackedPlace& at = packed_place();
      const Tokens queries(p.first_queries, p.lengths_q, sequence, p.seq_q);
      const Tokens keys(p.first_keys, p.lengths_kv, sequence, p.seq_kv);
      at.first_query = queries.first, at.queries = queries.length;
      at.first_key = keys.first, at.keys = keys.length;
      at.sequence = sequence;
      const Tokens own = OF_QUERIES ? queries : keys;
      const int block = place - own.first / SIZE - sequence;
      at.block = REVERSED ? ceil_div(own.length, SIZE) - 1 - block : block;
    }
  }
  __syncthreads();
  return packed_place().block >= 0 &&
         packed_place().block * SIZE < (OF_QUERIES ? packed_place().queries : packed_place().keys);
}
