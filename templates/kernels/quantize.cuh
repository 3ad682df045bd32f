//===- kernels/quantize.cuh - INT8 copies of Q, K, V or dO -----------------===//
//
// One block takes GROUP tokens of one head, reads them once and writes what its role asks for:
//   WRITE_ROWS        rows8[token][channel], for S = Q K^T: smoothed (K), rotated, one scale a
//                     token (`row`) or a block (`block`)
//   WRITE_TRANSPOSED  transposed8[tile of 64 tokens][channel][slot], for products that sum over
//                     tokens: smoothed (K), never rotated, slots in the order sigma
//                     (tile/permutation.cuh), one scale a channel or a block
//   role q            q . mean(K), to move lse between the raw and the smoothed domain
//   role dout         minus_delta = dlse - rowsum(dO * O)
// Tokens past the end are written as zeros, so that the products need no bounds.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/permutation.cuh"
#include "tile/place.cuh"
#include "tile/quantizer.cuh"
#include "tile/rotation.cuh"

constexpr int OCTETS = HEAD_DIM / 8; ///< threads that share a token, 8 channels each
constexpr int QUADS = GROUP / 4;     ///< one per thread row: 4 tokens whose bytes form one word
constexpr bool OF_QUERIES = ROLE == Role::q || ROLE == Role::dout;
static_assert(THREADS == OCTETS * QUADS, "one thread holds 4 tokens x 8 channels");

/// Slots of this thread's 4 tokens are consecutive: the first one's place in a row vector.
__device__ __forceinline__ s64 row_vector(s64 head_row, int first_token, int quad, int vectors,
                                          int vector) {
  const s64 tile = (head_row + first_token) / TOKENS_PER_TILE + quad / (TOKENS_PER_TILE / 4);
  return (tile * vectors + vector) * TOKENS_PER_TILE + quad % (TOKENS_PER_TILE / 4) * 4;
}

__device__ __forceinline__ void load_octet(float (&x)[8], const Element* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// Over the OCTETS lanes that share a token.
__device__ __forceinline__ float token_sum(float x) {
#pragma unroll
  for (int stride = 1; stride < OCTETS; stride *= 2)
    x += __shfl_xor_sync(~0u, x, stride);
  return x;
}
__device__ __forceinline__ float token_max(float x) {
#pragma unroll
  for (int stride = 1; stride < OCTETS; stride *= 2)
    x = max_nan(x, __shfl_xor_sync(~0u, x, stride));
  return x;
}
/// Over the whole block; every thread gets it.
__device__ __forceinline__ float block_max(float x) {
  __shared__ float of_warp[THREADS / 32];
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2)
    x = max_nan(x, __shfl_xor_sync(~0u, x, stride));
  __syncthreads();
  if (lane_id() == 0)
    of_warp[warp_id()] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp)
    x = max_nan(x, of_warp[warp]);
  return x;
}

__device__ __forceinline__ void write_rows(const Params& p, float (&x)[4][8], s64 head_row,
                                           int first_token, int quad, int octet) {
  float largest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (ROTATE)
      hadamard(x[i]);
    largest[i] = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      largest[i] = max_magnitude(largest[i], x[i][c]);
    largest[i] = token_max(largest[i]);
  }
  if constexpr (BLOCK_SCALES) {
    const float all =
        block_max(max_nan(max_nan(largest[0], largest[1]), max_nan(largest[2], largest[3])));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      largest[i] = all;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const s64 token = head_row + first_token + token_of_quad(quad, i);
    const Scale scale = exact_scale(largest[i]);
    const float n = scale.inverse;
    uint2 bytes;
    bytes.x = pack_s8(x[i][0] * n, x[i][1] * n, x[i][2] * n, x[i][3] * n);
    bytes.y = pack_s8(x[i][4] * n, x[i][5] * n, x[i][6] * n, x[i][7] * n);
    *reinterpret_cast<uint2*>(p.rows8 + token * HEAD_DIM + octet * 8) = bytes;
    if (octet == 0) {
      // A token of zeros gets a positive scale, so that a masked score of -inf stays -inf.
      const float value = scale.value == 0 ? 1.0f : scale.value;
      if constexpr (ROLE == Role::q)
        p.q_rows[row_vector(head_row, first_token, quad, ROW_VECTORS, ROW_SCALE) + i] =
            value * (p.softmax_scale * LOG2_E);
      else // 22 bits, see MAGIC
        p.k8_scale[row_vector(head_row, first_token, quad, 1, 0) + i] =
            __uint_as_float(__float_as_uint(value) & ~3u);
    }
  }
}

__device__ __forceinline__ void write_transposed(const Params& p, const float (&x)[4][8],
                                                 s64 head_row, int first_token, int quad,
                                                 int octet) {
  // Bytes of a quad's tokens at [channel][quad]; a channel's quads are permuted by its octet
  // against bank conflicts.
  __shared__ u32 words[HEAD_DIM][QUADS];
  __shared__ float largest_of[QUADS][HEAD_DIM];
  __shared__ Scale scales[HEAD_DIM];

  float largest[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    largest[c] = max_magnitude(
        max_magnitude(max_magnitude(max_magnitude(0, x[0][c]), x[1][c]), x[2][c]), x[3][c]);
  if constexpr (BLOCK_SCALES) {
    float all = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      all = max_nan(all, largest[c]);
    const Scale scale = exact_scale(block_max(all));
    if (threadIdx.x < HEAD_DIM)
      scales[threadIdx.x] = scale;
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c)
      largest_of[quad][octet * 8 + c] = largest[c];
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
      float all = 0;
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        all = max_nan(all, largest_of[q][threadIdx.x]);
      scales[threadIdx.x] = exact_scale(all);
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    const s64 group = (head_row + first_token) / GROUP;
    const s64 vector = !OF_QUERIES
                           ? group
                           : group * CHANNEL_VECTORS + (ROLE == Role::q ? CHANNEL_Q : CHANNEL_DOUT);
    p.transposed8_scale[vector * HEAD_DIM + sigma_slot(threadIdx.x)] = scales[threadIdx.x].value;
  }

#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int channel = octet * 8 + c;
    const float n = scales[channel].inverse;
    words[channel][quad ^ (octet % QUADS)] =
        pack_s8(x[0][c] * n, x[1][c] * n, x[2][c] * n, x[3][c] * n);
  }
  __syncthreads();
  // 64 bytes a channel and tile, 16 bytes a thread and turn.
  constexpr int VECTORS = HEAD_DIM * QUADS / 4;
#pragma unroll
  for (int i = 0; i < VECTORS; i += THREADS) {
    const int index = i + threadIdx.x;
    const int within = index % 4, channel = index / 4 % HEAD_DIM, tile = index / (4 * HEAD_DIM);
    const int first_quad = tile * (TOKENS_PER_TILE / 4) + within * 4, mix = channel / 8 % QUADS;
    uint4 vector;
    vector.x = words[channel][(first_quad + 0) ^ mix];
    vector.y = words[channel][(first_quad + 1) ^ mix];
    vector.z = words[channel][(first_quad + 2) ^ mix];
    vector.w = words[channel][(first_quad + 3) ^ mix];
    *reinterpret_cast<uint4*>(p.transposed8 + (head_row + first_token) * HEAD_DIM + index * 16) =
        vector;
  }
}

/// Minus delta = rowsum(dO * O), plus the gradient that flows through lse: where dP starts from.
__device__ __forceinline__ void write_delta(const Params& p, const float (&x)[4][8],
                                            const QueryHead& at, int first_token, int quad,
                                            int octet) {
  const Element* out =
      p.out + at.first_query(p.out_stride_b) + at.head * p.out_stride_h + octet * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first_token + token_of_quad(quad, i);
    float o[8] = {};
    if (token < at.seq_q())
      load_octet(o, out + token * p.out_stride_s);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      sum += x[i][c] * o[c];
    sum = token_sum(sum);
    if (octet == 0) {
      if (p.dlse != nullptr && token < at.seq_q())
        sum -= p.dlse[at.first_row() + token];
      p.q_rows[row_vector(at.padded_query(), first_token, quad, ROW_VECTORS, ROW_MINUS_DELTA) + i] =
          -sum;
    }
  }
}

/// softmax_scale * (q . mean(K)), by which smoothing shifts a query's scores. The forward pass
/// keeps it, to give lse back in the raw domain; the backward pass takes it off a raw lse.
__device__ __forceinline__ void write_lse_shift(const Params& p, const float (&x)[4][8],
                                                const QueryHead& at, int first_token, int quad,
                                                int octet) {
  const float* mean = p.k_mean + at.flat_kv_head * HEAD_DIM + octet * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first_token + token_of_quad(quad, i);
    float shift = 0;
    if constexpr (USES_MEAN) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        shift += x[i][c] * mean[c];
      shift = token_sum(shift) * p.softmax_scale;
    }
    if (octet == 0) {
      const s64 head_row = at.padded_query();
      float& place = p.q_rows[row_vector(head_row, first_token, quad, ROW_VECTORS, ROW_SHIFT) + i];
      if constexpr (!WRITE_ROWS) // 16-bit scores have no scales of their own
        p.q_rows[row_vector(head_row, first_token, quad, ROW_VECTORS, ROW_SCALE) + i] =
            p.softmax_scale * LOG2_E;
      if constexpr (BACKWARD) {
        // A query that sees no key has lse = -inf: +inf makes each of its probabilities 0.
        const float lse = token < at.seq_q() ? p.lse[at.first_row() + token] : -INFINITY_F;
        place = lse == -INFINITY_F ? INFINITY_F : (lse - shift) * LOG2_E;
      } else {
        place = shift;
      }
    }
  }
}

__device__ __forceinline__ void subtract_mean(const Params& p, float (&x)[4][8], const KeyHead& at,
                                              int first_token, int quad) {
  const float* mean = p.k_mean + at.flat_kv_head * HEAD_DIM + threadIdx.x % OCTETS * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first_token + token_of_quad(quad, i) < at.seq_kv()) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        x[i][c] -= mean[c];
    }
  }
}

/// Block (group, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  const int octet = threadIdx.x % OCTETS, quad = threadIdx.x / OCTETS;
  const int first_token = blockIdx.x * GROUP;
  const QueryHead queries = query_head(p); // one of the two, by the role
  const KeyHead keys = key_head(p);
  const int tokens = OF_QUERIES ? queries.seq_q() : keys.seq_kv();
  if (!queries.has(first_token, tokens))
    return;
  const s64 head_row = OF_QUERIES ? queries.padded_query() : keys.padded_key();
  const Element* source =
      p.x +
      (OF_QUERIES ? queries.first_query(p.x_stride_b) + queries.head * p.x_stride_h
                  : keys.first_key(p.x_stride_b) + keys.kv_head * p.x_stride_h) +
      octet * 8;

  float x[4][8] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first_token + token_of_quad(quad, i);
    if (token < tokens)
      load_octet(x[i], source + token * p.x_stride_s);
  }

  if constexpr (ROLE == Role::dout)
    write_delta(p, x, queries, first_token, quad, octet);

  if constexpr (ROLE == Role::q && (BACKWARD || USES_MEAN))
    write_lse_shift(p, x, queries, first_token, quad, octet);

  if constexpr (ROLE == Role::k && USES_MEAN)
    subtract_mean(p, x, keys, first_token, quad);

  if constexpr (WRITE_TRANSPOSED)
    write_transposed(p, x, head_row, first_token, quad, octet);
  if constexpr (WRITE_ROWS)
    write_rows(p, x, head_row, first_token, quad, octet);
}
