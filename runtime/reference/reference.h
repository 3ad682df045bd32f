//===- reference.h - Attention on the CPU, exact and emulated -------------===//
//
// This header declares two computations of the same operation. The exact one is FP64 throughout.
// The emulation has every quantiser bit for bit as in the kernels (psi of
// templates/tile/math/quantizer.cuh), exact products of integers, and FP32 for everything else.
// Both can return every intermediate matrix, and use one thread per head.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/expression.h"
#include "generator/plan.h"
#include "runtime/reference/visible.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd::reference {

/// Which of the seven products are INT8 in the emulation (S counts twice). The kernels support
/// those of plan_of().
struct ProductPlan {
  bool s = true;   ///< S = tau Q K^T, in forward and backward (products 1 and 3)
  bool pv = true;  ///< O = P V
  bool dv = true;  ///< dV = P^T dO
  bool dp = false; ///< dP = dO V^T
  bool dq = true;  ///< dQ = tau dS K
  bool dk = true;  ///< dK = tau dS^T Q
};
ProductPlan plan_of(Precision);
/// Their names, in the order of the forward and backward pass.
inline constexpr std::pair<const char*, bool ProductPlan::*> kProducts[] = {
    {"s", &ProductPlan::s},   {"pv", &ProductPlan::pv}, {"dv", &ProductPlan::dv},
    {"dp", &ProductPlan::dp}, {"dq", &ProductPlan::dq}, {"dk", &ProductPlan::dk}};
/// The names of the INT8 products.
std::vector<std::string> names_of(const ProductPlan&);

/// What an expression indexes: rows of int32, or of float32's bits, one behind the other.
struct TableOfNumbers {
  int64_t rows, columns;
  std::vector<int32_t> numbers;
};
TableOfNumbers table_of_floats(int64_t rows, int64_t columns, const std::vector<float>&);

/// What a function makes of a scaled score s, in natural units, and its derivative there.
struct Scored {
  double value, slope;
};
using ScoreFunction = std::function<Scored(const Point&, double s)>;

/// Contiguous (B, H, M, D) and (B, Hk, N, D) inputs, rounded to the spec's dtype by the caller.
struct Inputs {
  Problem problem;
  int head_dim = 0;
  std::vector<float> q, k, v, dout;   ///< dout may be empty: only the forward
  std::vector<float> dlse;            ///< the gradient of lse, (B, H, M), or empty
  std::optional<float> softmax_scale; ///< empty: 1 / sqrt(head_dim)
  /// (B, Hk, D): the vector that smooth_k subtracts from the keys; empty: their mean.
  std::vector<float> k_mean;
  /// (B, H, blocks of queries, blocks of keys), a byte that is not 0 for each block of keys that is
  /// listed; empty unless the spec has lists that follow from nothing else.
  std::vector<uint8_t> listed;
  /// (B or 1, Hk or 1, N, spec.intervals): the numbers of each key that say which queries do not
  /// see it (runtime/attention.h); empty unless the spec has intervals.
  std::vector<int32_t> intervals;
  bool sequences_share_intervals = false, heads_share_intervals = false;
  /// (B, H, M, N): a byte that is not 0 where a query sees a key, as seen_by_mask() gives it; empty
  /// unless the spec has a mask.
  std::vector<uint8_t> seen;
  ScoreFunction score; ///< what score_by_spec() gives; none unless the spec has a score function
  std::vector<TableOfNumbers> tables; ///< what mask and score of the spec index, in order
  /// (B, H, M): what Shares::alpha has of each query, or with of_rest what that says; empty unless
  /// the spec has linear attention.
  std::vector<float> shares;
  bool of_rest = false;
};

/// Inputs::score of these tables, by the expression of the spec.
ScoreFunction score_by_spec(const AttentionSpec&, const std::vector<TableOfNumbers>&);
/// Inputs::seen of these tables, by the expression of the spec's mask. Raises SpecError if it needs
/// more memory than the machine has.
std::vector<uint8_t> seen_by_mask(const AttentionSpec&, const Problem&,
                                  const std::vector<TableOfNumbers>&);

/// The results of a computation. The (B, H, M, N) matrices are empty unless the caller wanted them.
template <typename T> struct Outputs {
  std::vector<T> o, lse, delta; ///< (B, H, M, D), (B, H, M), (B, H, M)
  std::vector<T> dq, dk, dv;    ///< the shapes of q, k and v
  std::vector<T> p, dp, ds;     ///< (B, H, M, N); ds is without the softmax scale
  std::vector<T> dshares;       ///< (B, H, M), where the inputs have shares
  /// (H): the largest score of each query head over all sequences; -inf where no query sees a key,
  /// and NaN where an lse is NaN. Empty of a GPU's, unless the spec has max_logits.
  std::vector<T> max_logits;
};

/// Computes in FP64. `keep_matrices` fills p, dp and ds.
Outputs<double> exact(const Inputs&, const Mask&, bool keep_matrices = false);

/// Computes as the kernels do. If `given_o` and `given_lse` (raw domain) are set, the backward uses
/// them instead of the emulated forward; both must be rounded to their output dtypes.
/// `round_outputs` rounds o, dq, dk and dv to the spec's dtype, as the kernels do; the backward
/// then uses the rounded o.
Outputs<float> emulate(const Inputs&, const AttentionSpec& resolved, const ProductPlan&,
                       bool keep_matrices = false, bool round_outputs = false,
                       const std::vector<float>* given_o = nullptr,
                       const std::vector<float>* given_lse = nullptr);

/// The figures of x beside ref in FP64; NaN if x or ref has a NaN. Of zeros without an error they
/// are 1 and 0; with one they are 0 and infinite, and so is the bias.
struct ErrorFigures {
  double cosine = 0;
  double rel_l2 = 0; ///< ||x - ref|| / ||ref||
  double bias = 0;   ///< sum(x - ref) / sum|ref|: errors of one sign, which sums keep
};
template <typename T>
ErrorFigures compare(const std::vector<T>& x, const std::vector<double>& reference);

/// Rounds to nearest even; the result is a float.
float round_to(DType, float);
uint16_t encode(DType, float); ///< the 16 bits of the rounded value
float decode(DType, uint16_t);

/// Inputs with q, k ~ N(0, sigma^2) and v, dout ~ N(0, 1), rounded to `dtype`. A seed gives the
/// same numbers on every machine (Philox and Box-Muller in FP64).
Inputs random_inputs(const Problem&, int head_dim, DType, double sigma, uint64_t seed);

/// Inputs::listed for a spec with lists, in which each block is listed with this probability. A
/// seed gives the same lists on every machine.
std::vector<uint8_t> random_lists(const AttentionSpec&, const Problem&, double density,
                                  uint64_t seed);

/// The cosine and relative L2 error of delta, P, dP, dS, O, dQ, dK and dV against exact(), as a
/// table.
struct TraceRow {
  std::string tensor;
  ErrorFigures figures;
};
std::vector<TraceRow> trace(const Inputs&, const AttentionSpec&, const ProductPlan&);
/// Raises SpecError if trace() would take hours, or if it and its inputs need more memory than the
/// machine has: the system would then end the process without a message.
void check_size(const Problem&, int head_dim);
/// Checks the memory of the inputs alone.
void check_size_of_inputs(const Problem&, int head_dim);
/// Checks the memory of what seen_by_mask() gives, a byte for each score.
void check_size_of_mask(const Problem&);

} // namespace sagebwd::reference
