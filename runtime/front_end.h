//===- front_end.h - Norm and RoPE of queries and keys, gates of outputs --===//
//
// What a layer does between its projections and attention: RMSNorm of each head (QK-norm) and RoPE,
// of q and k in one launch, in FP32, rounded once. And what it may do behind attention: out *
// sigmoid(gate), as exactly. B sequences, H heads, T tokens (of queries or of
// keys), D channels.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"

namespace sagebwd {

/// Cosines and sines, FP32 of (B, T, R/2), channels side by side. Strides are in floats, multiples
/// of 4 (interleaved: of 2), and may be 0. Null addresses: no RoPE.
struct RopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t stride_b = 0, stride_s = 0;
};

/// The queries, or the keys. All but tensors is contiguous.
struct FrontSide {
  Tensor x, y;                 ///< as q of ForwardArgs; y is written
  bool normed = false;         ///< by the root of the mean square of a head's channels
  const float* gain = nullptr; ///< (D), or (H, D); null: none
  bool gain_per_head = false;
  /// (B, T), or (B, H, T): what takes the place of 1 / sqrt(mean square + eps). Null: nothing does.
  const float* inv_rms = nullptr;
  bool inv_rms_per_head = false;
  RopeTable rope;
};

struct FrontCall {
  Problem problem;
  FrontSide q, k;
  float norm_eps = 1e-6f;
  /// Channels [begin, begin + R) are rotated in pairs (i, i + R/2), or if interleaved (2i, 2i + 1).
  /// The first is a multiple of 4, R of 8, or if interleaved of 4.
  int rope_begin = 0, rope_channels = 0;
  bool rope_interleaved = false;
  void* stream = nullptr; ///< a CUstream
};

struct FrontSideGradients {
  Tensor dx;
  float* dgain = nullptr;      ///< like the gain; null: not wanted
  float* gain_parts = nullptr; ///< memory of front_part_floats() for it, which the call writes
  float* dinv_rms = nullptr;   ///< (B, H, T), also if heads share 1/rms; null: not wanted
};
struct FrontGradientsCall {
  FrontCall of; ///< in which y is the gradient of y, and is read
  FrontSideGradients q, k;
};

/// The floats of gain_parts.
int64_t front_part_floats(Tokens, const ResolvedSpec&, const Problem&);

/// Both take an operation of any spec with this head_dim and dtype whose sequences are not packed.
/// They raise SpecError if the arguments are wrong, and what Attention::forward() raises.
void front(const FrontCall&, const Attention&);
/// Gives the same bits in every run.
void front_gradients(const FrontGradientsCall&, const Attention&);

struct GateCall {
  Problem problem;
  Tensor out, gate, gated; ///< as out of ForwardArgs; gated is written
  void* stream = nullptr;  ///< a CUstream
};
struct GateGradientsCall {
  GateCall of;        ///< in which gated is the gradient of gated, and is read
  Tensor dout, dgate; ///< written: the gradients of out and gate
};

/// gated = out * sigmoid(gate). Operations and errors are those of front().
void gate(const GateCall&, const Attention&);
void gate_gradients(const GateGradientsCall&, const Attention&);

} // namespace sagebwd
