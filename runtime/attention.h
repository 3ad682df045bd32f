//===- attention.h - The attention operation ------------------------------===//
//
// This header declares INT8 attention, forward and backward (SageBwd, arXiv 2603.02170, Algorithms
// 1 and 2). An Attention is one operation on one device; its passes run on the caller's stream. No
// function here synchronises or allocates device memory: the caller asks how large the workspace
// must be, and provides it. Memory and streams belong to the device's primary context.
//
// Shapes: B sequences, H query heads, Hk key heads, M queries, N keys, D channels of q and k, Dv
// channels of v. q, k, v, out and their gradients have 16-bit elements of the spec's dtype (bf16 or
// fp16); lse and its gradient are FP32.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/error.h"

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace sagebwd {

/// If |softmax_scale| is smaller than this and not 0, steps of quantised scores are subnormal in
/// FP32.
inline constexpr double kLeastSoftmaxScale = 1e-20;

/// A device tensor of 16-bit elements with the shape (batch, head, token, channel). Strides are in
/// elements, multiples of 8 and not negative (the stride of a dimension of size 1 is ignored);
/// those of a result are at least its number of channels; channels are contiguous; the address is a
/// multiple of 16 bytes.
struct Tensor {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_s = 0;
};

/// These say where packed sequences lie, for specs with AttentionSpec::packed. All arrays are int32
/// in device memory. The kernels read them when they run, so a captured graph can be replayed with
/// other lengths. Problem::batch is the number of sequences, and seq_q and seq_kv are the tokens of
/// all sequences together. Tensors have the shape of one sequence of all tokens: the batch stride
/// is ignored, and lse is (H, tokens).
struct Packing {
  /// (sequences + 1): the first query token of each sequence, then the end of the last sequence.
  const int32_t* first_queries = nullptr;
  /// (sequences + 1): the same for keys.
  const int32_t* first_keys = nullptr;
  /// (sequences): the number of queries that count in each sequence; null: all of them. Queries
  /// behind the length are neither read nor written.
  const int32_t* lengths_q = nullptr;
  /// (sequences): the same for keys.
  const int32_t* lengths_kv = nullptr;
  /// If true, tensors have the shape of a batch whose sequences are padded to tokens / B tokens
  /// each. The first tokens must then be multiples of that length, and lse is (B, H, tokens / B).
  bool apart = false;
};

/// The lists of blocks of keys, for specs with AttentionSpec::sparse_q. Each block of sparse_q
/// queries of a head sees the keys of the listed blocks of sparse_kv keys, as far as the mask
/// leaves them. The kernels read lists when they run, so a captured graph can be replayed with
/// others. If a list is empty, out is 0 there, lse is -inf, and no gradient comes from there.
struct Lists {
  /// (B, H, ceil(M / sparse_q), words), where the words of a list are contiguous, and its lists one
  /// behind the other: bit b % 32 of word b / 32 lists block b of the ceil(N / sparse_kv). There
  /// are list_words() words. Bit 31 of the last one, which no block has, marks a list that is
  /// wrong: out and lse of its queries are NaN. Attention::pack_lists() writes such words.
  const uint32_t* row_bits = nullptr;
  /// In words; 0: all sequences share the lists. Other strides are at least the words of a head's
  /// lists, and that of a dimension of size 1 is ignored.
  int64_t stride_b = 0;
  int64_t stride_h = 0; ///< the same for heads
};

/// Which queries do not see a key, for specs with AttentionSpec::intervals (FlashMask, arXiv
/// 2410.01359, section 4): with a causal mask those from the number on (1 number a key), or from
/// the first to before the second (2); without a causal mask those from the first on and those
/// before the second (2), or from the first to before the second and from the third to before the
/// fourth (4). The kernels read them when they run. `Lists` of the call have the bits that
/// Attention::pack_lists() makes of the same numbers. If a query sees no key, its out is 0 and its
/// lse -inf.
struct Intervals {
  /// (B, Hk, N, spec.intervals), int32, aligned to a key's numbers, which lie together, and so do a
  /// head's keys. A number may be anything: queries are 0 to M - 1.
  const int32_t* numbers = nullptr;
  /// In int32, multiples of spec.intervals; 0: all sequences share the numbers. That of a dimension
  /// of size 1 is ignored.
  int64_t stride_b = 0;
  int64_t stride_h = 0; ///< the same for key heads
};

/// What AttentionSpec::mask and AttentionSpec::score index: int32 of the former, float32 of the
/// latter, in device memory, `rows` of `columns` numbers, one behind the other. An operand of one
/// index has one row. Indices outside are clamped into the range. The kernels read tables when they
/// run.
struct Table {
  const void* numbers = nullptr;
  int64_t rows = 1;
  int64_t columns = 1;
};
/// Those of a call, in the order in which the mask names them first, and then the score function.
using Tables = std::array<Table, kMostTables>;

/// The share of exact attention in each query's output, for specs with AttentionSpec::linear: out =
/// alpha out_sparse + (1 - alpha) out_linear (SLA2, arXiv 2602.12675, Algorithm 2). Kernels take it
/// as 0 for queries that list nothing and, where linear attention sees the complement of the lists,
/// as 1 for queries that list every block.
struct Shares {
  /// (B, H, ceil(M / tokens)), FP32, with strides in elements, of which any may be 0. It is not
  /// checked to be from 0 to 1.
  const float* alpha = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_s = 0;
  int tokens = 1; ///< queries one behind the other that share a number
  /// The numbers are then not alpha but rest, the logarithm of what a query's other keys weigh:
  /// alpha = sigmoid(lse - rest), whose gradient reaches q and k through lse too. The backward
  /// takes the forward's out as `out`, and dalpha is the gradient of rest.
  bool of_rest = false;
  /// The forward writes the sums of linear attention to kept_sums, and the backward, which must
  /// have the same, reads them there and does not form them again. That takes
  /// Attention::kept_sums_bytes(), and at most 65535 sequences.
  bool keeps_sums = false;
};

/// Lists are made of a mask of blocks, of indices, of intervals, or of the expression of a spec's
/// mask; the first two lie contiguous in device memory.
struct ListsToPack {
  /// Batch and heads may be 1 for lists that are shared, unless an expression depends on them.
  /// heads_kv counts for intervals alone: that many of `intervals` have strides, and heads are a
  /// multiple of it.
  Problem problem;
  /// (B, H, lists, blocks) bytes: not 0 where a block is listed.
  const void* mask = nullptr;
  /// (B, H, lists, width) int32: numbers of blocks, in any order and as often as wanted. One that
  /// is not from 0 to blocks - 1 marks its list as wrong.
  const int32_t* indices = nullptr;
  int width = 0;
  /// (B, H, lists) int32: how many of a list's indices count; null: all.
  const int32_t* counts = nullptr;
  Intervals intervals = {};
  Tables tables = {};           ///< those of the mask
  uint32_t* row_bits = nullptr; ///< the result, (B, H, lists, list_words())
  void* stream = nullptr;
};

struct ForwardArgs {
  Problem problem;
  /// (B, H, M, D), (B, Hk, N, D) and (B, Hk, N, Dv), bf16 or fp16.
  Tensor q, k, v;
  /// (B, H, M, Dv), the same dtype.
  Tensor out;
  /// (B, H, M) contiguous, FP32: the natural logarithm of the sum of exp(scaled score) over the
  /// keys.
  float* lse = nullptr;
  /// The factor of the scores. It must be finite, and 0 or at least kLeastSoftmaxScale in
  /// magnitude; it may be negative, except under `qk16`.
  float softmax_scale = std::numeric_limits<float>::quiet_NaN();
  void* workspace = nullptr; ///< device memory, aligned to 256 bytes
  size_t workspace_bytes = 0;
  void* stream = nullptr; ///< a CUstream
  Packing packing;        ///< all null unless the spec is packed
  /// Dv, the number of channels of v, out and their gradients; 0 means D. A value below D is
  /// allowed only if D is not a width of kernels (kWidths): for example 128 for the 192 channels of
  /// latent attention.
  int value_dim = 0;
  /// The vector that smooth_k subtracts from the keys in place of their mean: FP32, contiguous, (B,
  /// Hk, D), or (sequences, Hk, D) for packed sequences; null: the mean. The vector must be finite
  /// and should be near the mean; which vector is given changes only how results are rounded.
  const float* k_mean = nullptr;
  Lists lists;         ///< null unless the spec has lists, intervals or a mask
  Intervals intervals; ///< null unless the spec has intervals
  Tables tables;       ///< null unless the spec has a mask or score that indexes some
  /// Null unless the spec has linear attention, which is then mixed with exact attention to listed
  /// blocks: `sparse_out` gets the output of that, for the backward, and lse is of listed keys.
  /// k_mean must then be null.
  Shares shares;
  void* kept_sums = nullptr; ///< with Shares::keeps_sums: memory aligned to 16 bytes
  Tensor sparse_out;         ///< like out
  /// (H), FP32; null unless the spec has max_logits. It gets for each query head the largest score
  /// of the call, over all sequences, queries and the keys that these see: softmax_scale q k, or
  /// what the score function makes of it, as the kernels have it. It is -inf if no query of the
  /// head sees a key, and NaN if lse of one of its queries is NaN.
  float* max_logits = nullptr;
};

/// Shapes and dtypes are those of ForwardArgs; dout is like out, and dq, dk and dv are like q, k
/// and v.
///
/// smooth_k changes dq, and the backward corrects this with out and lse. The correction is right in
/// two cases. First, out and lse were computed from exactly these keys; dlse may then be given.
/// Second, these keys are a part of the keys of out and lse, all parts use the same k_mean, and
/// dlse is null: the dq of each part is then incomplete, and the sum of all parts' dq is right.
struct BackwardArgs {
  Problem problem;
  Tensor q, k, v, out, dout;
  const float* lse = nullptr;
  const float* dlse = nullptr; ///< (B, H, M) contiguous, FP32: the gradient of lse; null: 0
  Tensor dq, dk, dv;
  float softmax_scale = std::numeric_limits<float>::quiet_NaN();
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  Packing packing;
  int value_dim = 0;
  const float* k_mean = nullptr; ///< the same as in the forward pass
  Lists lists;                   ///< the same as in the forward pass
  Intervals intervals;           ///< the same as in the forward pass
  Tables tables;                 ///< the same as in the forward pass
  /// With linear attention: as in the forward pass. `out` is then the forward's sparse_out (its
  /// out with Shares::of_rest), and dout the gradient of its out.
  Shares shares;
  const void* kept_sums = nullptr; ///< with Shares::keeps_sums: what the forward wrote
  /// (B, H, M) contiguous, FP32: the gradient of each query's alpha, 0 where alpha is not used;
  /// null: not wanted.
  float* dalpha = nullptr;
};

/// Raises SpecError if no kernel of this spec supports `value_dim` channels of V.
void check_value_dim(int value_dim, const AttentionSpec& spec);

template <typename Self, typename Visitor> void visit_packing(Self& a, Visitor&& visit) {
  visit(Operand::first_queries, a.first_queries);
  visit(Operand::first_keys, a.first_keys);
  visit(Operand::lengths_q, a.lengths_q);
  visit(Operand::lengths_kv, a.lengths_kv);
}

/// Calls the visitor with the operand and the tensor, for every tensor of ForwardArgs or
/// BackwardArgs. takes() says which of them calls of a spec have.
template <typename Self, typename Visitor> void visit_tensors(Self& a, Visitor&& visit) {
  constexpr bool backward = std::is_same_v<std::remove_const_t<Self>, BackwardArgs>;
  visit(Operand::q, a.q);
  visit(Operand::k, a.k);
  visit(Operand::v, a.v);
  visit(Operand::out, a.out);
  if constexpr (backward) {
    visit(Operand::dout, a.dout);
    visit(Operand::dq, a.dq);
    visit(Operand::dk, a.dk);
    visit(Operand::dv, a.dv);
  }
  visit(Operand::lse, a.lse);
  if constexpr (backward)
    visit(Operand::dlse, a.dlse);
  visit(Operand::given_k_mean, a.k_mean);
  visit_packing(a.packing, visit);
  visit(Operand::row_bits, a.lists);
  visit(Operand::intervals, a.intervals);
  for (int i = 0; i < kMostTables; ++i)
    visit(table_operand(i), a.tables[static_cast<size_t>(i)]);
  visit(Operand::alpha, a.shares);
  visit(Operand::kept_sums, a.kept_sums);
  if constexpr (backward) {
    visit(Operand::dalpha, a.dalpha);
  } else {
    visit(Operand::sparse_out, a.sparse_out);
    visit(Operand::max_logits, a.max_logits);
  }
}

class PreparedPass;

/// A thread-safe object for one attention operation on one device. Kernels are compiled or loaded
/// on first use, or by warmup().
///
/// Results must not share memory with each other, with the workspace or with tensors that the pass
/// reads; forward() and backward() raise SpecError if they detect this.
///
/// SAGEBWD_TUNE (runtime/settings.h) decides which tiles the kernels have. By default a kernel has
/// the tile of its tuning record if a record exists; kernels of a fused backward have no records.
/// If a call's size falls into a bucket that an earlier call used, no record is looked up.
class Attention {
public:
  /// Resolves the spec. `tiles` replaces default and tuned tiles. Raises SpecError (also for an
  /// unknown word in SAGEBWD_TUNE), LibraryError or DriverError.
  explicit Attention(const AttentionSpec&, int device = 0,
                     const std::optional<Tiles>& tiles = std::nullopt);
  ~Attention();

  const ResolvedSpec& spec() const;
  const Arch& arch() const;
  int device() const;
  /// Compiles and loads every kernel: without a problem, each with its default tile; with a
  /// problem, each with the tile that calls of this size use (under SAGEBWD_TUNE=tune this tunes).
  /// Afterwards such calls can be captured into a CUDA graph.
  void warmup(bool backward = true, const std::optional<Problem>& problem = std::nullopt);
  /// For a forward that is followed by a backward of the same size: builds the forward's kernels,
  /// and lets threads of their own build the backward's, which may go on after it returns. While
  /// the stream is being captured, build_ahead() builds nothing. If a build fails, build_ahead()
  /// raises nothing: the pass that needs the kernel raises the error.
  void build_ahead(const Problem&, void* stream);
  /// The tile that calls of this size use. Raises SpecError if such calls do not launch the kernel,
  /// and TuneError if SAGEBWD_TUNE=frozen and there is no record.
  TileConfig tile(KernelKind, const Problem&);

  size_t forward_workspace_bytes(const Problem&) const;
  size_t backward_workspace_bytes(const Problem&) const;
  /// The size of ForwardArgs::kept_sums. Raises SpecError for a spec without linear attention.
  size_t kept_sums_bytes(const Problem&) const;
  /// Both raise SpecError if no kernel supports the arguments (the message says which argument and
  /// why) and DriverError if a launch fails. If a kernel is not loaded while the stream is being
  /// captured, they raise DriverError with a hint.
  void forward(const ForwardArgs&);
  void backward(const BackwardArgs&);
  /// Writes lists as bits, for calls of this spec. Raises SpecError if the spec has no lists or the
  /// arguments are wrong, and what forward() raises.
  void pack_lists(const ListsToPack&) const;
  /// Prepares a pass for many calls that differ only in addresses. The addresses, the workspace and
  /// the stream of the arguments are ignored.
  PreparedPass prepare(const ForwardArgs&) const;
  PreparedPass prepare(const BackwardArgs&) const;

private:
  friend class PreparedPass;
  struct State;
  /// Either state_ or of_short_calls_.
  const std::shared_ptr<State>& state_for(const Problem&) const;
  std::shared_ptr<State> state_;
  std::shared_ptr<State> of_short_calls_; ///< null unless short calls have other kernels
};

/// A pass over tensors of one size with one set of strides. Everything that does not depend on
/// addresses has been checked and computed. A PreparedPass is immutable: any number of threads may
/// run it at the same time.
class PreparedPass {
public:
  const ResolvedSpec& spec() const;
  size_t workspace_bytes() const { return workspace_.bytes; }
  int device() const;
  /// `addresses` has the addresses of the pass's tensors in the order of visit_tensors(). Raises
  /// the same errors as Attention::forward() and backward().
  void run(std::span<const uint64_t> addresses, uint64_t workspace, void* stream) const {
    run_each(addresses, workspace, stream, {});
  }
  /// Measurements run a pass so that no kernel begins before the one ahead of it has ended. Waits
  /// for the last one, and returns the milliseconds of each launch.
  std::vector<std::pair<KernelKind, double>> run_timed(std::span<const uint64_t> addresses,
                                                       uint64_t workspace, void* stream) const;

private:
  friend class Attention;
  template <typename Args> PreparedPass(std::shared_ptr<Attention::State>, Pass, const Args&);
  void pass_over(const Problem&, OperandValues&) const;
  /// Called after each launch. The launches then do not overlap.
  using After = std::function<void(KernelKind)>;
  void run_each(std::span<const uint64_t> addresses, uint64_t workspace, void* stream,
                const After&) const;

  std::shared_ptr<Attention::State> state_;
  Pass pass_;
  Problem problem_;
  bool keeps_sums_;
  Workspace workspace_;
  OperandValues values_{};
  std::vector<const CallerTensor*> tensors_;
};

} // namespace sagebwd
