//===- bench.h - What a tuner's worker does with a candidate ----------------===//
//
// Two implementations: kernels on a GPU (gpu_bench.h), and the stand-ins of the tests.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"

#include <string>
#include <vector>

namespace sagebwd {

/// A compiled kernel as the worker is handed it: it compiles nothing and reads no cache.
struct BenchKernel {
  KernelSpec spec;
  std::string name;  ///< of the entry point
  std::string cubin; ///< bytes
  int threads = 0;
  int shared_bytes = 0; ///< dynamic
  /// Between processes, where the bytes lie; see cubins.h.
  size_t cubin_at = 0, cubin_bytes = 0;
};

/// What is timed, and the operation around it with its default tiles.
struct BenchSetup {
  int device = 0;
  std::string gpu; ///< its UUID, as processes may number GPUs differently; empty: not known
  ResolvedSpec spec = resolved(AttentionSpec());
  Problem problem;
  KernelKind kind = KernelKind::forward; ///< the kernel whose tiles compete
  std::vector<BenchKernel> operation;    ///< up to that kernel, in launch order, both passes
  bool exact = true;                     ///< outputs must equal the default's bit for bit
};

/// How a candidate's outputs compare with the default's.
struct Vetting {
  std::string wrong;     ///< what no order of summation explains, or empty
  bool identical = true; ///< bit for bit
  double rel_l2 = 0;     ///< ||x - default|| / ||default||, the worst of the outputs
  double ms = 0;         ///< of one launch, to plan the rounds by
};

/// One kernel's scratch data in a process of its own. A candidate may end that process or never
/// return; whatever it throws costs the process as well, for a fault leaves no usable context.
class Bench {
public:
  virtual ~Bench() = default;
  /// Once, before anything else: buffers, inputs, the default's outputs.
  virtual void open(const BenchSetup&) = 0;
  /// Runs a candidate on poisoned outputs and compares them.
  virtual Vetting vet(const BenchKernel&) = 0;
  /// Milliseconds of one launch that finds none of its data in the L2 cache.
  virtual double time_ms(const BenchKernel&) = 0;
};

/// Not bit for bit, outputs may differ by this: FP32 sums in another order, and values of P and dS
/// that lie within rounding of the edge between two of their 8-bit levels, of which the families
/// take some one level apart. A fifth of what the levels themselves cost: .0146 of O at sigma 1
/// (errors.json). How far apart the families have been is not recorded.
inline constexpr double kLargestRelL2 = 3e-3;

} // namespace sagebwd
