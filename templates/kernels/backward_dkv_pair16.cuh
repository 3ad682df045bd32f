//===- kernels/backward_dkv_pair16.cuh - the same with dK and dV in 16 bits, sm_90a --===//
//
// This kernel differs from kernels/backward_dkv_pair.cuh in that P and dS have 16 bits and the
// tensor cores add products to the sums. For a pair of tiles a warpgroup
//
//   waits for S and dP; writes P to shared memory; begins dV's product of its own tile; forms dS;
//   begins dV's product of the other tile; waits; writes dS where P was; begins dK's products and S
//   of the next pair; waits for dK; begins dP
//
// What a warpgroup writes, P and dS in turn, is operand A of both warpgroups' products. It is
// written once all products with what was there before are over (`taken`), and read once all of it
// is written (`ready`). A tile's dO serves dP and dV, and is free when dV's product is over.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dkv_pair16.cuh"
#include "tile/math/fused_products.cuh"
#include "tile/walk/query_pairs.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && DV16 && DK16 && !SCALED_DOUT && BLOCK_KV == 64);

constexpr BackwardDkvPair16Layout LAYOUT(SHAPE);

/// Both warpgroups read each one's tile, and its queries in 16 bits.
using PairRing = Ring<PAIR_WARPS, 1>;
__device__ __forceinline__ PairRing tile_ring(u32 shared, int of) {
  return {shared + LAYOUT.tile_barriers + of * PairRing::BYTES};
}
__device__ __forceinline__ PairRing query_ring(u32 shared, int of) {
  return {shared + LAYOUT.query_barriers + of * PairRing::BYTES};
}
__device__ __forceinline__ u32 tile_address(u32 shared, int of) {
  return shared + LAYOUT.tiles + of * LAYOUT.tile_bytes;
}
__device__ __forceinline__ u32 query_address(u32 shared, int of) {
  return shared + LAYOUT.queries + of * LAYOUT.queries_bytes;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const KeyHead& at,
                                        int first_key) {
  const PairCopies copy{p, at};
  copy.keys(shared + LAYOUT.keys, shared + LAYOUT.values, first_key, shared + LAYOUT.keys_came);
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const auto fill_tiles = [&](int pair, const QueryTile& first, const QueryTile& second) {
    const PairRing::State state(pair);
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      tile_ring(shared, of).begin_filling(state, LAYOUT.tile_bytes);
      copy.tile(tile_address(shared, of), of ? second : first, tile_ring(shared, of).full(state));
    }
  };
  QueryTile tile = walk.start(at);
  if (!walk.has(tile))
    return;
  int pair = 0;
  fill_tiles(pair, tile, walk.second_of_pair(tile));
#pragma unroll 1
  while (walk.has(tile)) {
    const QueryTile second = walk.second_of_pair(tile), next = walk.next(second);
    const PairRing::State state(pair);
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const QueryTile& from = of ? second : tile;
      const PairRing ring = query_ring(shared, of);
      ring.begin_filling(state, LAYOUT.queries_bytes);
      copy.rows(query_address(shared, of), p.q_map, p.query_rows, from, ring.full(state));
    }
    ++pair;
    if (walk.has(next))
      fill_tiles(pair, next, walk.second_of_pair(next));
    tile = next;
  }
  // Behind the last pair consumers start the products of one more, whose results nobody reads.
  for (int of = 0; of < 2; ++of)
    tile_ring(shared, of).begin_filling(PairRing::State(pair), 0);
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const KeyHead& at,
                                        int first_key) {
  const int half = common_to_warp(warp_id() / 4);
  const PairScores tile(p, at, shared + LAYOUT.keys, shared + LAYOUT.values,
                        tile_address(shared, half));
  const auto handed_by = [&](int of) { return shared + LAYOUT.handed + of * LAYOUT.handed_bytes; };
  const auto ready = [&](int of) { return shared + LAYOUT.ready + of * 8; };
  const auto taken = [&](int of) { return shared + LAYOUT.taken + of * 8; };
  /// A tile's rows of 16 bits, from this warpgroup's channels on.
  const auto channels_of = [&](u32 rows) {
    return Address16::of_address(opaque(rows) +
                                 half * (SUM_CHANNELS / 64 * PANEL_BYTES<VALUE_ROW_BYTES>));
  };

  Sums dk, dv;
  Scores::Sum scores[COLUMNS8][4];
  int values[COLUMNS8][4]; // the bits of dP
  QueryRuns<1> walk(at);
  int pair = 0;

  const auto hand_over = [&](const u32(&rows16)[TILE_Q / 16][4]) {
    write_rows(handed_by(half), rows16);
    fence_async_proxy();
    arrive(ready(half));
  };
  /// The products of what a warpgroup has handed over: P, then dS.
  constexpr u32 OF_P = 0, OF_DS = 1;
  const auto begin_dv = [&](int of) {
    wait_for_phase(ready(of), OF_P, "P of the other");
    tile_ring(shared, of).wait_until_full(PairRing::State(pair)); // its dO
    issue_from_rows(dv, Address16::of_address(opaque(handed_by(of))),
                    channels_of(tile_address(shared, of) + LAYOUT.tile_dout));
  };
  const auto begin_dk = [&](int of) {
    wait_for_phase(ready(of), OF_DS, "dS of the other");
    query_ring(shared, of).wait_until_full(PairRing::State(pair));
    issue_from_rows(dk, Address16::of_address(opaque(handed_by(of))),
                    channels_of(query_address(shared, of)));
  };
  const auto work_on_pair = [&] {
    finish<0>(scores);
    float x[COLUMNS8][4], ds[COLUMNS8][4], none[2];
    u32 rows16[TILE_Q / 16][4];
    tile.recompute_p(x, scores, walk.first_query(half), walk.comes_again(half));
    pack_fragments<TILE_Q / 16>(rows16, x);
    wait_for_phase(taken(half), OF_DS, "products with dS");
    hand_over(rows16);
    begin_dv(half);
    tile.form_ds<false, 1>(ds, values, x, none);
    pack_fragments<TILE_Q / 16>(rows16, ds);
    begin_dv(1 - half);
    finish_rows<0>(dv);
    for (int of = 0; of < 2; ++of) {
      arrive(taken(of));
      tile_ring(shared, of).release(PairRing::State(pair));
    }
    wait_for_phase(taken(half), OF_P, "products with P");
    hand_over(rows16);
    begin_dk(half);
    begin_dk(1 - half);
    tile_ring(shared, half).wait_until_full(PairRing::State(pair + 1));
    tile.start_scores(scores);
    finish_rows<1>(dk); // not under way where the next pair begins: C7515
    for (int of = 0; of < 2; ++of) {
      arrive(taken(of));
      query_ring(shared, of).release(PairRing::State(pair));
    }
    tile.start_values(values);
    ++pair;
    walk.advance_pair();
  };

  const bool any = walk.any(at);
  // Whether queries see the keys or not: no copy may come after the block's end.
  wait_for_phase(shared + LAYOUT.keys_came, 0);
  if (any) {
    tile_ring(shared, half).wait_until_full(PairRing::State(0));
    tile.start_scores(scores);
    tile.start_values(values);
    do {
      work_on_pair();
    } while (walk.is_in_run() || walk.next_run(at));
    finish<0>(scores);
    finish<0>(values);
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
        for (int of = 0; of < 2; ++of) {
          tile_ring(shared, of).init();
          query_ring(shared, of).init();
          init_mbarrier(shared + LAYOUT.ready + of * 8, 128);
          init_mbarrier(shared + LAYOUT.taken + of * 8, 256);
        }
        init_mbarrier(shared + LAYOUT.keys_came, 1);
      },
      Nothing(), [&] { produce(p, shared, at, first_key); },
      [&] { consume(p, shared, at, first_key); });
}
