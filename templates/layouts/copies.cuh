//===- layouts/copies.cuh - How copies and scales lie in memory -----------===//
#pragma once

/// Tokens in one tile of a transposed copy: channels x 64 tokens, contiguous in memory.
constexpr int TOKENS_PER_TILE = 64;

/// q_rows[head][tile of 64 queries][row vector][slot]: what the attention kernels read per query.
constexpr int ROW_SCALE = 0; ///< value of one level of a score, softmax scale and log2(e) included
/// Forward: the score shift of K-smoothing. Backward: lse in log2 units, less the exponent e by
/// which the query's row of dout_rows was divided.
constexpr int ROW_SHIFT = 1;
constexpr int ROW_MINUS_DELTA = 2; ///< backward: where dP starts from, times 2^-e
/// This is the attention sink's, key 0 where it is computed separately. Forward: its score in log2
/// units. Backward: its dS. With BENDS_SCORES, where there is none, the backward has the score
/// shift of K-smoothing here, and ROW_SHIFT lacks it.
constexpr int ROW_SINK = 3;
constexpr int ROW_VECTORS = 4;
/// Scales of a transposed copy lie as [head][scale block][channel vector][slot]. A scale block
/// whose values are all zero has a scale too, so that sums can be rescaled from any block to any
/// other (tile/prepass/channel_scale.cuh).
constexpr int CHANNEL_SCALE = 0;   ///< value of one level
constexpr int CHANNEL_INVERSE = 1; ///< levels per unit
constexpr int CHANNEL_VECTORS = 2;
constexpr int CHANNEL_MEAN = 2; ///< of smoothed values one vector more: their head's mean

/// k8_scale[head][tile of 128 keys][lane of a quad][32 keys]: one scale for the 8 keys of 32 that
/// one lane of a quad holds as columns of scores, 2t, 2t+1, 2t+8, 2t+9, .. 2t+25 of lane t; keys g
/// and g + 8 are of one lane, so that as rows they share it too.
constexpr int KEYS_A_SCALE = 8;
constexpr int KEY_SCALES_BYTES = 128 / KEYS_A_SCALE * 4; ///< those of 128 keys

/// key_order[place][word]: a block of keys, its head, its sequence, and nothing.
constexpr int KEY_ORDER_WORDS = 4;
