//===- verify_case.h - One random problem, and its verdict -----------------===//
//
// For machines without PyTorch: the CPU reference is the judge. bench/cases.py draws problems for
// PyTorch's operator, with FP64 and the emulation on the GPU, and says there what it does more.
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

/// A problem that a seed stands for.
struct VerifyCase {
  AttentionSpec spec;
  Problem problem;
  Layout layout;
  reference::Distribution inputs = reference::Distribution::gaussian;
  double sigma = 1;  ///< of gaussian inputs
  bool dlse = false; ///< a gradient flows into lse
  uint64_t seed = 0;
};
std::string to_string(const VerifyCase&);

/// The same arguments give the same case on every machine. Its inputs are one of those.
VerifyCase draw(uint64_t seed, const AttentionSpec&, int64_t max_len,
                const std::vector<reference::Distribution>& inputs);

/// One output of one case. The figures are L2 norms relative to the FP64 tensor's, or to a
/// sixteenth of its terms' where those cancel (one key: dQ is zero but for rounding).
struct Verdict {
  std::string tensor;
  double rel_l2 = 0;       ///< against FP64
  double bound = 0;        ///< the emulation's error against FP64 and a little more
  double to_emulation = 0; ///< against the emulation, given the same out and lse
  bool finite = true;

  bool right() const { return finite && rel_l2 <= bound; }
  double used() const { return rel_l2 / bound; }
};

/// Runs the case and compares it; what is wrong with its memory goes to the faults.
std::vector<Verdict> check_on_gpu(Attention&, int device, const VerifyCase&, Faults&);

/// What the drawn cases were, in all.
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
