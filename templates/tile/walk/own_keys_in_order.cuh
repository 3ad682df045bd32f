//===- tile/walk/own_keys_in_order.cuh - Which keys a block owns, by their lists ---===//
//
// This file stands in the place of tile/walk/own_keys.cuh where blocks of keys have lists of
// queries. Blocks are begun in the order of their numbers. Which list's keys a number stands for,
// kernels/order_lists.cuh has written: the longest lists come first, for a long one that begins
// last leaves the other multiprocessors without work.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/global_memory.cuh"
#include "tile/walk/heads.cuh"
#include "tile/walk/list_bits.cuh"

constexpr int BLOCKS_A_LIST = SPARSE_KV / BLOCK_KV; ///< thread blocks that share one

struct OwnKeys {
  int block, kv_head, batch;

  /// Read where it is asked for: registers are short.
  __device__ __forceinline__ explicit OwnKeys(const Params& p) {
    int head, sequence;
    read_block_yz(head, sequence);
    const int number = read_block_x();
    const s64 list =
        (static_cast<s64>(sequence) * p.heads_kv + head / CHANNEL_PARTS) * key_blocks(p) +
        number / BLOCKS_A_LIST;
    u32 place[4];
    reload_words(place, p.key_order + list * KEY_ORDER_WORDS);
    block = place[0] * BLOCKS_A_LIST + number % BLOCKS_A_LIST;
    kv_head = place[1], batch = place[2];
  }
};

__device__ __forceinline__ KeyHead reread_key_head(const Params& p) {
  const OwnKeys own(p);
  return key_head(p, own.kv_head, own.batch);
}
__device__ __forceinline__ KeyHead key_head(const Params& p) { return reread_key_head(p); }
__device__ __forceinline__ int reread_block_of_keys(const Params& p) { return OwnKeys(p).block; }
__device__ __forceinline__ int block_of_keys(const Params& p) { return reread_block_of_keys(p); }
/// The last list's keys may end before its last block, which then ends at once. Where a list has
/// one block, nobody waits here for its place to come.
template <int SIZE> __device__ __forceinline__ bool enter_keys(const Params& p) {
  static_assert(SIZE == BLOCK_KV);
  begin_in_stream_order();
  return BLOCKS_A_LIST == 1 || block_of_keys(p) * BLOCK_KV < p.seq_kv;
}
