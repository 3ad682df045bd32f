//===- kernels/linear_dout.cuh - Gradients of linear attention's queries and sums --===//
//
// This kernel computes for a block of queries, from dO: dalpha, dQ, and the gradients of the sums H
// and Z. With F = phi(Q), u = F Z, O_l = F H / u, dO_l = (1 - alpha) dO and
// delta = rows of dO_l . O_l:
//   dF = (dO_l H^T - delta Z) / u,  dQ = F * dF,  dH = (F / u)^T dO_l,  dZ = -(F / u)^T delta.
// A block whose list is invalid has no gradients, and dalpha is 0 where alpha is not used. With
// alpha_of_rest dalpha is the gradient of rest, which is (1 - alpha) dO . (O_l - O): O, the mixed
// output, then stands in the place of O_s, and O_s is not needed. dq_more,
// another gradient that is added, has the strides of dq. F, dO_l and F / u are bf16. The softmax
// takes rows' sums of F * dF off dF; they are zeros, as O_l does not depend on how large F is, and
// delta is formed from the same rounded F and dO_l.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/channel_matrix.cuh"
#include "tile/sla/mixture.cuh"
#include "tile/sla/token_sums.cuh"

constexpr LinearLayout LAYOUT(HEAD_DIM, SPARSE_Q, 2, true);

/// O_s of the warp's rows, read while tiles are on their way; zeros without alpha.
struct ExactRows {
  OwnRows out;
  __device__ __forceinline__ ExactRows(const Params& p, const QueryHead& at, int first, int row)
      : out(p.alpha == nullptr
                ? nullptr
                : p.sparse_out + at.batch * p.sparse_out_stride_b +
                      at.head * p.sparse_out_stride_h + first * p.sparse_out_stride_s,
            p.sparse_out_stride_s, row, p.seq_q - first) {}
  /// The products of dO and O_s go to `dots`.
  __device__ __forceinline__ void meet(int row, u32 douts, u32 dots) const {
    const WarpRows own;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / ROWS_A_TURN; ++i) {
      const int of = row + own.first + i * ROWS_A_TURN;
      const u32 exact[4] = {out.x[i].x, out.x[i].y, out.x[i].z, out.x[i].w};
      u32 words[4];
      read_words(words, douts + own.place(of));
      float dot = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = unpack<Element>(words[w]), o = unpack<Element>(exact[w]);
        dot = __fmaf_rn(x.x, o.x, __fmaf_rn(x.y, o.y, dot));
      }
#pragma unroll
      for (int stride = 1; stride < OCTETS; stride *= 2)
        dot += __shfl_xor_sync(~0u, dot, stride);
      if (own.octet == 0)
        write_float(dots + of * 4, dot);
    }
  }
};

/// dQ of the warp's rows, plus another gradient of them if there is one, and `of_mean` times the
/// mean of keys, which exact attention leaves out as its rows of dS were to sum to zero. F in
/// `rows` becomes F / u.
__device__ __forceinline__ void store_dq(const Params& p, u32 rows, u32 douts, u32 matrix,
                                         u32 norms, const float (&inverse)[2],
                                         const float (&delta)[2], const float (&of_mean)[2]) {
  const QueryHead at = reread_query_head(p);
  const int thread = reread_thread(), row = thread / 32 * WARP_ROWS;
  const int query = read_block_x() * SPARSE_Q + row + thread % 32 / 4, octet = thread % 4;
  const s64 place =
      at.batch * p.dq_stride_b + at.head * p.dq_stride_h + query * p.dq_stride_s + octet * 8;
  const RowsOfA features(rows), dlinear(douts);
  const RowsOfB by_rows(matrix);
  const WordPlaces places(rows, row);
#pragma unroll 1
  for (int c = 0; c < STEPS; c += 2) {
    uint4 others[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      others[h] = make_uint4(0, 0, 0, 0);
      if (p.dq_more != nullptr && query + 8 * h < p.seq_q)
        others[h] =
            *reinterpret_cast<const uint4*>(p.dq_more + place + 8 * h * p.dq_stride_s + c * 16);
    }
    float x[2][2][4] = {};
    product_of_transpose(x, dlinear, row, by_rows, c);
    u32 own[2][4], words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      features.load(words[i], row, c + i);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int w = i % 4, h = half_of_word(w);
      const float2 f = unpack<bf16>(words[i / 4][w]);
      const int channel = channel_of_word(c + i / 4, w);
      const float2 z = read_pair(norms, channel);
      float2 mean = {};
      if (p.alpha_of_rest && p.k_mean != nullptr)
        mean =
            __ldg(reinterpret_cast<const float2*>(p.k_mean + at.flat_kv_head * HEAD_DIM + channel));
      const float by_x = f.x * inverse[h], by_y = f.y * inverse[h];
      const float(&of)[4] = x[i / 4][w / 2];
      write_word(places.of_word(c + i / 4, w), pack<bf16>(by_x, by_y));
      own[h][i / 4 * 2 + w / 2] = pack<Element>(
          __fmaf_rn(of_mean[h], mean.x, by_x * __fmaf_rn(-delta[h], z.x, of[2 * h])),
          __fmaf_rn(of_mean[h], mean.y, by_y * __fmaf_rn(-delta[h], z.y, of[2 * h + 1])));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      gather_octet(own[h]);
      add_words(own[h], others[h]);
      if (query + 8 * h < p.seq_q)
        store_words(p.dq + place + 8 * h * p.dq_stride_s + c * 16, own[h]);
    }
  }
}

/// Block (block of queries, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const u32 rows = base + LAYOUT.first, douts = base + LAYOUT.second;
  const u32 matrix = base + LAYOUT.matrix;
  const u32 deltas = base + LAYOUT.vectors, dots = deltas + SPARSE_Q * 4;
  const u32 norms = dots + SPARSE_Q * 4;
  const QueryHead at = query_head(p);
  const BlockOfTokens<SPARSE_Q> block(p.seq_q);
  const s64 sums = sums_of(p.one_sum, at);
  block.load(rows, p.q + at.batch * p.q_stride_b + at.head * p.q_stride_h, p.q_stride_s);
  block.load(douts, p.dout + at.batch * p.dout_stride_b + at.head * p.dout_stride_h,
             p.dout_stride_s);
  load_channels(norms, p.query_norms + sums * HEAD_DIM);
  load_matrix(matrix, p.query_sums + sums * MATRIX_ELEMENTS);
  cp_async_commit();
  const int row = warp_id() * WARP_ROWS;
  const bool mixes = p.alpha != nullptr;
  const Listed listed = listed_from(p, at, block.first);
  {
    const ExactRows exact(p, at, block.first, row);
    cp_async_wait<0>();
    __syncthreads();
    if (mixes)
      exact.meet(row, douts, dots);
  }

  Rows16 features;
  load_features(features, rows, row, SPARSE_Q, false, 0);
  __syncwarp();
  write_rows(rows, row, features);
  float inverse[2], share[2], plain[2] = {}, delta[2] = {};
  normalisers(inverse, features, norms);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    inverse[h] = __fdiv_rn(1.0f, inverse[h]);
    share[h] = listed == Listed::invalid
                   ? 0
                   : shares_of(p, at, block.first + row + lane_id() / 4 + 8 * h, listed).linear;
  }
  const WordPlaces places(douts, row);
  const ColumnsOfB by_columns(matrix);
  const RowsOfA of_dout(douts);
#pragma unroll 2
  for (int c = 0; c < STEPS; ++c) {
    float linear[2][4] = {};
    product(linear, features, by_columns, c);
    u32 words[4];
    of_dout.load(words, row, c);
    __syncwarp(); // all lanes have these words of dO, in whose place others go
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      const float x = linear[w / 2][2 * h] * inverse[h], y = linear[w / 2][2 * h + 1] * inverse[h];
      const float2 whole = unpack<Element>(words[w]);
      plain[h] = __fmaf_rn(whole.x, x, __fmaf_rn(whole.y, y, plain[h]));
      const u32 dlinear = pack<bf16>(whole.x * share[h], whole.y * share[h]);
      const float2 own = unpack<bf16>(dlinear);
      delta[h] = __fmaf_rn(own.x, x, __fmaf_rn(own.y, y, delta[h]));
      write_word(places.of_word(c, w), dlinear); // in dO's place
    }
  }
  __syncwarp(); // of dots, and before the tiles' rows are written over
  float of_mean[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int of = reread_thread() / 32 * WARP_ROWS + reread_thread() % 32 / 4 + 8 * h;
    delta[h] = quad_sum(delta[h]);
    plain[h] = quad_sum(plain[h]);
    float dalpha = mixes && listed == Listed::some ? read_float(dots + of * 4) - plain[h] : 0;
    if (p.alpha_of_rest)
      dalpha *= -share[h];
    of_mean[h] = -dalpha * p.softmax_scale;
    if (lane_id() % 4 == 0) {
      write_float(deltas + of * 4, delta[h]);
      if (mixes && read_block_x() * SPARSE_Q + of < p.seq_q && p.dalpha != nullptr)
        p.dalpha[reread_query_head(p).first_row() + read_block_x() * SPARSE_Q + of] = dalpha;
    }
  }

  __syncwarp();
  store_dq(p, rows, douts, matrix, norms, inverse, delta, of_mean);
  __syncthreads();

  const s64 own = reread_query_head(p).flat_head * gridDim.x + read_block_x();
  sum_columns<bf16, SPARSE_Q>(p.query_dnorms + own * HEAD_DIM, rows, matrix,
                              [&](int of) { return -read_float(deltas + of * 4); });
  MatrixSums dh;
  dh.sum<SPARSE_Q>(rows, douts);
  dh.store(p.query_dsums + own * MATRIX_ELEMENTS, matrix);
}
