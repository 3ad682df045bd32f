//===- kernels/backward_fused.cuh - dK, dV and dQ in one kernel, in INT8 ---===//
//
// SageBwd, Algorithm 2, with S and dP formed once, by mma.sync. A block owns BLOCK_KV keys of one
// key/value head, 16 for each warp, and walks over the queries of every head of its group, 64 at a
// time, as kernels/backward_dkv.cuh does; all products are transposed. It adds each tile's part of
// dQ to sums in memory (tile/dq/dq_sums8.cuh), in a fixed order (tile/dq/dq_order.cuh).
//
// This kernel is for GPUs whose tensor cores bind it. So each product is issued before elementwise
// work that does not need it:
//   dP^T          before exp2(S) and the quantisation of P; its sums are in FP32 or FP16 (DP16)
//   dV += P^T dO  between the columns of dS = P (dP - delta)
//   dK += dS^T Q  between the columns of dS that are quantised for dQ
// Fragments of 8-bit keys stay in registers, and dS for dQ lies where dO for dV was.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/dq/dq_order.cuh"
#include "tile/math/mean_gradients.cuh"
#include "tile/math/mean_scores.cuh"
#include "tile/math/operand.cuh"
#include "tile/memory/dkv_loads.cuh"

static_assert(!ASYNCHRONOUS && !BLOCK_SCALES && !DQ16 && !DK16 && !DV16);
static_assert(STAGES == 1, "the halves of one stage are refilled in turn");
static_assert(!LAYOUT.keys_leave || SCORE_ROWS_IN_REGISTERS);

/// Products of a tile with 16 channels each, and how many are issued before the last one is added.
constexpr int PAIRS = SUM_CHANNELS / 16;
constexpr int AHEAD = HEAD_DIM > 64 ? 0 : 1;

template <bool SIGNED>
__device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], const u32* b,
                                         const int (&c)[4]) {
  if constexpr (SIGNED)
    mma_s8(d, a, b[0], b[1], c);
  else
    mma_u8(d, a, b[0], b[1], c);
}

/// sums += (8-bit A, 64 summed queries) x a transposed tile, as TokenProducts::add_to() does.
/// Behind the issue of each product, and before its addition, beside(number) is called.
template <bool SIGNED, typename Beside>
__device__ __forceinline__ void add_products(Sums& sums, const u32 (&a)[TILE_Q / 32][4], u32 tile,
                                             const RowScales& scales, const Beside& beside) {
  const MagicStart start;
  const u32 address = tile + token_lane();
  int products[1 + AHEAD][2][4];
  const auto issue = [&](int pair) {
    int(&to)[2][4] = products[pair % (1 + AHEAD)];
#pragma unroll
    for (int step = 0; step < TILE_Q / 32; ++step) {
      u32 b[4];
      load_fragment<TOKEN_ROW_BYTES>(b, address, pair * 16, step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (step == 0)
          multiply<SIGNED>(to[half], a[step], &b[2 * half], start.bits);
        else
          multiply<SIGNED>(to[half], a[step], &b[2 * half], to[half]);
      }
    }
  };
#pragma unroll
  for (int pair = 0; pair < AHEAD; ++pair)
    issue(pair);
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    if (pair + AHEAD < PAIRS)
      issue(pair + AHEAD);
    beside(pair);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums.x[2 * pair + half][i];
        sum = __fmaf_rn(__int_as_float(products[pair % (1 + AHEAD)][half][i]),
                        i < 2 ? scales.low.value : scales.high.value, sum);
      }
    }
  }
  sums.bias[0] = __fmaf_rn(MAGIC, scales.low.value, sums.bias[0]);
  sums.bias[1] = __fmaf_rn(MAGIC, scales.high.value, sums.bias[1]);
}

/// dP - delta of a tile: its product, and then eight columns of it at a time. `rows` are the
/// queries' vectors.
template <bool IN_FP16> struct ValueGradients {
  float x[COLUMNS8][4];

  __device__ __forceinline__ void issue(const ValueRows& values, u32 tile, u32 rows) {
    issue_values(x, values, tile, [&](int j) {
      const u32 columns =
          rows + ROW_MINUS_DELTA * TILE_Q * 4 + j / 2 * 64 + j % 2 * 8 + (lane_id() & 3) * 16;
      // Accumulators are neighbours: ptxas would move copies of others there.
      const float2 low = read_float2_again(columns), high = read_float2_again(columns);
      return Quad{low.x, low.y, high.x, high.y};
    });
  }
  __device__ __forceinline__ void take(float (&dp)[4], int j, u32) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dp[i] = x[j][i];
  }
};
template <> struct ValueGradients<true> {
  HalfSums<COLUMNS8> sums;

  __device__ __forceinline__ void issue(const ValueRows& values, u32 tile, u32) {
    sums.form(values, tile);
  }
  __device__ __forceinline__ void take(float (&dp)[4], int j, u32 rows) const {
    sums.subtract_delta_of_columns(dp, j, rows + ROW_FACTOR * TILE_Q * 4,
                                   rows + ROW_MINUS_DELTA * TILE_Q * 4);
  }
};

/// Processes each tile, as one warp.
struct TileWork {
  const Params& p;
  const KeyHead& at;
  const QueryTiles& walk;
  const Loads& load;
  const ScoreRows& keys;
  const ValueRows& values;
  DqInInt8& dq;
  const DqOrder& order;
  QueryTile& tile;
  Sums &dk, &dv;
  MeanGradients& of_mean;
  const int (&key)[2];
  int warp_key;
  float key_scale;

  __device__ __forceinline__ void run() const {
    constexpr int COLUMNS = COLUMNS8 / PAIRS; ///< of dS, beside each product
    const u32 shared = load.shared;
    ValueGradients<DP16> of_values;
    float x[COLUMNS8][4]; // P, then dS
    recompute_p(x, of_values);
    float largest[2] = {0, 0};
    largest_probabilities(x, largest);
    quad_max_nan(largest);
    Operand of_p, of_ds;
    const RowScales p_scales = quantize<false>(of_p, x, largest);

    wait_for_tiles(); // the transposed tiles of Q and dO
    pass_turn();
    largest[0] = largest[1] = 0;
    add_products<false>(dv, of_p.x8, shared + LAYOUT.dv_dout, p_scales, [&](int pair) {
#pragma unroll
      for (int j = pair * COLUMNS; j < (pair + 1) * COLUMNS; ++j) {
        float dp[4];
        of_values.take(dp, j, shared + LAYOUT.rows);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[j][i] *= dp[i];
          largest[i >> 1] = max_magnitude(largest[i >> 1], x[j][i]);
        }
      }
    });
    of_mean.take(x);
    dq.raise_scales(x);
    quad_max_nan(largest);
    const RowScales ds_scales = quantize<true>(of_ds, x, largest);
    __syncthreads(); // maxima are whole; what S, dP and dV take from shared memory is read
    const QueryTile next = walk.next(tile);
    load.rows(next, shared);
    dq.begin_write();
    add_products<true>(dk, of_ds.x8, shared + LAYOUT.dk_queries, ds_scales, [&](int pair) {
#pragma unroll
      for (int j = pair * COLUMNS; j < (pair + 1) * COLUMNS; ++j)
        dq.write(x[j], j);
    });
    __syncthreads(); // dS is whole
    const u32 seen = read_turn();
    int products[DqInInt8::SUMS][4];
    float row[2];
    dq.multiply(products, row);
    wait_for_turn(seen);
    wait_for_tiles(); // the next tile's rows; what dK and dQ take from shared memory is read
    load.for_gradients(next, shared);
    dq.add_to(p.dq_sum + tile.elements(), products, row);
    tile = next;
  }

private:
  /// Forms P, and issues dP - delta before it.
  __device__ __forceinline__ void recompute_p(float (&x)[COLUMNS8][4],
                                              ValueGradients<DP16>& of_values) const {
    Scores::Sum scores[COLUMNS8][4];
    issue_scores(scores, keys, load.shared + LAYOUT.queries);
    of_values.issue(values, load.shared + LAYOUT.dout, load.shared + LAYOUT.rows);
    probabilities(x, scores, load.shared + LAYOUT.rows, key_scale, mean_scores_of(at, tile, key));
    // Queries past the end have a ROW_SHIFT of infinity. But dQ sums over keys, and key 0 is not
    // among them where it is separate.
    const int first_query = tile.first_query();
    if (needs_mask(at, tokens_from(first_query, TILE_Q), tokens_from(warp_key, 16)) ||
        warp_key < SINK_KEYS)
      mask(
          x,
          [&](int r, int column) {
            return hidden(at, first_query + column, key[r]) || key[r] < SINK_KEYS;
          },
          0.0f);
  }
  /// Once a pair of tiles, one thread asks whether it is the block's turn, waits until it is, and
  /// passes the turn on.
  __device__ __forceinline__ bool keeps_order() const {
    return threadIdx.x == 0 && walk.begins<TILES_A_TURN>(tile);
  }
  __device__ __forceinline__ u32 read_turn() const { return keeps_order() ? order.read(tile) : 0; }
  __device__ __forceinline__ void wait_for_turn(u32 seen) const {
    if (keeps_order())
      order.wait(tile, seen);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (keeps_order())
      order.pass();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  begin_in_stream_order();
  const KeyPlace place = take_place(p, shared);
  if (!enter_keys<BLOCK_KV>(p, place.x))
    return;
  const KeyHead at = key_head(p, place.kv_head, place.batch);
  const int block = PACKED ? packed_place().block : place.x;
  const int first_key = block * BLOCK_KV;
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const Loads load = {p, at, walk, shared};
  load.kept(first_key);
  DqInInt8 dq(shared);
  dq.load(p, at, first_key);
  QueryTile tile = walk.start(at);
  int buffer = 0;
  load.channel_scales(tile, buffer);
  load.channel_scales(walk.next_run(tile), buffer + 1);
  load.rows(tile, shared);

  const int row_in_warp = lane_id() >> 2, warp_key = first_key + warp_id() * 16;
  const int key[2] = {warp_key + row_in_warp, warp_key + row_in_warp + 8};
  // One scale serves both rows (KEYS_A_SCALE).
  const float key_scale =
      QK16 ? p.softmax_scale * LOG2_E
           : p.k8_scale[at.padded_key() / KEYS_A_SCALE + key_scale_place(key[0])];

  ScoreRows keys;
  ValueRows values;
  Sums dk, dv;
  MeanGradients of_mean;
  const DqOrder order(p, at, shared, block);
  const TileWork work = {p,    at, walk, load,    keys, values,   dq,       order,
                         tile, dk, dv,   of_mean, key,  warp_key, key_scale};
  if (walk.any()) {
    if (threadIdx.x == 0)
      order.begin();
    wait_for_tiles();
    keys.load(shared + LAYOUT.keys, warp_id() * 16);
    values.load(shared + LAYOUT.values, warp_id() * 16);
    if constexpr (LAYOUT.keys_leave)
      __syncthreads();
    load.for_gradients(tile, shared);
    for (;;) {
      const float* mean = MeanGradients::mean_of(at, tile);
      do {
        work.run();
      } while (!walk.begins_run(tile));
      of_mean.add_to(dk, mean, scale_buffer(shared, buffer));
      if (!walk.has(tile))
        break;
      // The scales came during the run that ends; nobody reads the buffer of the run before it any
      // more.
      const u32 last = scale_buffer(shared, buffer);
      buffer = buffer_behind(buffer);
      rescale_columns(dk, dv, last, scale_buffer(shared, buffer));
      load.channel_scales(walk.next_run(tile), buffer_behind(buffer));
    }
    apply_channel_scales(dk, dv, scale_buffer(shared, buffer)); // without a walk there are none
    __syncthreads();
    if (threadIdx.x == 0)
      order.pass();
  }
  cp_async_wait<0>();

  const KeyGradients stored = store_key_gradients(p, at, warp_key, dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (first_key == 0) {
      __syncthreads();
      write_first_key<THREADS>(at, stored);
    }
  }
}
