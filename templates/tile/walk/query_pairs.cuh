//===- tile/walk/query_pairs.cuh - Pairs of tiles of queries, for a pair of warpgroups --===//
//
// For dK and dV of wide heads: both warpgroups own the same 64 keys and walk over pairs of tiles of
// 64 queries, of which each forms S, P, dP and dS of one. A run's last pair may have but one tile:
// it comes twice, and has no part the second time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/query_pairs.cuh"
#include "tile/math/key_gradients.cuh"
#include "tile/math/transposed_scores.cuh"
#include "tile/memory/caller_rows.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/pair.cuh"
#include "tile/walk/tiles.cuh"

constexpr QueryPairsLayout PAIRS(SHAPE);
/// The keys and values of a block.
constexpr int PAIR_KEYS_BYTES = PAIRS.values - PAIRS.keys;
constexpr int PAIR_VALUES_BYTES = PAIRS.tiles - PAIRS.values;

/// One thread does this for both warpgroups, whatever else it copies.
struct PairCopies {
  const Params& p;
  const KeyHead& at;

  /// Copies a tile of queries from a tensor of the caller, or from swizzled tiles.
  __device__ __forceinline__ void rows(u32 to, const TensorMap& map, const Element* images,
                                       const QueryTile& tile, u32 barrier) const {
    copy_caller_rows(to, map, images + tile.elements(), tile.first_query(), tile.head, at.batch,
                     barrier);
  }
  /// The block's own.
  __device__ __forceinline__ void keys(u32 keys, u32 values, int first_key, u32 barrier) const {
    arrive_expecting(barrier, PAIR_KEYS_BYTES + PAIR_VALUES_BYTES);
    bulk_copy(keys, p.k8 + (at.padded_key() + first_key) * HEAD_DIM, PAIR_KEYS_BYTES, barrier);
    copy_caller_rows(values, p.v_map, p.v_rows + (at.padded_key() + first_key) * HEAD_DIM,
                     first_key, at.kv_head, at.batch, barrier);
  }
  __device__ __forceinline__ void tile(u32 to, const QueryTile& tile, u32 barrier) const {
    bulk_copy(to + PAIRS.tile_queries, p.q8 + tile.elements(), TILE_Q * HEAD_DIM, barrier);
    bulk_copy(to + PAIRS.tile_rows, p.q_rows + tile.rows(), PAIRS.tile_rows_bytes, barrier);
    if constexpr (SCALED_DOUT)
      bulk_copy(to + PAIRS.tile_dout, p.dout_rows + tile.elements(), TILE_Q * VALUE_ROW_BYTES,
                barrier);
    else
      rows(to + PAIRS.tile_dout, p.dout_map, p.dout_rows, tile, barrier);
  }
};

/// The keys that a warp owns, by their first.
__device__ __forceinline__ int keys_of_warp(const Params& p) {
  return reread_block_of_keys(p) * BLOCK_KV + first_token_of_warp(reread_thread());
}

/// Stores a warpgroup's channels of the block's gradients. Its threads meet at a barrier of its own
/// before the first key's are written again.
__device__ __forceinline__ void store_pair_gradients(const Params& p, const KeyHead& at,
                                                     int first_key, int half, const Sums& dk,
                                                     const Sums& dv) {
  constexpr int FIRST_KEY_BARRIER = 1;
  const KeyGradients stored = store_key_gradients(p, at, keys_of_warp(p), dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (first_key == 0) {
      named_barrier_sync<128>(FIRST_KEY_BARRIER + half);
      write_first_key<128>(at, stored);
    }
  }
}

/// A warpgroup's tile of each pair: its scores, P and dS.
class PairScores {
public:
  __device__ __forceinline__ PairScores(const Params& p, const KeyHead& at, u32 keys, u32 values,
                                        u32 tile)
      : p_(p), at_(at), keys_{TilesDescriptor(keys)}, values_{TilesDescriptor(values)},
        tile_(tile) {}

  /// Places are formed where they are asked for: all descriptors would be kept over the loop else.
  template <typename Sum>
  __device__ __forceinline__ void start_scores(Sum (&scores)[COLUMNS8][4]) const {
    issue_scores(scores, keys_.opaque_rows(), TilesDescriptor(opaque(tile_) + PAIRS.tile_queries));
  }
  template <typename Sum>
  __device__ __forceinline__ void start_values(Sum (&values)[COLUMNS8][4]) const {
    issue_values(values, values_.opaque_rows(), TilesDescriptor(opaque(tile_) + PAIRS.tile_dout),
                 minus_delta());
  }
  /// Forms P of the finished scores; of a tile that comes again zeros.
  __device__ __forceinline__ void recompute_p(float (&x)[COLUMNS8][4],
                                              const Scores::Sum (&scores)[COLUMNS8][4],
                                              int first_query, bool comes_again) const {
    const int own = keys_of_warp(p_);
    // One scale serves both rows (KEYS_A_SCALE); read again, because registers are short.
    const float key_scale =
        p_.k8_scale[at_.padded_key() / KEYS_A_SCALE + key_scale_place(own + lane_id() / 4)];
    probabilities(x, scores, tile_ + PAIRS.tile_rows, key_scale);
    // Queries past the end have a ROW_SHIFT of infinity, and rows of keys past it are not stored.
    const bool masked =
        HAS_MASK && needs_mask(at_, tokens_from(first_query, TILE_Q), tokens_from(own, 16));
    if (!comes_again && !masked)
      return;
    Range seen[2]; // columns of rows g and g + 8, from this lane's first one
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Range queries = queries_of(at_, tokens_from(own + lane_id() / 4 + 8 * r, 1));
      const int first_column = first_query + 2 * (lane_id() & 3);
      seen[r] = {comes_again ? TILE_Q : queries.begin - first_column, queries.end - first_column};
    }
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * j + (i & 1);
        if (is_outside(column, seen[i >> 1]))
          x[j][i] = 0;
      }
    }
  }
  /// Forms dS of P and the sums of dP, where at most `PENDING` groups of products that began later
  /// are under way.
  template <bool MAXIMA, int PENDING>
  __device__ __forceinline__ void form_ds(float (&ds)[COLUMNS8][4], int (&values)[COLUMNS8][4],
                                          const float (&x)[COLUMNS8][4],
                                          float (&largest)[2]) const {
    ::finish_dp<PENDING>(ds, values, minus_delta());
    score_gradients<MAXIMA>(ds, x, largest);
  }

private:
  struct Rows {
    TilesDescriptor tile;
    __device__ __forceinline__ Rows opaque_rows() const {
      Rows rows = *this;
      rows.tile.low = opaque(rows.tile.low);
      return rows;
    }
  };
  /// Gives what dP starts from, of columns 8j.
  __device__ __forceinline__ auto minus_delta() const {
    return [rows = tile_ + PAIRS.tile_rows](int j) {
      const float2 x = read_float2(rows + ROW_MINUS_DELTA * TILE_Q * 4 + j / 2 * 64 + j % 2 * 8 +
                                   (lane_id() & 3) * 16);
      return Quad{x.x, x.y, x.x, x.y};
    };
  }

  const Params& p_;
  const KeyHead& at_;
  Rows keys_, values_;
  u32 tile_;
};
