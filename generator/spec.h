//===- spec.h - What an attention operation computes, and for which GPU ---===//
//
// An AttentionSpec fixes the numerics of the operation, an Arch the instruction set. Everything
// here is a plain value: parsed, printed, validated and compared.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/fields.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

enum class DType { bf16, fp16 };
/// `top_left`: key j is visible to query i iff j <= i; `bottom_right`: iff j <= i + N - M.
enum class Causal { none, top_left, bottom_right };
/// Along what a quantisation scale may vary: `row`, one per token or channel of a group; `block`,
/// one per group (SageBwd, arXiv 2603.02170, section 3). What else that decides: grouping_of().
enum class Granularity { row, block };
/// Which of the seven products are INT8 and which have 16-bit operands; which_int8() spells it out.
enum class Precision { six_of_seven, qk16, dv16, gradients16 };
/// In what a fused backward adds up dQ in memory. `fp16`: each query's by a power of two that no
/// finite input overflows (templates/tile/dq_sums16.cuh).
enum class DqSums { fp32, fp16 };

template <> struct Words<DType> {
  static constexpr std::string_view what = "dtype";
  static constexpr std::pair<DType, std::string_view> all[] = {{DType::bf16, "bf16"},
                                                               {DType::fp16, "fp16"}};
};
template <> struct Words<Causal> {
  static constexpr std::string_view what = "causal mask";
  static constexpr std::pair<Causal, std::string_view> all[] = {
      {Causal::none, "none"},
      {Causal::top_left, "top-left"},
      {Causal::bottom_right, "bottom-right"}};
};
template <> struct Words<Granularity> {
  static constexpr std::string_view what = "granularity";
  static constexpr std::pair<Granularity, std::string_view> all[] = {{Granularity::row, "row"},
                                                                     {Granularity::block, "block"}};
};
template <> struct Words<Precision> {
  static constexpr std::string_view what = "precision";
  static constexpr std::pair<Precision, std::string_view> all[] = {
      {Precision::six_of_seven, "six-of-seven"},
      {Precision::qk16, "qk16"},
      {Precision::dv16, "dv16"},
      {Precision::gradients16, "gradients16"}};
};
template <> struct Words<DqSums> {
  static constexpr std::string_view what = "format of dQ's sums";
  static constexpr std::pair<DqSums, std::string_view> all[] = {{DqSums::fp32, "fp32"},
                                                                {DqSums::fp16, "fp16"}};
};

/// The products that a precision computes in INT8; dP = dO V^T never is. S counts twice among the
/// seven: the backward forms it again.
struct Int8Products {
  bool s, pv, dv, dq, dk;
  int count() const { return 2 * s + pv + dv + dq + dk; }
};
constexpr Int8Products which_int8(Precision precision) {
  const bool all = precision == Precision::six_of_seven || precision == Precision::qk16;
  return {.s = precision != Precision::qk16,
          .pv = true,
          .dv = all,
          .dq = all || precision == Precision::dv16,
          .dk = all || precision == Precision::dv16};
}

/// What a granularity decides: who would compare it with a word asks this.
struct Grouping {
  bool one_scale;        ///< for all of a group, so that P and dS have one a tile
  int queries;           ///< in a group
  std::vector<int> keys; ///< that a group may have; the last is the default
  int channel_tokens;    ///< that share a channel's scale in transposed copies; 0: those of a group
  int keys_a_scale;      ///< that share a scale of K for S; 0: those of a group
  int most_sink_keys;    ///< that can be taken apart, which is the default
};
const Grouping& grouping_of(Granularity);

/// The version of what is computed, bit for bit of every integer. 3: scales of `row` that several
/// tokens share, and the first key apart; 4: rows of dO that are zeros beside small ones; 5:
/// signs ahead of the rotation, and channels that are small beside their head count as zeros, not
/// below 2^-60. It is in every spec's text, so that caches, packs and papers can tell.
inline constexpr int kNumerics = 5;

/// Channels that kernels compute with: the least that has all of a head.
inline constexpr int kWidths[] = {64, 128, 256};
/// Head dimensions: from one to the other in such steps, 16 bytes of a token.
inline constexpr int kLeastHeadDim = 32, kMostHeadDim = 256, kHeadDimStep = 8;
/// Up to which one block can sum the gradients of all channels.
inline constexpr int kWidestFused = 128;
std::string_view help_of_head_dim();
/// Those whose kernels every GPU has, forward and backward.
inline constexpr int kUsualHeadDims[] = {64, 128};

/// A window's side that hides nothing.
inline constexpr int kNoWindow = -1;

/// The numerics of one attention operation. Group sizes of 0 mean "the default of this
/// granularity"; `resolved()` fills them in.
struct AttentionSpec {
  int head_dim = 128;
  DType dtype = DType::bf16;
  Causal causal = Causal::none;
  Granularity granularity = Granularity::row;
  Precision precision = Precision::six_of_seven;
  bool smooth_k = true;
  bool rotate = true;
  bool deterministic = true;
  int group_q = 0;    ///< queries that share a quantisation group
  int group_kv = 0;   ///< keys that share a quantisation group
  int sink_keys = -1; ///< first keys that are computed apart, in FP32; -1: the granularity's own
  DqSums dq_sums = DqSums::fp32;
  int window_left = kNoWindow;  ///< keys that a query sees before its own at most
  int window_right = kNoWindow; ///< and behind it
  bool packed = false;   ///< sequences of several lengths lie one behind the other in a tensor
  bool smooth_q = false; ///< units of queries are quantised without their mean
  int numerics = kNumerics;

  bool operator==(const AttentionSpec&) const = default;
};

template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, AttentionSpec>
constexpr void visit_fields(Self& s, Visitor&& visit) {
  visit(Label{"head_dim", "d", help_of_head_dim()}, s.head_dim);
  visit(Label{"dtype", " ", "type of q, k, v and their gradients"}, s.dtype);
  visit(Label{"causal", " causal=", "which keys a query sees"}, s.causal);
  visit(Label{"granularity", " ", "what shares a quantisation scale"}, s.granularity);
  visit(Label{"group_q", " ", "queries per quantisation group; 0 means the granularity's default"},
        s.group_q);
  visit(Label{"group_kv", "x", "keys per quantisation group; 0 means the granularity's default"},
        s.group_kv);
  visit(Label{"sink_keys", " sink_keys=",
              "first keys computed separately in FP32; -1 means the granularity's default"},
        s.sink_keys);
  visit(Label{"precision", " ", "which products are INT8"}, s.precision);
  visit(Label{"smooth_k", " smooth_k", "subtracting the mean of the keys"}, s.smooth_k);
  visit(Label{"smooth_q", " smooth_q", "subtracting the mean of every 256 queries", /*quiet=*/true},
        s.smooth_q);
  visit(Label{"rotate", " rotate", "the Hadamard rotation of Q and K for S"}, s.rotate);
  visit(Label{"deterministic", " deterministic",
              "the guarantee that the same inputs give the same bits"},
        s.deterministic);
  visit(Label{"dq_sums", " dq_sums=", "format in which one kernel for all gradients sums dQ",
              /*quiet=*/true},
        s.dq_sums);
  visit(Label{"window_left", " window_left=",
              "sliding window: keys before its own that a query sees; -1 means all",
              /*quiet=*/true, kNoWindow},
        s.window_left);
  visit(Label{"window_right", " window_right=",
              "sliding window: keys after its own that a query sees; -1 means all",
              /*quiet=*/true, kNoWindow},
        s.window_right);
  visit(Label{"packed", " packed", "packed sequences, as in calls with cu_seqlens", /*quiet=*/true},
        s.packed);
  visit(Label{"numerics", " numerics=", "version of the numerics"}, s.numerics);
}

/// Channels of its heads as kernels have them: zeros behind those of the caller's tensors.
constexpr int width(const AttentionSpec& s) {
  for (int width : kWidths)
    if (s.head_dim <= width)
      return width;
  return kMostHeadDim;
}
/// Whether the caller's tensors have all of them.
constexpr bool fills_width(const AttentionSpec& s) { return s.head_dim == width(s); }

/// Whether queries do not see all keys behind them, and all before them.
constexpr bool bounded_behind(const AttentionSpec& s) {
  return s.causal != Causal::none || s.window_left != kNoWindow || s.window_right != kNoWindow;
}
constexpr bool bounded_before(const AttentionSpec& s) { return s.window_left != kNoWindow; }

/// Lets every query see every key: what a kernel that does not look at the mask depends on.
inline void drop_mask(AttentionSpec& s) {
  const AttentionSpec plain;
  s.causal = plain.causal, s.window_left = plain.window_left, s.window_right = plain.window_right;
}
/// Leaves of the mask what kernels are built for: where its edges lie is an argument, and where
/// there is one before a query there is one behind it.
inline void narrow_mask(AttentionSpec& s) {
  if (bounded_behind(s))
    s.causal = Causal::top_left;
  if (bounded_before(s))
    s.window_left = 0;
  s.window_right = kNoWindow;
}

/// Which keys a query sees, counted from its own index: `first` to `last`, of those there are.
/// Edges that lie beyond all keys are where no index overflows.
struct MaskEdges {
  int64_t first, last;
};
MaskEdges mask_edges(const AttentionSpec&, int64_t queries, int64_t keys);

/// Constants of the spec for templates/tile/visible.cuh, wherever it is included, and for
/// templates/tile/place.cuh, which is in every kernel: their names and values.
template <typename Visitor> void visit_mask(const AttentionSpec& s, Visitor&& visit) {
  visit("CAUSAL", bounded_behind(s));
  visit("WINDOW", bounded_before(s));
}
template <typename Visitor> void visit_places(const AttentionSpec& s, Visitor&& visit) {
  visit("HEAD_DIM", width(s));
  visit("PACKED", s.packed);
}

/// Whether dQ is summed in FP16 with a factor a query.
inline bool sums_dq_in_fp16(const AttentionSpec& s) { return s.dq_sums == DqSums::fp16; }

/// What is left for kernels that look at no option of the numerics: what tensors are.
inline AttentionSpec without_numerics(const AttentionSpec& s) {
  return {.head_dim = s.head_dim, .dtype = s.dtype, .packed = s.packed};
}

/// One line, e.g. "d128 bf16 causal=none row 64x64 six-of-seven smooth_k rotate deterministic".
std::string to_string(const AttentionSpec&);
/// Its inverse. A line with "numerics=" is one that was printed, and exact: a switch that it does
/// not name, such as rotate, is off. A line without it has some words in any order, and everything
/// that it leaves out has its default. Raises SpecError, which names the wrong word.
AttentionSpec parse_spec(std::string_view);

/// One GPU architecture that kernels are compiled for.
struct Arch {
  std::string_view name; ///< NVRTC's name, e.g. "sm_90a"
  int major;             ///< compute capability
  int minor;
  int max_shared_bytes; ///< the most shared memory one block may use
  int first_cuda;       ///< the first CUDA version whose driver and NVRTC know it, e.g. 12080
  int registers_per_sm = 65536;

  bool operator==(const Arch& other) const { return name == other.name; }
};

const std::vector<Arch>& all_archs();
const Arch& find_arch(std::string_view name);          ///< raises SpecError
const Arch& arch_for_capability(int major, int minor); ///< raises SpecError

/// A spec with every field checked and every group size filled in. Only resolved() makes one, so
/// that whoever is handed one need not ask.
class ResolvedSpec {
public:
  const AttentionSpec& operator*() const { return spec_; }
  const AttentionSpec* operator->() const { return &spec_; }
  operator const AttentionSpec&() const { return spec_; }
  bool operator==(const ResolvedSpec&) const = default;

private:
  explicit ResolvedSpec(const AttentionSpec& spec) : spec_(spec) {}
  friend ResolvedSpec resolved(AttentionSpec);
  AttentionSpec spec_;
};

/// Fills in what the granularity decides and checks every field; raises SpecError. The same on
/// every architecture, so that one call has the same numerics everywhere.
ResolvedSpec resolved(AttentionSpec);

/// Whether rows of dO are brought to one magnitude by powers of two before dV is formed in INT8
/// (the kernels then read that copy of dO).
inline bool scales_dout(const AttentionSpec& s) {
  return !grouping_of(s.granularity).one_scale && which_int8(s.precision).dv;
}
/// Whether one kernel may form all three gradients: it sums dQ in whatever order blocks come. Under
/// one scale a group those of dS are dQ's kernel's to find, and wide heads leave it no registers.
inline bool may_fuse_backward(const AttentionSpec& s) {
  return !s.deterministic && width(s) <= kWidestFused &&
         !(grouping_of(s.granularity).one_scale && which_int8(s.precision).dq);
}
/// Tokens that share a channel's scale in the transposed copies of Q and dO, or of K and V.
int channel_tokens_q(const AttentionSpec&);
int channel_tokens_kv(const AttentionSpec&);

} // namespace sagebwd
