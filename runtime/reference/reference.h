//===- reference.h - Attention on the CPU: exact, and as the kernels do it -===//
//
// Two computations of the same operation. Exact: FP64 throughout. Emulated: every quantiser bit
// for bit as in the kernels (psi of templates/tile/quantizer.cuh), products of the integers exact,
// everything else FP32. Every intermediate can be had. Multi-threaded over heads.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/reference/visible.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd::reference {

/// Which of the seven products are INT8 in the emulation; the kernels build two of these plans.
struct ProductPlan {
  bool s = true;   ///< S = tau Q K^T, in forward and backward (products 1 and 3)
  bool pv = true;  ///< O = P V
  bool dv = true;  ///< dV = P^T dO
  bool dp = false; ///< dP = dO V^T
  bool dq = true;  ///< dQ = tau dS K
  bool dk = true;  ///< dK = tau dS^T Q
};
ProductPlan plan_of(Precision);

/// Contiguous (B, H, M, D) and (B, Hk, N, D) inputs, already rounded to the spec's dtype.
struct Inputs {
  Problem problem;
  int head_dim = 0;
  std::vector<float> q, k, v, dout;   ///< dout may be empty: forward only
  std::vector<float> dlse;            ///< (B, H, M), or empty
  std::optional<float> softmax_scale; ///< none: 1/sqrt(head_dim)
  std::vector<float> k_mean; ///< (B, Hk, D), what smooth_k takes off; empty: the keys' mean
};

/// What a computation gives; matrices of (B, H, M, N) only where asked for.
template <typename T> struct Outputs {
  std::vector<T> o, lse, delta; ///< (B, H, M, D), (B, H, M), (B, H, M)
  std::vector<T> dq, dk, dv;    ///< like q, k, v
  std::vector<T> p, dp, ds;     ///< (B, H, M, N); ds without the softmax scale
};

/// FP64 throughout. `keep_matrices` fills p, dp and ds.
Outputs<double> exact(const Inputs&, const Mask&, bool keep_matrices = false);

/// As the kernels compute it. Where `given_o` and `given_lse` (raw domain) are set, the backward
/// starts from them instead of from the emulated forward; both already in their output types.
/// `round_outputs` rounds o, dq, dk, dv to the spec's dtype, as the kernels do; the backward then
/// sees the rounded o.
Outputs<float> emulate(const Inputs&, const AttentionSpec& resolved, const ProductPlan&,
                       bool keep_matrices = false, bool round_outputs = false,
                       const std::vector<float>* given_o = nullptr,
                       const std::vector<float>* given_lse = nullptr);

/// cos(x, ref) and ||x - ref|| / ||ref||, in FP64; NaN where either holds one.
struct ErrorFigures {
  double cosine = 0, rel_l2 = 0;
};
template <typename T>
ErrorFigures compare(const std::vector<T>& x, const std::vector<double>& reference);

/// Round to nearest even, as float values.
float round_to(DType, float);
uint16_t encode(DType, float); ///< the 16 bits
float decode(DType, uint16_t);

/// q, k ~ N(0, sigma^2), v, dout ~ N(0, 1), rounded to `dtype`; the same seed gives the same
/// numbers on every machine (Philox and Box-Muller in double).
Inputs random_inputs(const Problem&, int head_dim, DType, double sigma, uint64_t seed);

/// Cosine and relative L2 of delta, P, dP, dS, O, dQ, dK, dV against exact(), as one table.
struct TraceRow {
  std::string tensor;
  ErrorFigures figures;
};
std::vector<TraceRow> trace(const Inputs&, const AttentionSpec&, const ProductPlan&);
/// Raises SpecError where trace() would take hours, or it and its inputs more memory than there is:
/// the system would end the process without a word.
void check_size(const Problem&, int head_dim);
/// The same of inputs alone, for their memory.
void check_size_of_inputs(const Problem&, int head_dim);

} // namespace sagebwd::reference
