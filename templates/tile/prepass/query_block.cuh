//===- tile/prepass/query_block.cuh - What the pre-passes make of a scale block of queries --===//
//
// q8, qt8, dot8, rows in 16 bits, and what the attention kernels need of each query: kernels/
// quantize.cuh says for whom.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/scale_block.cuh"
#include "tile/prepass/whole_dout.cuh"

/// Finds the mean, which smoothing subtracts from the scale block's queries.
__device__ __forceinline__ void find_query_mean(const Params& p, const Source& q,
                                                const ScaleBlock& block, s64 flat_block) {
  float sum[8] = {};
  walk_quads<false>(q, block.written, nullptr, nullptr, [&](float(&x)[4][8], int, int) {
#pragma unroll
    for (int c = 0; c < 8; ++c)
      sum[c] += (x[0][c] + x[1][c]) + (x[2][c] + x[3][c]);
  });
  add_up_channels(sum, shared.query_mean);
  if (threadIdx.x < HEAD_DIM) { // each divides the sum that it has written
    float& mean = shared.query_mean[threadIdx.x];
    mean = __fdiv_rn(mean, static_cast<float>(block.valid));
    p.q_mean[flat_block * HEAD_DIM + threadIdx.x] = mean;
  }
}
__device__ __forceinline__ void smooth_query(float (&x)[SHARE], const Source& q, int token) {
  if constexpr (SMOOTH_Q) {
    if (q.has(token)) {
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        x[i] -= shared.query_mean[channel_of(i)];
    }
  }
}

/// Subtracts it from a quad's tokens, as walk_quads() has them.
__device__ __forceinline__ void smooth_quad(float (&x)[4][8], const Source& q, int token) {
  if constexpr (SMOOTH_Q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool has = q.has(token + (i & 1) + (i >> 1) * 8);
#pragma unroll
      for (int c = 0; c < 8; ++c)
        x[i][c] -= has ? shared.query_mean[QuadPlace().channel + c] : 0;
    }
  }
}

/// Writes q8 and what a query's scores need. In the backward pass rows[ROW_SHIFT] holds lse at
/// first.
__device__ __forceinline__ void quantize_query_rows(const Params& p, const Source& q,
                                                    const ScaleBlock& block, s64 head_row,
                                                    ShareMaxima& maxima, float (&largest)[SHARE]) {
  float of_group = 0;
  if constexpr (INT8_S && BLOCK_SCALES) {
    walk_tokens(q, block.written, [&](int token, const Share& share) {
      float x[SHARE];
      share.unpack_to(x);
      smooth_query(x, q, token);
      rotate(x);
      of_group = max_nan(of_group, largest_magnitude(x));
    });
    of_group = block_max(of_group);
  }
  // A row's scale is the largest of its scores' and no less than zero: the sign is Q's.
  const float log2_scale = p.softmax_scale * LOG2_E, sign = p.softmax_scale < 0 ? -1.0f : 1.0f;
  walk_tokens(q, block.written, [&](int token, const Share& share) {
    if constexpr (QT8 && !SMOOTH_Q && !MAXIMA_APART)
      maxima.take(share);
    if constexpr (QUERY_ROWS)
      write_share(p.query_rows + (head_row + block.first) * HEAD_DIM, token, share);
    const float shift = SHIFTED ? dot(share, shared.mean) * p.softmax_scale : 0;
    float score = SINK_KEYS ? dot(share, shared.first_key) * log2_scale : 0;
    score += score - score; // an infinite one is seen as what it is, NaN
    float x[SHARE];
    share.unpack_to(x);
    float scale = 1;
    if constexpr (INT8_S) {
      smooth_query(x, q, token);
      if constexpr (QT8 && SMOOTH_Q)
        keep_maxima(largest, x);
      rotate(x);
      scale = write_row(p.q8 + (head_row + block.first) * HEAD_DIM, token, x,
                        BLOCK_SCALES ? of_group : token_max_nan(largest_magnitude(x)), sign);
    }
    if (lane_id() % LANES_A_TOKEN == 0) {
      const int slot = sigma_slot(token);
      row_value(ROW_SCALE, slot) = scale * fabsf(log2_scale);
      float& place = row_value(ROW_SHIFT, slot);
      if constexpr (BACKWARD) {
        // A query that sees no key has lse = -inf: +inf makes each of its probabilities 0.
        const float lse = place;
        const float shifted = BENDS_SCORES ? lse : lse - shift;
        place = lse == -INFINITY_F ? INFINITY_F : shifted * LOG2_E;
        if constexpr (BENDS_SCORES)
          row_value(ROW_SINK, slot) = shift;
        shared.first_p[slot] = exp2_approx(score - place);
      } else {
        place = shift;
        row_value(ROW_SINK, slot) = score;
        row_value(ROW_MINUS_DELTA, slot) = 0;
      }
    }
  });
}

/// A row's magnitude as a logarithm, linear between powers of two, with so many bits of fraction
/// that those of a scale block's rows can be summed; 0 for a row that has none.
constexpr int LOGARITHM_FRACTION = 13;
__device__ __forceinline__ int logarithm_of(float largest) {
  const bool counts = largest >= TINY && largest < INFINITY_F;
  return counts ? __float_as_int(largest) >> (23 - LOGARITHM_FRACTION) : 0;
}
/// The exponent by which a row of dO is divided: rows then have the magnitude of the scale block's
/// mean, and rows that differ less than half an octave from it are all divided by the same. So are
/// rows of zeros: P takes the exponent back, and theirs must not outweigh that of small rows.
__device__ __forceinline__ int dout_exponent(float largest, int mean) {
  constexpr int HALF = 1 << (LOGARITHM_FRACTION - 1);
  const int logarithm = logarithm_of(largest);
  const int steps = logarithm == 0 ? 0 : (logarithm - mean + HALF) >> LOGARITHM_FRACTION;
  return maximum(-100, minimum(100, steps + (mean >> LOGARITHM_FRACTION) - 127));
}

/// The mean logarithm of a scale block's rows that have one, else the head's, else that of 1; in
/// every thread. Sums of other scale blocks must not be lost beside P of rows of zeros.
__device__ __forceinline__ int mean_logarithm(const Params& p, const Source& dout,
                                              const Source& head, const ScaleBlock& block) {
  int sum = 0, count = 0;
  walk_tokens(dout, block.written, [&](int token, const Share& given) {
    float x[SHARE];
    exact_share(given, token).unpack_to(x);
    const int logarithm = logarithm_of(token_max_nan(largest_magnitude(x)));
    if (lane_id() % LANES_A_TOKEN == 0) {
      sum += logarithm;
      count += logarithm != 0;
    }
  });
  sum = __reduce_add_sync(~0u, sum);
  count = __reduce_add_sync(~0u, count);
  int* of_warp = reinterpret_cast<int*>(shared.of_warp);
  __syncthreads();
  if (lane_id() == 0) {
    of_warp[2 * warp_id()] = sum;
    of_warp[2 * warp_id() + 1] = count;
  }
  __syncthreads();
  sum = count = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    sum += of_warp[2 * warp];
    count += of_warp[2 * warp + 1];
  }
  __syncthreads();
  if (count != 0)
    return sum / count;
  const int of_head = logarithm_of(magnitude_of_head(p, head));
  return of_head == 0 ? 127 << LOGARITHM_FRACTION : of_head;
}
/// The rows have the magnitude of 1, but sums of them that of 2^e by P. If e is large they would
/// overflow in units of the least scale.
__device__ __forceinline__ float magnitude_of_douts(int mean) {
  constexpr int ROOM = 50;
  const int exponent = (mean >> LOGARITHM_FRACTION) - 127;
  return __int_as_float((127 + maximum(0, exponent - ROOM)) << 23);
}

/// dout_rows or, DP16, half_dout and dp_factor; delta and dS of key 0. rows[ROW_MINUS_DELTA] holds
/// dlse at first. Minus delta = rowsum(dO * O), plus the gradient that flows through lse, is where
/// dP starts from. `mean` is mean_logarithm().
__device__ __forceinline__ void quantize_dout_rows(const Params& p, const QueryHead& at,
                                                   const Source& dout, const Source& out,
                                                   const ScaleBlock& block, s64 head_row,
                                                   const KeyRange& keys, const Power& values,
                                                   int mean, float (&largest)[SHARE]) {
  constexpr bool OCTETS_OF_OUT = MAXIMA_APART && !DOT8; // registers are short
  walk_tokens(dout, block.written, [&](int token, const Share& given) {
    const Share& share = exact_share(given, token);
    write_exact_share(p, at, block.first + token, share);
    Share outs;
    if constexpr (!OCTETS_OF_OUT)
      outs.load(out, token);
    float x[SHARE];
    share.unpack_to(x);
    const float score = SINK_KEYS ? dot(share, shared.first_value) : 0;
    int exponent = 0;
    float factor = 1;
    if constexpr (SCALED_DOUT) {
      exponent = dout_exponent(token_max_nan(largest_magnitude(x)), mean);
      factor = __uint_as_float((127 - exponent) << 23);
    }
    float sum = 0;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      float o[8];
      unpack_octet(o, OCTETS_OF_OUT ? out.load(token, channel_of(8 * j)) : outs.chunks[j]);
#pragma unroll
      for (int c = 0; c < 8; ++c)
        sum += x[8 * j + c] * o[c];
    }
    sum = token_sum(sum);
    float of_centre = 0; // of dP, where V lacks its mean
    if constexpr (DP16) {
      of_centre = dot(share, value_centre());
      const Power power = power_below(DOUT_EXPONENT, token_max_nan(largest_magnitude(x)));
      float half[SHARE];
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        half[i] = x[i] * power.value;
      write_elements(half_dout(p) + (head_row + block.first) * HEAD_DIM, token, half);
      if (lane_id() % LANES_A_TOKEN == 0)
        dp_factors(p)[head_row + block.first + sigma_slot(token)] =
            power.inverse * factor * values.inverse;
    }
    if constexpr (SCALED_DOUT) {
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        x[i] *= factor;
      if constexpr (!DP16)
        write_elements(p.dout_rows + (head_row + block.first) * HEAD_DIM, token, x);
    } else if constexpr (DOUT_ROWS) {
      write_share(p.dout_rows + (head_row + block.first) * HEAD_DIM, token, share);
    }
    if constexpr (DOT8 && !MAXIMA_APART)
      keep_maxima(largest, x);
    const float length = DQ_SUM16 ? length_of_token(x) : 0;
    if (lane_id() % LANES_A_TOKEN == 0) {
      const int slot = sigma_slot(token);
      const float minus_delta = row_value(ROW_MINUS_DELTA, slot) - sum;
      row_value(ROW_MINUS_DELTA, slot) = (DP16 ? minus_delta + of_centre : minus_delta) * factor;
      row_value(ROW_SHIFT, slot) -= exponent;
      if constexpr (!BENDS_SCORES)
        row_value(ROW_SINK, slot) = SINK_KEYS ? shared.first_p[slot] * (score + minus_delta) : 0;
      shared.factor[slot] = factor;
      if constexpr (DQ_SUM16)
        p.dq_factor[head_row + block.first + token].bits =
            __float_as_uint(dq_factor(keys, length, minus_delta)) >> 16;
    }
  });
  if constexpr (DOT8 && MAXIMA_APART) {
    __syncthreads();
    find_maxima(dout, block.written, [&](float(&x)[8], int token, int) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        x[c] *= shared.factor[sigma_slot(token)];
    });
  }
}

/// Writes a copy over tokens of Q or dO, and into `sums` the tokens' sum by the weights of their
/// slots.
template <bool WRITE, typename Weights, typename Scale>
__device__ __forceinline__ void turn_queries(const Source& x, const ScaleBlock& block,
                                             const float* inverses, s8* copy, float* sums,
                                             const Weights& weights, const Scale& scale) {
  if constexpr (WRITE || SINK_KEYS) {
    float sum[8] = {};
    walk_quads<WRITE>(x, block.written, inverses, copy, [&](float(&x)[4][8], int token, int slot) {
      if constexpr (SINK_KEYS) {
        const float4 w = weights(slot);
#pragma unroll
        for (int c = 0; c < 8; ++c)
          sum[c] += x[0][c] * w.x + x[1][c] * w.y + x[2][c] * w.z + x[3][c] * w.w;
      }
      scale(x, token, slot);
    });
    if constexpr (SINK_KEYS)
      add_up_channels(sum, sums);
  }
}

/// A sample of a head's dO.
__device__ __forceinline__ Source douts_of(const Params& p, const QueryHead& at) {
  return sample_of(p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                       at.head * p.dout_stride_h,
                   p.dout_stride_s, at.seq_q(), p.value_channels);
}

__device__ __forceinline__ void backward_of_queries(const Params& p, const QueryHead& at,
                                                    const Source& q, const ScaleBlock& block,
                                                    s64 flat_block) {
  const s64 head_row = at.padded_query();
  const s64 copy = (head_row + block.first) * HEAD_DIM;
  float* sums = p.sink_partial + flat_block * (2 * HEAD_DIM); // of dK, then of dV
  const Source dout = {p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                           at.head * p.dout_stride_h + block.first * p.dout_stride_s,
                       p.dout_stride_s, 0, block.valid, p.value_channels};
  const Source out = {p.out + at.first_query(p.out_stride_b, p.out_stride_s) +
                          at.head * p.out_stride_h + block.first * p.out_stride_s,
                      p.out_stride_s, 0, block.valid, p.value_channels};

  float largest[SHARE] = {};
  const KeyRange keys = find_key_range(p, at);
  const int mean = SCALED_DOUT ? mean_logarithm(p, dout, douts_of(p, at), block) : 0;
  const Power values = find_values(p, at);
  quantize_dout_rows(p, at, dout, out, block, head_row, keys, values, mean, largest);
  if constexpr (DOT8)
    find_channel_scales(largest, no_sample(), SCALED_DOUT ? magnitude_of_douts(mean) : 1.0f,
                        p.dot8_scale, flat_block, shared.inverse_dout);
  else
    __syncthreads();
  turn_queries<DOT8>(
      dout, block, shared.inverse_dout, p.dot8 + copy, sums + HEAD_DIM,
      [](int slot) { return four_of(&shared.first_p[slot]); },
      [](float(&x)[4][8], int, int slot) {
        take_exact_shares(x, slot);
        if constexpr (SCALED_DOUT) {
          const float4 factor = four_of(&shared.factor[slot]);
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            x[0][c] *= factor.x;
            x[1][c] *= factor.y;
            x[2][c] *= factor.z;
            x[3][c] *= factor.w;
          }
        }
      });
  turn_queries<QT8>(
      q, block, shared.inverse, p.qt8 + copy, sums,
      [](int slot) { return four_of(&row_value(ROW_SINK, slot)); },
      [&](float(&x)[4][8], int token, int) { smooth_quad(x, q, token); });
}

__device__ __forceinline__ void quantize_queries(const Params& p, const QueryHead& at, int index) {
  const ScaleBlock block = scale_block_of<QUERY_TOKENS>(index, at.seq_q(), at.padded_q());
  const Source q = {p.q + at.first_query(p.q_stride_b, p.q_stride_s) + at.head * p.q_stride_h +
                        block.first * p.q_stride_s,
                    p.q_stride_s, 0, block.valid, p.channels};
  const Element* first_key =
      p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h;
  const Element* first_value =
      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h;

  const s64 flat_block = at.first_query_scale_block<QUERY_TOKENS>() + index;
  if constexpr (SHIFTED)
    find_mean(p, at);
  if constexpr (SMOOTH_Q)
    find_query_mean(p, q, block, flat_block);
  if (SINK_KEYS && threadIdx.x < HEAD_DIM) {
    const int channel = threadIdx.x; // the thread that has found the channel's mean
    const bool of_key = is_channel(channel, p.channels) && !at.has_no_keys();
    shared.first_key[channel] = unpack<Element>(of_key ? first_key[channel].bits : 0).x -
                                (SHIFTED ? shared.mean[channel] : 0);
    const bool of_value = is_channel(channel, p.value_channels) && !at.has_no_keys();
    if constexpr (BACKWARD)
      shared.first_value[channel] = unpack<Element>(of_value ? first_value[channel].bits : 0).x;
  }
  if constexpr (BACKWARD) {
    for (int token = threadIdx.x; token < block.written; token += THREADS) {
      const bool valid = token < block.valid;
      const s64 row = at.first_row() + block.first + token;
      const int slot = sigma_slot(token);
      // If the keys are a part of all, lse may be that of all: a query that sees none of these has
      // one too.
      const bool sees = valid && block.first + token + at.causal_offset() >= 0;
      row_value(ROW_SHIFT, slot) = sees ? p.lse[row] : -INFINITY_F;
      row_value(ROW_MINUS_DELTA, slot) = valid && p.dlse != nullptr ? p.dlse[row] : 0;
    }
    find_exact_shares(p, at, block);
  }
  __syncthreads();

  ShareMaxima maxima;
  float largest[SHARE] = {};
  quantize_query_rows(p, q, block, at.padded_query(), maxima, largest);
  if constexpr (BACKWARD) {
    if constexpr (QT8) {
      if constexpr (MAXIMA_APART)
        find_maxima(q, block.written, [](float(&)[8], int, int) {});
      else if constexpr (!SMOOTH_Q)
        maxima.unpack_to(largest);
      find_channel_scales(
          largest,
          sample_of(p.q + at.first_query(p.q_stride_b, p.q_stride_s) + at.head * p.q_stride_h,
                    p.q_stride_s, at.seq_q(), p.channels),
          1.0f, p.qt8_scale, flat_block, shared.inverse);
    }
    backward_of_queries(p, at, q, block, flat_block);
  }

  if constexpr (DQ_SUM) {
    constexpr int FLOATS = DQ_SUM16 ? HEAD_DIM / 2 : HEAD_DIM;
    float* sums = p.dq_sum + (at.padded_query() + block.first) * FLOATS;
    for (int i = threadIdx.x * 4; i < block.written * FLOATS; i += THREADS * 4)
      *reinterpret_cast<float4*>(sums + i) = {0, 0, 0, 0};
  }
  if constexpr (DQ_TURNS) { // (tile/dq/dq_order.cuh)
    constexpr int TOKENS_A_TURN = 128;
    u32* turns = p.dq_turns + 1 + (at.padded_query() + block.first) / TOKENS_A_TURN;
    if (threadIdx.x < block.written / TOKENS_A_TURN)
      turns[threadIdx.x] = 0;
  }
  __syncthreads();
  float* rows = p.q_rows + (at.padded_query() + block.first) * ROW_VECTORS;
  for (int i = threadIdx.x * 4; i < block.written * ROW_VECTORS; i += THREADS * 4)
    *reinterpret_cast<float4*>(rows + i) = four_of(&shared.rows[i]);
}
