//===- kernels/backward_dkv_pair.cuh - dK, dV of wide heads by pairs of warpgroups, sm_90a --===//
//
// This kernel computes what kernels/backward_dkv.cuh computes, warp-specialised, with dK and dV in
// INT8. Two warpgroups own the same 64 keys (tile/walk/query_pairs.cuh): each forms P and dS of one
// tile of a pair, and sums its channels of dK and dV over both tiles. For a pair of tiles a
// warpgroup
//
//   waits for S and dP; writes P and dS, in 8 bits, where both warpgroups read them; forms for each
//   tile dV's products, then dK's, in two blocks of accumulators that take turns; begins S and dP
//   of the next pair
//
// The transposed copies that products take come into a ring of three pieces. A warpgroup writes P
// and dS of a pair once both warpgroups have read those of the pair before (`taken`), and reads
// them once all of them are written (`ready`).
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dkv_pair.cuh"
#include "tile/math/key_gradients.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/query_pairs.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && !DV16 && !DK16 && !BLOCK_SCALES && GROUP_Q == TILE_Q && BLOCK_KV == 64);

constexpr int PIECES_A_PAIR = 4; ///< dO of one tile, its Q, dO of the other, its Q

constexpr BackwardDkvPairLayout LAYOUT(SHAPE);
constexpr int PIECES = LAYOUT.pieces, SCALE_BUFFERS = LAYOUT.scale_buffers;

/// Each warpgroup's tile.
using TileRing = Ring<4, 1>;
__device__ __forceinline__ TileRing tile_ring(u32 shared, int half) {
  return {shared + LAYOUT.tile_barriers + half * TileRing::BYTES};
}
__device__ __forceinline__ u32 tile_address(u32 shared, int half) {
  return shared + LAYOUT.tiles + half * LAYOUT.tile_bytes;
}
using PieceRing = Ring<PAIR_WARPS, PIECES>;
/// The buffer of a run's scales, those of a warpgroup's channels.
__device__ __forceinline__ u32 scale_buffer(u32 shared, int run, int half) {
  return shared + LAYOUT.channel_scales + (run * 2 + half) * CHANNEL_SCALES_BYTES;
}

/// One thread copies everything.
class Producer {
public:
  __device__ __forceinline__ Producer(const Params& p, u32 shared, const KeyHead& at)
      : p_(p), shared_(shared), at_(at), copy_{p, at} {}

  __device__ __forceinline__ void run(int first_key) {
    copy_.keys(shared_ + LAYOUT.keys, shared_ + LAYOUT.values, first_key,
               shared_ + LAYOUT.keys_came);
    const QueryTiles walk(at_, tokens_from(first_key, BLOCK_KV));
    QueryTile tile = walk.start(at_);
    if (!walk.has(tile))
      return;
    int pair = 0, run = 0;
    bool begins_scale_block = true;
    fill_tiles(pair, tile, walk.second_of_pair(tile));
#pragma unroll 1
    while (walk.has(tile)) {
      const QueryTile second = walk.second_of_pair(tile), next = walk.next(second);
      const int piece = pair * PIECES_A_PAIR;
      if (begins_scale_block)
        announce_scales(piece, tile, run % SCALE_BUFFERS);
      else
        announce(piece);
      fill(piece, p_.dot8, tile);
      announce(piece + 1), fill(piece + 1, p_.qt8, tile);
      announce(piece + 2), fill(piece + 2, p_.dot8, second);
      // Its place is free before the first of these pieces is.
      begins_scale_block = walk.has(next) && walk.begins_run(next);
      run += begins_scale_block ? 1 : 0;
      ++pair;
      if (walk.has(next))
        fill_tiles(pair, next, walk.second_of_pair(next));
      announce(piece + 3), fill(piece + 3, p_.qt8, second);
      tile = next;
    }
    // Behind the last pair consumers start the products of one more, whose results nobody reads.
    for (int half = 0; half < 2; ++half)
      tile_ring(shared_, half).begin_filling(TileRing::State(pair), 0);
  }

private:
  __device__ __forceinline__ void fill_tiles(int pair, const QueryTile& first,
                                             const QueryTile& second) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRing ring = tile_ring(shared_, half);
      const TileRing::State state(pair);
      ring.begin_filling(state, LAYOUT.tile_bytes);
      copy_.tile(tile_address(shared_, half), half ? second : first, ring.full(state));
    }
  }
  __device__ __forceinline__ PieceRing pieces() const { return {shared_ + LAYOUT.piece_barriers}; }
  __device__ __forceinline__ void announce(int piece, int more_bytes = 0) {
    pieces().begin_filling(PieceRing::State(piece), LAYOUT.piece_bytes + more_bytes);
  }
  __device__ __forceinline__ void fill(int piece, const s8* copy, const QueryTile& tile) {
    const PieceRing::State state(piece);
    bulk_copy(shared_ + LAYOUT.first_piece + state.stage * LAYOUT.piece_bytes,
              copy + tile.elements(), LAYOUT.piece_bytes, pieces().full(state));
  }
  /// With a run's first piece come its scales. Nobody needs what is in their buffer any more:
  /// pieces of the run between have been released, and a run has four or more.
  __device__ __forceinline__ void announce_scales(int piece, const QueryTile& tile, int buffer) {
    announce(piece, 2 * CHANNEL_SCALES_BYTES);
    const u32 full = pieces().full(PieceRing::State(piece));
    const s64 scale_block = (at_.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
                            (CHANNEL_VECTORS * HEAD_DIM);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int vector = 0; vector < CHANNEL_VECTORS; ++vector) {
        const u32 to = scale_buffer(shared_, buffer, half) + vector * VECTOR_BYTES;
        const s64 from = scale_block + vector * HEAD_DIM + half * SUM_CHANNELS;
        bulk_copy(to + SCALES_OF_Q, p_.qt8_scale + from, VECTOR_BYTES, full);
        bulk_copy(to + SCALES_OF_DOUT, p_.dot8_scale + from, VECTOR_BYTES, full);
      }
    }
  }

  const Params& p_;
  u32 shared_;
  const KeyHead& at_;
  PairCopies copy_;
};

/// Processes each pair of tiles, as the warpgroup of one half of the channels.
struct PairWork {
  const u32& shared;
  const int& half;
  const TileRing& own_tile;
  const PieceRing& pieces;
  const PairScores& tile;
  const TilesDescriptor& channels; ///< this warpgroup's of the pieces
  QueryRuns<SCALE_BUFFERS>& walk;
  int& pair; ///< how many came before
  Sums &dk, &dv;
  Block (&blocks)[2]; ///< in which products take turns; first S and dP of a pair

  __device__ __forceinline__ void run() const {
    finish<0>(blocks[0].x);
    finish<0>(blocks[1].x);
    hand_over_scores();
    u32 a[2][KeptScores::FRAGMENTS][4]; // of two pieces in turn
    float2 scales[2];
    issue(0, a, scales);
    issue(1, a, scales);
#pragma unroll
    for (int i = 0; i < 2 * PIECES_A_PAIR; ++i) {
      const int kind = i / 2 % 2;
      if (kind == 0)
        blocks[i % 2].template add_to<false, 1>(dv, scales[0].x, scales[0].y, i % 2);
      else
        blocks[i % 2].template add_to<true, 1>(dk, scales[1].x, scales[1].y, i % 2);
      if (i % 2 == 1)
        pieces.release(state_of(i / 2));
      if (i + 2 < 2 * PIECES_A_PAIR) {
        issue(i + 2, a, scales);
      } else if (i % 2 == 0) {
        own_tile.wait_until_full(TileRing::State(pair + 1));
        tile.start_scores(blocks[0].x);
      } else {
        tile.start_values(blocks[1].x);
      }
    }
    ++pair;
    walk.advance_pair();
  }

private:
  __device__ __forceinline__ KeptScores handed_by(int of_half) const {
    return {shared + LAYOUT.handed + of_half * KEPT_SCORES_BYTES};
  }
  __device__ __forceinline__ PieceRing::State state_of(int piece) const {
    return PieceRing::State(opaque(pair) * PIECES_A_PAIR + piece); // not kept: registers are short
  }
  /// P and dS in 8 bits to where both warpgroups read them.
  __device__ __forceinline__ void hand_over_scores() const {
    float x[COLUMNS8][4], ds[COLUMNS8][4], largest[2], largest_ds[2] = {0, 0};
    u32 fragments[KeptScores::FRAGMENTS][4];
    tile.recompute_p(x, blocks[0].x, walk.first_query(half), walk.comes_again(half));
    largest_probabilities(x, largest);
    quad_max_nan(largest);
    const Scale p_low = fast_scale<UNSIGNED_LEVELS>(largest[0]);
    const Scale p_high = fast_scale<UNSIGNED_LEVELS>(largest[1]);
    quantize_fragments<false, KeptScores::FRAGMENTS>(fragments, x, p_low.inverse, p_high.inverse);
    wait_for_phase(shared + LAYOUT.taken + half * 8, (pair & 1) ^ 1, "readers of P and dS");
    handed_by(half).write(KeptScores::P, fragments, p_low.value, p_high.value);

    tile.form_ds<true, 0>(ds, blocks[1].x, x, largest_ds);
    own_tile.release(TileRing::State(pair));
    quad_max_nan(largest_ds);
    const Scale ds_low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
    const Scale ds_high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
    quantize_fragments<true, KeptScores::FRAGMENTS>(fragments, ds, ds_low.inverse, ds_high.inverse);
    handed_by(half).write(KeptScores::DS, fragments, ds_low.value, ds_high.value);
    arrive(shared + LAYOUT.ready + half * 8);
  }
  /// Begins product i of a pair. Piece k is dO of tile k / 2, or its Q; two products take its
  /// channels, 64 each.
  __device__ __forceinline__ void issue(int i, u32 (&a)[2][KeptScores::FRAGMENTS][4],
                                        float2 (&scales)[2]) const {
    const int piece = i / 2, of = piece / 2, kind = piece % 2;
    const PieceRing::State state = state_of(piece);
    if (i % 2 == 0) {
      if (kind == 0)
        wait_for_phase(shared + LAYOUT.ready + of * 8, pair & 1, "P and dS of the other");
      scales[kind] = handed_by(of).read(kind ? KeptScores::DS : KeptScores::P, a[kind]);
      if (kind == 1)
        arrive(shared + LAYOUT.taken + of * 8); // all of it is read
      pieces.wait_until_full(state);
    }
    const TilesDescriptor from = channels.at(state.stage, LAYOUT.piece_bytes);
    if (kind == 0)
      blocks[i % 2].template issue<false>(a[0], from, i % 2);
    else
      blocks[i % 2].template issue<true>(a[1], from, i % 2);
  }
};

__device__ __forceinline__ void consume(const Params& p, u32 shared, const KeyHead& at,
                                        int first_key) {
  const int half = common_to_warp(warp_id() / 4);
  const TileRing own_tile = tile_ring(shared, half);
  const PieceRing pieces = {shared + LAYOUT.piece_barriers};
  const PairScores tile(p, at, shared + LAYOUT.keys, shared + LAYOUT.values,
                        tile_address(shared, half));
  const TilesDescriptor channels =
      TilesDescriptor(shared + LAYOUT.first_piece).at(half, SUM_CHANNELS * TOKEN_ROW_BYTES);
  Sums dk, dv;
  Block blocks[2];
  QueryRuns<SCALE_BUFFERS> walk(at);
  int pair = 0;
  const PairWork work = {shared, half, own_tile, pieces, tile,  channels,
                         walk,   pair, dk,       dv,     blocks};

  const bool any = walk.any(at);
  // Whether queries see the keys or not: no copy may come after the block's end.
  wait_for_phase(shared + LAYOUT.keys_came, 0);
  if (any) {
    own_tile.wait_until_full(TileRing::State(0));
    tile.start_scores(blocks[0].x);
    tile.start_values(blocks[1].x);
    for (;;) {
      do {
        work.run();
      } while (walk.is_in_run());
      finish<0>(blocks[0].x);
      finish<0>(blocks[1].x);
      if (!walk.next_run(at))
        break;
      pieces.wait_until_full(PieceRing::State(pair * PIECES_A_PAIR)); // the scales came with it
      rescale_columns(dk, dv, scale_buffer(shared, walk.last_buffer(), half),
                      scale_buffer(shared, walk.buffer(), half));
    }
    apply_channel_scales(dk, dv, scale_buffer(shared, walk.last_buffer(), half));
  }

  store_pair_gradients(p, at, first_key, half, dk, dv);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const KeyHead at = key_head(p);
  const int first_key = block_of_keys(p) * BLOCK_KV;

  run_roles<PAIR_WARPS>(
      [&] {
        for (int half = 0; half < 2; ++half) {
          tile_ring(shared, half).init();
          init_mbarrier(shared + LAYOUT.ready + half * 8, 128);
          init_mbarrier(shared + LAYOUT.taken + half * 8, 256);
        }
        PieceRing{shared + LAYOUT.piece_barriers}.init();
        init_mbarrier(shared + LAYOUT.keys_came, 1);
      },
      Nothing(), [&] { Producer(p, shared, at).run(first_key); },
      [&] { consume(p, shared, at, first_key); });
}
