//===- bench.h - The interface by which a tuner's worker runs a candidate -===//
//
// Bench has two kinds of implementations: kernels on a GPU (gpu_bench.h), and replacements in the
// tests.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"

#include <string>
#include <vector>

namespace sagebwd {

/// A compiled kernel as the worker gets it: the worker compiles nothing and reads no cache.
struct BenchKernel {
  KernelSpec spec;
  std::string name;  ///< the name of the entry point
  std::string cubin; ///< the machine code
  int threads = 0;
  int shared_bytes = 0; ///< dynamic shared memory
  /// Where the machine code lies in the file that tuner and worker share; see cubins.h.
  size_t cubin_at = 0, cubin_bytes = 0;
};

/// The kernel that is timed, and the other kernels of its operation with their default tiles.
struct BenchSetup {
  int device = 0;
  /// The GPU's UUID, because processes may number GPUs differently; empty: unknown.
  std::string gpu;
  ResolvedSpec spec = resolved(AttentionSpec());
  Problem problem;
  KernelKind kind = KernelKind::forward; ///< the kernel whose tiles compete
  std::vector<BenchKernel> operation;    ///< both passes in launch order, up to that kernel
  bool exact = true; ///< outputs must equal those of the default tile bit for bit
};

/// The comparison of a candidate's outputs with those of the default tile.
struct Vetting {
  std::string wrong;     ///< a difference that no order of summation explains, or empty
  bool identical = true; ///< the outputs are equal bit for bit
  double rel_l2 = 0;     ///< ||x - default|| / ||default||, the largest among the outputs
  double ms = 0;         ///< milliseconds of one launch, for planning the rounds
};

/// The scratch data of one kernel, in a separate process. A candidate may end the process or never
/// return. If it throws, the process must end, too, because after a fault the CUDA context is not
/// usable.
class Bench {
public:
  virtual ~Bench() = default;
  /// Makes buffers, inputs and the default tile's outputs. Called once, before all other functions.
  virtual void open(const BenchSetup&) = 0;
  /// Runs a candidate on outputs that hold NaNs, and compares the results.
  virtual Vetting vet(const BenchKernel&) = 0;
  /// Milliseconds of one launch that finds none of its data in the L2 cache.
  virtual double time_ms(const BenchKernel&) = 0;
};

/// The largest Vetting::rel_l2 of tiles whose outputs may differ from the default's. There are two
/// causes: another order of FP32 sums; and values of P and dS so close to the edge between two of
/// their 8-bit levels that families round some to the neighbouring level. The limit is a fifth of
/// the error that the levels cause: 0.0146 of O at sigma 1 (errors.json). The largest difference
/// between families is not recorded.
inline constexpr double kLargestRelL2 = 3e-3;

} // namespace sagebwd
