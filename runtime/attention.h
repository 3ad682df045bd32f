//===- attention.h - The operation -----------------------------------------===//
//
// INT8 attention, forward and backward (SageBwd, arXiv 2603.02170, Algorithms 1 and 2), on the
// caller's stream and device. Nothing here synchronises or allocates device memory: the caller asks
// how large a workspace is needed, and provides it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/error.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>

namespace sagebwd {

/// With a smaller scale, except 0, the steps of quantised scores are not normal numbers in FP32.
inline constexpr double kLeastSoftmaxScale = 1e-20;

/// A device tensor of (batch, head, token, channel) with contiguous channels. Strides in elements.
struct Tensor {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_s = 0;
};

/// Where packed sequences lie (AttentionSpec::packed): device memory, read when the kernels run, so
/// that a captured graph takes other lengths. Tensors are those of one sequence of all tokens: the
/// batch stride is not looked at, and rows are (H, tokens).
struct Packing {
  const int32_t* first_queries = nullptr; ///< (sequences + 1): each one's first token, and the end
  const int32_t* first_keys = nullptr;    ///< likewise
  const int32_t* lengths_q = nullptr;     ///< (sequences): tokens that count, null for all
  const int32_t* lengths_kv = nullptr;    ///< what lies behind them is neither read nor written
  /// Tensors are those of a batch of sequences that are padded to one length each, as the first
  /// tokens must say; rows are (B, H, tokens / B).
  bool apart = false;
};

struct ForwardArgs {
  Problem problem;
  Tensor q, k, v;       ///< (B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv); bf16 or fp16
  Tensor out;           ///< (B, H, M, Dv), same type
  float* lse = nullptr; ///< (B, H, M) contiguous: natural log of the scaled scores' sum
  /// A finite number of either sign, at least kLeastSoftmaxScale in magnitude, or 0. Under `qk16`
  /// it must not be negative.
  float softmax_scale = std::numeric_limits<float>::quiet_NaN();
  void* workspace = nullptr; ///< forward_workspace_bytes(), 256-byte aligned
  size_t workspace_bytes = 0;
  void* stream = nullptr; ///< CUstream
  Packing packing;        ///< of a packed spec
  /// Dv, the channels of v, of out and of their gradients; 0 means D. It may be less than D if D is
  /// no width of kernels (kWidths), such as 128 for the 192 channels of latent attention.
  int value_dim = 0;
  /// (B, Hk, D) contiguous, for packed sequences (sequences, Hk, D), or null: what smooth_k
  /// subtracts from the keys in place of their mean. It must be finite, and should be near the
  /// mean; it only changes roundings.
  const float* k_mean = nullptr;
};

/// smooth_k changes dq, and the backward corrects for this using out and lse. The correction is
/// right in two cases. Either out and lse were computed from exactly these keys; dlse may then be
/// given. Or these keys are a part of those that out and lse belong to, all parts have the same
/// k_mean, and there is no dlse: each part's dq is then incomplete, and their sum is right.
struct BackwardArgs {
  Problem problem;
  Tensor q, k, v, out, dout;
  const float* lse = nullptr;
  const float* dlse = nullptr; ///< (B, H, M) gradient of lse, or null
  Tensor dq, dk, dv;
  float softmax_scale = std::numeric_limits<float>::quiet_NaN();
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  Packing packing;
  int value_dim = 0;
  const float* k_mean = nullptr; ///< as the forward's
};

/// Raises SpecError for channels of V that no kernel of this spec takes.
void check_value_dim(int value_dim, const AttentionSpec& spec);

template <typename Self, typename Visitor> void visit_packing(Self& a, Visitor&& visit) {
  visit(Operand::first_queries, a.first_queries);
  visit(Operand::first_keys, a.first_keys);
  visit(Operand::lengths_q, a.lengths_q);
  visit(Operand::lengths_kv, a.lengths_kv);
}

/// Calls the visitor with every tensor and its operand.
template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, ForwardArgs>
void visit_tensors(Self& a, Visitor&& visit) {
  visit(Operand::q, a.q);
  visit(Operand::k, a.k);
  visit(Operand::v, a.v);
  visit(Operand::out, a.out);
  visit(Operand::lse, a.lse);
  visit(Operand::given_k_mean, a.k_mean);
  visit_packing(a.packing, visit);
}
template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, BackwardArgs>
void visit_tensors(Self& a, Visitor&& visit) {
  visit(Operand::q, a.q);
  visit(Operand::k, a.k);
  visit(Operand::v, a.v);
  visit(Operand::out, a.out);
  visit(Operand::dout, a.dout);
  visit(Operand::dq, a.dq);
  visit(Operand::dk, a.dk);
  visit(Operand::dv, a.dv);
  visit(Operand::lse, a.lse);
  visit(Operand::dlse, a.dlse);
  visit(Operand::given_k_mean, a.k_mean);
  visit_packing(a.packing, visit);
}

class PreparedPass;

/// Results share no memory with each other, with the workspace, or with what is read; forward() and
/// backward() raise SpecError where they see that they do.
///
/// One operation on one device. Thread-safe; kernels are compiled or loaded on first use, or by
/// warmup().
///
/// Which tiles they have is SAGEBWD_TUNE's to say (runtime/settings.h): by default those of tuning
/// records where there are any, which are of a split backward alone. A call whose size falls into a
/// bucket seen before looks nothing up.
class Attention {
public:
  /// Resolves the spec; raises SpecError (also for an unknown SAGEBWD_TUNE), LibraryError or
  /// DriverError. `tiles` replaces the default and tuned ones.
  explicit Attention(const AttentionSpec&, int device = 0,
                     const std::optional<Tiles>& tiles = std::nullopt);
  ~Attention();

  const AttentionSpec& spec() const; ///< resolved
  const Arch& arch() const;
  /// Compiles and loads every kernel with its default tile, or with the tile that calls of a
  /// problem's size run with (under SAGEBWD_TUNE=tune this tunes). After it, such calls can be
  /// captured into a CUDA graph.
  void warmup(bool backward = true, const std::optional<Problem>& problem = std::nullopt);
  /// Builds the kernels of both passes side by side, for a forward that a backward of the same size
  /// will follow: the second pass's are then not waited for again. Builds nothing while the stream
  /// is being captured, and leaves every error to the pass that meets it.
  void build_ahead(const Problem&, void* stream);
  /// The tile that calls of this size run with. Raises SpecError for a kernel that they do not
  /// launch, TuneError: SAGEBWD_TUNE=frozen, no record.
  TileConfig tile(KernelKind, const Problem&);

  size_t forward_workspace_bytes(const Problem&) const;
  size_t backward_workspace_bytes(const Problem&) const;
  /// Raise SpecError for arguments no kernel can run (it says which and why), DriverError for
  /// failed launches, and DriverError with a hint where a kernel would have to be compiled while
  /// the stream is being captured.
  void forward(const ForwardArgs&);
  void backward(const BackwardArgs&);
  /// For many calls that differ in addresses alone. Of the arguments, addresses, workspace and
  /// stream are not looked at.
  PreparedPass prepare(const ForwardArgs&) const;
  PreparedPass prepare(const BackwardArgs&) const;

private:
  friend class PreparedPass;
  struct State;
  std::shared_ptr<State> state_;
};

/// A pass over tensors of one size and one set of strides: what does not depend on addresses is
/// checked and worked out. Immutable; any number of threads may run it at a time.
class PreparedPass {
public:
  const AttentionSpec& spec() const;
  size_t workspace_bytes() const { return workspace_.bytes; }
  /// `addresses` are those of the pass's tensors in the order of visit_tensors(). Raises what
  /// Attention::forward() and backward() raise.
  void run(std::span<const uint64_t> addresses, uint64_t workspace, void* stream) const;

private:
  friend class Attention;
  template <typename Args> PreparedPass(std::shared_ptr<Attention::State>, Pass, const Args&);
  void pass_over(const Problem&, OperandValues&) const;

  std::shared_ptr<Attention::State> state_;
  Pass pass_;
  Problem problem_;
  Workspace workspace_;
  OperandValues values_{};
  std::vector<const CallerTensor*> tensors_;
};

} // namespace sagebwd
