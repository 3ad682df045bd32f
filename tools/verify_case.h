//===- verify_case.h - One random problem, and its verdict -----------------===//
//
// For machines without PyTorch: the CPU reference judges. tests/drawn/cases.py draws more kinds of
// problems for PyTorch's operator, and judges them by FP64 and the emulation on the GPU.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/on_gpu.h"
#include "runtime/reference/named_inputs.h"

#include "llvm/Support/JSON.h"

#include <map>
#include <set>
#include <string>
#include <vector>

namespace sagebwd::tools {

/// A problem, drawn from a seed.
struct VerifyCase {
  AttentionSpec spec;
  Problem problem;
  Layout layout;
  reference::Distribution inputs = reference::Distribution::gaussian;
  double sigma = 1;     ///< of gaussian inputs
  bool dlse = false;    ///< a gradient flows into lse
  double density = 0;   ///< the part of all blocks that is listed, for specs with lists
  bool of_rest = false; ///< Shares::of_rest, for specs with linear attention
  uint64_t seed = 0;
};
std::string to_string(const VerifyCase&);

/// One case in four is of attention to lists of blocks, of sizes that the spec can have, and one in
/// eight has intervals, of a number of columns that it can have, if any, as many a mask or a score
/// function that is an expression; the others are of the spec itself, which is not resolved.
AttentionSpec perhaps_with_mask(uint64_t seed, const AttentionSpec&);

/// Equal arguments give the same case on every machine. `density` 0 means that it is drawn.
VerifyCase draw(uint64_t seed, const AttentionSpec&, int64_t max_len,
                const std::vector<reference::Distribution>& inputs, double density = 0);

/// One output of one case. The figures are L2 norms relative to the FP64 tensor's, or to a
/// sixteenth of its terms' where those cancel (one key: dQ is zero except for rounding).
struct Verdict {
  std::string tensor;
  double rel_l2 = 0; ///< error against FP64
  double bound = 0;  ///< the emulation's error against FP64, or that of rounding, plus a margin
  /// Error against the emulation with the same out and lse; against FP64 where there is none.
  double to_emulation = 0;
  bool finite = true;

  bool right() const { return finite && rel_l2 <= bound; }
  double used() const { return rel_l2 / bound; }
};

/// Runs the case and compares it. Wrong writes to memory are added to the faults.
std::vector<Verdict> check_on_gpu(Attention&, int device, const VerifyCase&, Faults&);

/// Counts what the drawn cases covered.
class Coverage {
public:
  void add(const VerifyCase&);
  std::string as_text() const;
  llvm::json::Value as_json() const;

private:
  std::set<int64_t> seq_q_, seq_kv_, groups_;
  std::set<double> sigmas_; ///< of gaussian inputs
  std::set<std::string> inputs_;
  std::map<std::string, int64_t> counts_; ///< by their names in JSON
};

} // namespace sagebwd::tools
