//===- spec.h - What an attention operation computes, and for which GPU ---===//
//
// An AttentionSpec fixes the numerics of an attention operation, and an Arch fixes the instruction
// set. Both are plain values, which can be parsed, printed, checked and compared.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/words.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// The products that a precision computes in INT8. dP = dO V^T is always a 16-bit product. S counts
/// twice among the seven products, because the backward forms it again.
struct Int8Products {
  bool s, pv, dv, dq, dk;
  int count() const { return 2 * s + pv + dv + dq + dk; }
};
inline constexpr Int8Products kInt8Products[] = {
    {.s = true, .pv = true, .dv = true, .dq = true, .dk = true},     // six-of-seven
    {.s = false, .pv = true, .dv = true, .dq = true, .dk = true},    // qk16
    {.s = true, .pv = true, .dv = false, .dq = true, .dk = true},    // dv16
    {.s = true, .pv = true, .dv = false, .dq = false, .dk = false}}; // gradients16
static_assert(std::size(kInt8Products) == std::size(Words<Precision>::all));
constexpr const Int8Products& which_int8(Precision precision) {
  return kInt8Products[static_cast<int>(precision)];
}

/// A granularity decides all of this. Code reads this struct, and does not compare a granularity
/// with one of its words.
struct Grouping {
  bool one_scale;            ///< a group has one scale, so that P and dS have one per tile
  int queries;               ///< queries in a group
  std::span<const int> keys; ///< possible numbers of keys in a group; the last is the default
  int channel_tokens;        ///< tokens per scale of a channel in transposed copies; 0: a group's
  int keys_a_scale;          ///< keys per scale of K for S; 0: a group's
  int most_sink_keys;        ///< most keys that can be computed separately; also the default
};
inline constexpr int kGroupKeys[] = {64, 128};
inline constexpr Grouping kGroupings[] = {{.one_scale = false, // row
                                           .queries = 64,
                                           .keys = kGroupKeys,
                                           .channel_tokens = 256,
                                           .keys_a_scale = 8,
                                           .most_sink_keys = 1},
                                          {.one_scale = true, // block
                                           .queries = 128,
                                           .keys = {kGroupKeys, 1},
                                           .channel_tokens = 0,
                                           .keys_a_scale = 0,
                                           .most_sink_keys = 0}};
static_assert(std::size(kGroupings) == std::size(Words<Granularity>::all));
constexpr const Grouping& grouping_of(Granularity granularity) {
  return kGroupings[static_cast<int>(granularity)];
}

/// The version of the numerics. It changes whenever a bit of any computed integer changes. Every
/// spec's text has it, so that caches, packs and papers say which version they are of.
/// - 3: under `row` several tokens share a scale, and the first key is computed separately.
/// - 4: rows of dO that are zeros are divided by the same power of two as small rows of their unit.
/// - 5: channels are multiplied by signs before the rotation. A channel counts as zeros if it is
///   small relative to its head; up to version 4, if it was below 2^-60.
inline constexpr int kNumerics = 5;

/// Numbers of channels that kernels compute with. A kernel has the least of them that is not less
/// than the head dimension.
inline constexpr int kWidths[] = {64, 128, 256, 512};
/// Supported head dimensions. A step of 8 channels is 16 bytes of a token.
inline constexpr int kLeastHeadDim = 32, kMostHeadDim = 512, kHeadDimStep = 8;
/// The largest width for which one block can sum the gradients of all channels.
inline constexpr int kWidestFused = 128;
/// The largest width with every option. Above it a team of warps shares out the channels of a head
/// (templates/tile/math/team_products.cuh), and check_very_wide() says what there is.
inline constexpr int kWidestWithAll = 256;
inline constexpr std::string_view kHelpOfHeadDim = "head dimension: a multiple of 8, 32 to 512";
static_assert(kHeadDimStep == 8 && kLeastHeadDim == 32 && kMostHeadDim == 512, "say so above");
/// Head dimensions for which every GPU has kernels of the forward and of the backward.
inline constexpr int kUsualHeadDims[] = {64, 128};

/// The value of a window's side that hides no keys.
inline constexpr int kNoWindow = -1;

/// The sizes that a block of a list can have, of queries and of keys.
inline constexpr int kSparseBlocks[] = {64, 128};
/// The queries and keys of a block of scores that is left out where intervals or a mask hide all of
/// it. With 64 keys kernels take 1.2 to 1.4 times as long (H200, templates/kernels/LISTS.md).
inline constexpr int kMaskBlock = 128;
/// How many numbers a key can have that say which queries do not see it.
inline constexpr int kIntervalColumns[] = {1, 2, 4};

/// The numerics of one attention operation. A group size of 0 means the granularity's default,
/// which resolved() fills in.
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
  int sink_keys = -1; ///< first keys computed separately in FP32; -1: as many as are supported
  DqSums dq_sums = DqSums::fp32;
  Backward gradient_kernels = Backward::either;
  int window_left = kNoWindow;  ///< the most keys that a query sees before its own
  int window_right = kNoWindow; ///< the most keys that a query sees behind its own
  int sparse_q = 0;  ///< queries that share a list of blocks of keys; 0: they see all keys
  int sparse_kv = 0; ///< keys of such a block
  LinearKeys linear = LinearKeys::none; ///< what is mixed with the attention to listed blocks
  int intervals = 0;      ///< numbers of each key that say which queries do not see it; 0: all do
  std::string mask = {};  ///< which keys a query sees (generator/expression.h); empty: any
  std::string score = {}; ///< what becomes of a scaled score; empty: it stays
  bool packed = false;    ///< sequences of several lengths lie one behind the other in a tensor
  bool smooth_q = false;  ///< the mean of each unit of queries is subtracted before quantisation
  DpSums dp_sums = DpSums::fp32;
  bool smooth_v = false;   ///< the mean of the values is subtracted before quantisation
  bool max_logits = false; ///< the forward also gives the largest score of each head
  int numerics = kNumerics;

  bool operator==(const AttentionSpec&) const = default;
};

template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, AttentionSpec>
constexpr void visit_fields(Self& s, Visitor&& visit) {
  visit(Label{"head_dim", "d", kHelpOfHeadDim}, s.head_dim);
  visit(Label{"dtype", " ", "type of q, k, v and their gradients"}, s.dtype);
  visit(Label{"causal", " causal=", "which keys a query sees"}, s.causal);
  visit(Label{"granularity", " ", "what shares a quantisation scale"}, s.granularity);
  visit(Label{"group_q", " ", "queries per quantisation group; 0 means the granularity's default"},
        s.group_q);
  visit(Label{"group_kv", "x", "keys per quantisation group; 0 means the granularity's default"},
        s.group_kv);
  visit(Label{"sink_keys", " sink_keys=",
              "first keys computed separately in FP32, 0 or 1; -1 means 1 where 1 is supported"},
        s.sink_keys);
  visit(Label{"precision", " ", "which products are INT8"}, s.precision);
  visit(Label{"smooth_k", " smooth_k", "subtracting the mean of the keys"}, s.smooth_k);
  visit(Label{"smooth_q", " smooth_q", "subtracting the mean of every 256 queries", /*quiet=*/true},
        s.smooth_q);
  visit(Label{"smooth_v", " smooth_v", "subtracting a mean of the values, which O gets back",
              /*quiet=*/true},
        s.smooth_v);
  visit(Label{"rotate", " rotate", "the Hadamard rotation of Q and K for S"}, s.rotate);
  visit(Label{"deterministic", " deterministic",
              "the guarantee that the same inputs give the same bits"},
        s.deterministic);
  visit(Label{"dq_sums", " dq_sums=", "format in which one kernel for all gradients sums dQ",
              /*quiet=*/true},
        s.dq_sums);
  visit(Label{"dp_sums", " dp_sums=", "format in which tensor cores sum dP", /*quiet=*/true},
        s.dp_sums);
  visit(Label{"gradient_kernels", " gradient_kernels=", "which kernels form the gradients",
              /*quiet=*/true},
        s.gradient_kernels);
  visit(Label{"window_left", " window_left=",
              "sliding window: keys before its own that a query sees; -1 means all",
              /*quiet=*/true, kNoWindow},
        s.window_left);
  visit(Label{"window_right", " window_right=",
              "sliding window: keys after its own that a query sees; -1 means all",
              /*quiet=*/true, kNoWindow},
        s.window_right);
  visit(Label{"sparse_q", " sparse_q=", "queries that share a list of blocks of keys; 0 means none",
              /*quiet=*/true},
        s.sparse_q);
  visit(Label{"sparse_kv", " sparse_kv=", "keys of a block of such a list; 0 means no lists",
              /*quiet=*/true},
        s.sparse_kv);
  visit(Label{"linear", " linear=", "keys of SLA2's linear attention, beside lists of blocks",
              /*quiet=*/true},
        s.linear);
  visit(Label{"intervals", " intervals=",
              "numbers of each key that say which queries do not see it: 1, 2 or 4; 0 means none",
              /*quiet=*/true},
        s.intervals);
  visit(Label{"mask", " mask=", "which keys a query sees, as an expression of b, h, q and k",
              /*quiet=*/true},
        s.mask);
  visit(Label{"score", " score=", "what becomes of a score, as an expression of s, b, h, q and k",
              /*quiet=*/true},
        s.score);
  visit(Label{"packed", " packed", "packed sequences, as in calls with cu_seqlens", /*quiet=*/true},
        s.packed);
  visit(Label{"max_logits", " max_logits", "the largest score of each head as a further result",
              /*quiet=*/true},
        s.max_logits);
  visit(Label{"numerics", " numerics=", "version of the numerics"}, s.numerics);
}

/// The number of channels that kernels compute with. Behind the channels of the caller's tensors
/// kernels have zeros.
inline int width(const AttentionSpec& s) {
  return *std::ranges::lower_bound(kWidths, std::min(s.head_dim, kMostHeadDim));
}
inline bool wide(const AttentionSpec& s) { return width(s) > 64; }
inline bool widest(const AttentionSpec& s) { return width(s) > kWidestFused; }
inline bool very_wide(const AttentionSpec& s) { return width(s) > kWidestWithAll; }
/// Whether S is formed in 16 bits, and whether a quantisation group has one scale.
inline bool scores16(const AttentionSpec& s) { return !which_int8(s.precision).s; }
inline bool blockwise(const AttentionSpec& s) { return grouping_of(s.granularity).one_scale; }
/// The keys of a quantisation group by default, without lists. A team of warps takes 64.
inline int default_group_keys(const AttentionSpec& s) {
  const auto& keys = grouping_of(s.granularity).keys;
  return very_wide(s) ? keys.front() : keys.back();
}
/// Whether the caller's tensors have width() channels.
inline bool fills_width(const AttentionSpec& s) { return s.head_dim == width(s); }

/// Whether the mask hides keys behind a query; bounded_before(): before a query.
inline bool bounded_behind(const AttentionSpec& s) {
  return s.causal != Causal::none || s.window_left != kNoWindow || s.window_right != kNoWindow;
}
inline bool bounded_before(const AttentionSpec& s) { return s.window_left != kNoWindow; }

/// Whether queries see the keys of listed blocks alone.
inline bool is_sparse(const AttentionSpec& s) { return s.sparse_q != 0; }
/// Whether linear attention is mixed with that.
inline bool is_mixed(const AttentionSpec& s) { return s.linear != LinearKeys::none; }
/// Whether keys have intervals of queries that do not see them (FlashMask, arXiv 2410.01359). Their
/// lists of blocks then say which blocks have a key that some query sees.
inline bool has_intervals(const AttentionSpec& s) { return s.intervals != 0; }
/// Whether any score may be hidden, and not only those beyond an edge. Lists then say for each
/// block whether some of its scores are.
inline bool hides_anywhere(const AttentionSpec& s) { return has_intervals(s) || !s.mask.empty(); }
/// Whether a function changes scores before the softmax.
inline bool has_score(const AttentionSpec& s) { return !s.score.empty(); }
/// The head dimensions of the kernels of linear attention.
inline bool has_linear_width(const AttentionSpec& s) {
  return s.head_dim == 64 || s.head_dim == 128;
}

/// Removes the mask, for kernels that do not depend on it.
inline void drop_mask(AttentionSpec& s) {
  const AttentionSpec plain;
  s.sparse_q = plain.sparse_q, s.sparse_kv = plain.sparse_kv;
  s.intervals = plain.intervals, s.mask = plain.mask;
  s.causal = plain.causal, s.window_left = plain.window_left, s.window_right = plain.window_right;
}
/// Reduces the mask to what kernels are specialised by, which is whether it hides keys behind and
/// before a query. The positions of the mask's edges are arguments of a launch. A kernel that
/// hides keys before a query also hides keys behind the query.
inline void narrow_mask(AttentionSpec& s) {
  if (bounded_behind(s))
    s.causal = Causal::top_left;
  if (bounded_before(s))
    s.window_left = 0;
  s.window_right = kNoWindow;
}

/// The mask as numbers: query i sees the keys i + first to i + last, as far as these exist. If an
/// edge lies beyond all keys, its number is limited so that no index overflows.
struct MaskEdges {
  int64_t first, last;
};
MaskEdges mask_edges(const AttentionSpec&, int64_t queries, int64_t keys);

/// Calls the visitor with the names and values of the constants that a template needs: visit_mask()
/// for templates/tile/walk/mask.cuh, visit_places() for templates/tile/walk/place.cuh, which
/// every kernel includes.
template <typename Visitor> void visit_mask(const AttentionSpec& s, Visitor&& visit) {
  visit("CAUSAL", bounded_behind(s));
  visit("LATER_FIRST", bounded_behind(s) || hides_anywhere(s));
  visit("WINDOW", bounded_before(s));
}
/// For templates/tile/walk/lists.cuh, which kernels without lists do not include.
template <typename Visitor> void visit_lists(const AttentionSpec& s, Visitor&& visit) {
  if (!is_sparse(s))
    return;
  visit("SPARSE_Q", s.sparse_q);
  visit("SPARSE_KV", s.sparse_kv);
  visit("ROW_STEP", hides_anywhere(s) ? 2 : 1);
  if (has_intervals(s))
    visit("INTERVALS", s.intervals);
}
template <typename Visitor> void visit_places(const AttentionSpec& s, Visitor&& visit) {
  visit("HEAD_DIM", width(s));
  visit("PACKED", s.packed);
}

/// Whether dQ is summed in FP16, with one factor per query.
inline bool sums_dq_in_fp16(const AttentionSpec& s) { return s.dq_sums == DqSums::fp16; }
/// Whether dP is summed in FP16, from copies of V and dO.
inline bool sums_dp_in_fp16(const AttentionSpec& s) { return s.dp_sums == DpSums::fp16; }

/// The fields that describe tensors, for kernels that depend on no other field.
inline AttentionSpec without_numerics(const AttentionSpec& s) {
  return {.head_dim = s.head_dim, .dtype = s.dtype, .packed = s.packed};
}

/// One line, e.g. "d128 bf16 causal=none row 64x128 sink_keys=1 six-of-seven smooth_k rotate
/// deterministic numerics=5".
inline std::string to_string(const AttentionSpec& spec) { return line_of(spec); }
/// The inverse of to_string(). If a line has "numerics=", it must be a line that was printed, and a
/// switch that the line does not name, such as rotate, is off. If a line does not have "numerics=",
/// it may have some words in any order, and everything that the line leaves out has its default.
/// Raises SpecError, which names the wrong word.
AttentionSpec parse_spec(std::string_view);

/// A spec with every field checked and every group size filled in. Only resolved() can make a
/// ResolvedSpec, so that functions with such an argument need no checks.
class ResolvedSpec {
public:
  /// Returns this spec with one of the two backwards. A split one is always deterministic. Raises
  /// SpecError if the spec cannot have that backward.
  ResolvedSpec with(Backward) const;
  /// Returns this spec of attention to listed blocks alone, as kernels have it.
  ResolvedSpec without_linear() const;
  /// Returns the spec whose tuning records calls of this one take: also without max_logits
  /// and smooth_v.
  ResolvedSpec as_in_records() const;
  const AttentionSpec& operator*() const { return spec_; }
  const AttentionSpec* operator->() const { return &spec_; }
  operator const AttentionSpec&() const { return spec_; }
  bool operator==(const ResolvedSpec&) const = default;

private:
  explicit ResolvedSpec(const AttentionSpec& spec) : spec_(spec) {}
  friend ResolvedSpec resolved(AttentionSpec);
  AttentionSpec spec_;
};

/// Fills in what the granularity decides, and checks every field. Raises SpecError. The result does
/// not depend on the architecture, so that a call has the same numerics on every GPU.
ResolvedSpec resolved(AttentionSpec);

/// Whether the rows of dO are divided by powers of two, so that they have similar magnitudes,
/// before dV is formed in INT8. The kernels then read a copy of dO with the divided rows.
inline bool scales_dout(const AttentionSpec& s) {
  return !grouping_of(s.granularity).one_scale && which_int8(s.precision).dv;
}
/// Whether a fused backward adds up dQ in a fixed order, so that it is deterministic. The kernel
/// for INT8 gradients does (templates/kernels/backward_fused.cuh).
inline bool orders_dq(const AttentionSpec& s) {
  return which_int8(s.precision).dq && which_int8(s.precision).dv;
}
/// Whether one kernel may form all three gradients. If a group has one scale, only backward_dq
/// finds the scales of dS. For heads wider than kWidestFused registers do not suffice. Over lists
/// of blocks only the split kernels walk.
inline bool may_fuse_backward(const AttentionSpec& s) {
  return s.gradient_kernels != Backward::split && width(s) <= kWidestFused && !is_sparse(s) &&
         !has_score(s) && !(grouping_of(s.granularity).one_scale && which_int8(s.precision).dq) &&
         (!s.deterministic || orders_dq(s));
}
/// Whether one kernel forms all three gradients, of a spec that says which (Operation::built()).
inline bool is_fused(const AttentionSpec& s) { return s.gradient_kernels == Backward::fused; }
/// The tokens that share a channel's scale in the transposed copies of Q and dO, or of K and V.
inline int channel_tokens_q(const AttentionSpec& s) {
  const int tokens = grouping_of(s.granularity).channel_tokens;
  return tokens ? tokens : s.group_q;
}
inline int channel_tokens_kv(const AttentionSpec& s) {
  const int tokens = grouping_of(s.granularity).channel_tokens;
  return tokens ? tokens : s.group_kv;
}

} // namespace sagebwd
