//===- front.h - Norm and RoPE of queries and keys on the CPU ---------------===//
//
// What runtime/front_end.h has kernels for, in FP64: RMSNorm of each head (arXiv 1910.07467), its
// gain, and RoPE (arXiv 2104.09864).
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::reference {

/// The queries, or the keys. All is contiguous: B sequences, H heads, T tokens, D channels.
struct FrontInputs {
  int64_t batch, heads, tokens;
  int head_dim;
  std::vector<float> x = {};  ///< (B, H, T, D)
  std::vector<float> dy = {}; ///< like x: the gradient of the result
  bool normed = false;        ///< by the root of the mean square of a head's channels
  double eps = 0;
  std::vector<float> gain = {};    ///< (D) or (H, D); empty: none
  std::vector<float> inv_rms = {}; ///< (B, T) or (B, H, T): given 1/rms; empty: none
  /// Cosines and sines, (B, T, R/2), of pairs (i, i + R/2) of channels, or (2i, 2i + 1), counted
  /// from rope_begin; empty: no RoPE.
  std::vector<float> cos = {}, sin = {};
  int rope_begin = 0;
  bool interleaved = false;
};

struct FrontOutputs {
  std::vector<double> y, dx;    ///< (B, H, T, D)
  std::vector<double> dgain;    ///< like the gain
  std::vector<double> dinv_rms; ///< (B, H, T), also if heads share it; empty without a given 1/rms
};

FrontOutputs exact_front(const FrontInputs&);

} // namespace sagebwd::reference
