//===- layouts_test.cpp - What lies where in shared memory -----------------===//

#include "generator/kernels/attention.h"
#include "generator/space.h"
#include "templates/layouts/backward_dkv.cuh"
#include "templates/layouts/backward_dkv_pair.cuh"
#include "templates/layouts/backward_dkv_pair16.cuh"
#include "templates/layouts/backward_dkv_ws.cuh"
#include "templates/layouts/backward_dq.cuh"
#include "templates/layouts/backward_dq_pair.cuh"
#include "templates/layouts/backward_dq_ws.cuh"
#include "templates/layouts/backward_fused.cuh"
#include "templates/layouts/backward_ws.cuh"
#include "templates/layouts/forward.cuh"
#include "templates/layouts/forward_ws.cuh"
#include "tests/generator/specs.h"

#include <map>

using namespace sagebwd;
using attention::shape_of;
using enum KernelKind;

namespace {

int bytes_of(KernelKind kind, const char* tile, int head_dim,
             Precision precision = Precision::six_of_seven) {
  AttentionSpec s;
  s.head_dim = head_dim;
  s.precision = precision;
  s.deterministic = kind != backward;
  const KernelSpec k = tiled_kernel(kind, resolved(s), find_arch("sm_90a"), parse_tile(tile));
  check_tile(k);
  return shared_bytes(kind, k.attention, k.tile);
}

TEST(Layouts, TakeWhatTheirPartsTake) {
  // Q; K; transposed V; two vectors of channels for two runs.
  EXPECT_EQ(bytes_of(forward, "mma 64x128 w4 s1 b2", 128), 8192 + 16384 + 16384 + 2 * 2 * 512);
  // K and V; two stages of Q, dO, transposed Q and dO, vectors of the queries and what dP starts
  // from; ones; units of three runs; ratios of eight warps; and barriers.
  EXPECT_EQ(bytes_of(backward_dkv, "ws 64x128 w8 s2 b1", 128),
            16384 + 32768 + 2 * (8192 + 16384 + 8192 + 8192 + 1024 + 1024) + 2048 + 3 * 2048 +
                8 * 512 + 2 * 16 + 2 * 8 + 8);
  // Ones; Q and dO; K, V and transposed K; dS; units of two runs, ratios, maxima and scales of
  // keys; and barriers.
  EXPECT_EQ(bytes_of(backward_dq, "pair 64x128 w8 s1 b1", 256),
            1024 + 16384 + 32768 + 32768 + 65536 + 32768 + 8192 + 4096 + 4096 + 512 + 128 + 32 +
                32 + 16 + 8);
  // V and K for dQ; Q and dO, as rows and transposed, and vectors of the queries; units of three
  // runs; maxima and inverse scales of dS, scales of K; and a counter. GeForce has 101376.
  EXPECT_EQ(bytes_of(backward, "mma 64x128 w8 s1 b1", 128), 32768 + 16384 + 8192 + 16384 + 8192 +
                                                                8192 + 1024 + 3 * 2048 + 2 * 256 +
                                                                8 * 256 + 512 + 16);
  // K, in 8 and in 16 bits, and V; dS twice and dQ; two stages of Q in 8 and in 16 bits, dO and
  // vectors of the queries; and barriers.
  EXPECT_EQ(bytes_of(backward, "ws 64x128 w8 s2 b1", 64, Precision::gradients16),
            8192 + 16384 + 16384 + 2 * 16384 + 16384 + 2 * (4096 + 8192 + 8192 + 1024) + 64 + 16);
}

/// Bytes from an offset on must lie together.
struct Part {
  int offset, bytes;
  int alignment = 1024; ///< tiles are swizzled
};
constexpr int kVectors = 16, kBarriers = 8, kMessages = 4; ///< alignments

/// The parts of a kernel's layout in order, with sizes that are computed here, and its total.
class Parts {
public:
  Parts(KernelKind kind, const AttentionSpec& s, const TileConfig& t)
      : s_(s), t_(t), shape_(shape_of(s, t)), own_warps_(t.warps) {
    if (kind == KernelKind::forward)
      t.family == Family::ws ? forward_ws(ForwardWsLayout(shape_)) : forward(ForwardLayout(shape_));
    else if (kind == KernelKind::backward_dq)
      t.family == Family::ws     ? dq_ws(BackwardDqWsLayout(shape_))
      : t.family == Family::pair ? dq_pair(BackwardDqPairLayout(shape_))
                                 : dq();
    else if (kind == KernelKind::backward && t.family == Family::ws)
      fused_ws(BackwardWsLayout(shape_, sums_dq_in_fp16(s)));
    else if (kind == KernelKind::backward && int8_.dq)
      fused(BackwardFusedLayout(shape_));
    else if (t.family == Family::ws)
      dkv_ws(BackwardDkvWsLayout(shape_));
    else if (t.family == Family::pair)
      int8_.dk ? dkv_pair(BackwardDkvPairLayout(shape_))
               : dkv_pair16(BackwardDkvPair16Layout(shape_));
    else
      dkv(BackwardDkvLayout(shape_, kind == KernelKind::backward, sums_dp_in_fp16(s)));
  }

  int total() const { return total_; }

  /// None begins before the one before it ends, or leaves more unused than alignment may take.
  void expect_in_order() const {
    int end = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      if (part.bytes == 0)
        continue;
      ASSERT_GE(part.offset, end) << "part " << i;
      ASSERT_LT(part.offset - end, 1024) << "part " << i;
      ASSERT_EQ(part.offset % part.alignment, 0) << "part " << i;
      end = part.offset + part.bytes;
    }
    end = std::max(end, end_of_rows_);
    ASSERT_LE(end, total_);
    ASSERT_LT(total_ - end, 1024);
  }

private:
  void forward(const ForwardLayout& at) {
    parts_ = {{at.queries, t_.block_q * score_},
              {at.keys, t_.stages * s_.group_kv * score_},
              {at.values, t_.stages * s_.group_kv * d_},
              {at.channel_scales, blocks_ ? 0 : 2 * 2 * d_ * 4, kVectors}};
    total_ = at.total;
  }
  void forward_ws(const ForwardWsLayout& at) {
    parts_ = {{at.queries, (lists_ ? 2 : 1) * t_.block_q * d_},
              {at.keys, t_.stages * s_.group_kv * d_},
              {at.values, t_.stages * s_.group_kv * d_},
              {at.key_scales, t_.stages * 16 * 4, kVectors},
              {at.channel_scales, blocks_ ? 0 : (1 + runs_of(s_.group_kv)) * 2 * d_ * 4, kVectors},
              {at.ratios, blocks_ ? 0 : own_warps_ * d_ * 4, kVectors},
              {at.magics, 4096, kVectors},
              {at.barriers, t_.stages * 16, kBarriers},
              {at.queries_came, lists_ ? 2 * 16 : 8, kBarriers},
              {at.messages, lists_ ? t_.stages * 4 : 0, kMessages}};
    total_ = at.total;
  }
  void dq() {
    const bool held = t_.family == Family::mma && blocks_ && !int8_.s;
    const BackwardDqLayout at(shape_, held);
    const int group = int8_.dq ? s_.group_kv : 64, times = t_.stages == 2 && group == 64 ? 2 : 1;
    const List rows = {{at.queries, t_.block_q * score_}, {at.dout, t_.block_q * 2 * d_}};
    const int summed = times * group * part_ * (int8_.dq ? 1 : 2);
    const int places = std::max(t_.stages, 1);
    const bool turns = t_.stages == 0; // the summed keys lie where 8-bit keys were
    if (turns) {
      EXPECT_EQ(at.summed, at.keys);
      EXPECT_LE(summed, 64 * score_);
    }
    parts_ = {{at.keys, places * 64 * score_},
              {at.values, places * 64 * 2 * d_},
              {at.summed, turns ? 0 : summed},
              {at.key_scales, int8_.s ? places * 16 * 4 : 0, kVectors},
              {at.maxima, blocks_ && int8_.dq ? 2 * t_.warps * 8 : 0, kBarriers}};
    if (!held) // else keys come to their place
      parts_.insert(parts_.begin(), rows.begin(), rows.end());
    total_ = at.total;
    if (held) {
      EXPECT_EQ(at.dout, t_.block_q * score_);
      end_of_rows_ = at.dout + t_.block_q * 2 * d_;
    }
  }
  void dq_ws(const BackwardDqWsLayout& at) {
    const int step = int8_.dq ? s_.group_kv : 128;
    parts_ = {{at.ones, 1024},
              {at.queries, t_.block_q * d_},
              {at.dout, t_.block_q * 2 * d_},
              {at.keys, t_.stages * step * d_},
              {at.values, t_.stages * step * 2 * d_},
              {at.summed, t_.stages * step * d_ * (int8_.dq ? 1 : 2)},
              {at.key_scales, t_.stages * 16 * 4, kVectors},
              {at.channel_scales, int8_.dq ? (1 + runs_of(step)) * 2 * d_ * 4 : 0, kVectors},
              {at.ratios, int8_.dq ? own_warps_ * d_ * 4 : 0, kVectors},
              {at.barriers, t_.stages * 16, kBarriers},
              {at.rows_came, 8, kBarriers}};
    total_ = at.total;
  }
  void dq_pair(const BackwardDqPairLayout& at) {
    const int units = int8_.dq ? 1 : 0;
    parts_ = {{at.ones, 1024},
              {at.queries, 64 * d_},
              {at.dout, 64 * 2 * d_},
              {at.keys, t_.stages * 128 * d_},
              {at.values, 128 * 2 * d_},
              {at.summed, 128 * d_ * (int8_.dq ? 1 : 2)},
              {at.score_gradients, 128 * 64 * (int8_.dq ? 1 : 2)},
              {at.channel_scales, units * 2 * 2 * d_ * 4, kVectors},
              {at.ratios, units * 8 * d_ / 2 * 4, kVectors},
              {at.maxima, units * 2 * 64 * 4, kVectors},
              {at.key_scales, t_.stages * 2 * 16 * 4, kVectors},
              {at.key_barriers, 2 * t_.stages * 16, kBarriers},
              {at.value_barriers, 2 * 16, kBarriers},
              {at.summed_barriers, 16, kBarriers},
              {at.rows_came, 8, kBarriers}};
    total_ = at.total;
  }
  void dkv(const BackwardDkvLayout& at) {
    parts_ = {{at.keys, t_.block_kv * score_}, {at.values, t_.block_kv * 2 * d_}};
    if (at.with_dq) {
      parts_.push_back({at.dq, t_.block_kv * d_ * 2});
      parts_.push_back({at.dq + at.ds, t_.block_kv * 64 * 2});
    }
    const int of_dk = 64 * part_ * (int8_.dk ? 1 : 2);
    // In 16 bits the rows for dP serve, unless these are in FP16.
    const int of_dv = int8_.dv ? 64 * part_ : at.dp16 ? 64 * 2 * part_ : 0;
    // Both lie where Q was and, if dO's is late, where its rows were, which come in halves.
    const bool turns = t_.stages == 0;
    if (turns) {
      EXPECT_EQ(at.dk_queries, at.queries);
      EXPECT_EQ(at.dv_dout, at.queries + of_dk);
      const int rows_of_dout = (int8_.dv ? 32 : 64) * 2 * d_;
      EXPECT_LE(of_dk + of_dv, 64 * score_ + (at.dv_dout_is_late ? rows_of_dout : 0));
    }
    for (int i = 0; i < std::max(t_.stages, 1); ++i) {
      const int stage = at.first_stage + i * at.stage_bytes;
      parts_.push_back({stage + at.queries, 64 * score_});
      parts_.push_back({stage + at.dout, (turns && int8_.dv ? 32 : 64) * 2 * d_});
      parts_.push_back({stage + at.dk_queries, turns ? 0 : of_dk});
      parts_.push_back({stage + at.dv_dout, turns ? 0 : of_dv});
      parts_.push_back({stage + at.rows, 4 * 64 * 4});
    }
    parts_.push_back({at.channel_scales, 3 * unit_bytes(), kVectors});
    total_ = at.total;
  }
  /// dS lies where dO for dV was, and 8-bit keys where transposed tiles come.
  void fused(const BackwardFusedLayout& at) {
    const int keys = t_.block_kv * score_;
    const bool behind = !int8_.s || 64 * d_ + std::max(t_.block_kv * 64, 64 * d_) < keys;
    parts_ = {{at.values, t_.block_kv * 2 * d_},
              {at.dq_keys, t_.block_kv * d_},
              {at.queries, 64 * score_},
              {at.dout, 64 * 2 * d_},
              {at.dk_queries, 64 * d_},
              {at.dv_dout, std::max(t_.block_kv * 64, 64 * d_)},
              {behind ? at.keys : 0, behind ? keys : 0},
              {at.rows, 4 * 64 * 4},
              {at.channel_scales, 3 * unit_bytes(), kVectors},
              {at.maxima, 2 * 64 * 4, kVectors},
              {at.inverses, t_.warps * 64 * 4, kVectors},
              {at.channels, d_ * 4, kVectors},
              {at.order, 4, kVectors}};
    total_ = at.total;
    EXPECT_EQ(at.ds, at.dv_dout);
    EXPECT_EQ(at.keys_leave, !behind);
    if (!behind)
      EXPECT_EQ(at.keys, at.dk_queries);
  }
  void dkv_ws(const BackwardDkvWsLayout& at) {
    parts_ = {{at.keys, t_.block_kv * d_}, {at.values, t_.block_kv * 2 * d_}};
    for (int i = 0; i < t_.stages; ++i) {
      const int stage = at.first_stage + i * at.stage_bytes;
      parts_.push_back({stage + at.queries, 64 * d_});
      parts_.push_back({stage + at.dout, 64 * 2 * d_});
      parts_.push_back({stage + at.dk_queries, 64 * d_ * (int8_.dk ? 1 : 2)});
      parts_.push_back({stage + at.dv_dout, int8_.dv ? 64 * d_ : 0});
      parts_.push_back({stage + at.rows, 4 * 64 * 4});
      parts_.push_back({stage + at.starts, 64 * 16, kVectors});
    }
    for (const Part& part : List{{at.ones, 2048, kVectors},
                                 {at.channel_scales, (t_.stages + 1) * unit_bytes(), kVectors},
                                 {at.ratios, unit_bytes() > 0 ? own_warps_ * d_ * 4 : 0, kVectors},
                                 {at.barriers, t_.stages * 16, kBarriers},
                                 {at.started, t_.stages * 8, kBarriers},
                                 {at.keys_came, 8, kBarriers},
                                 {at.messages, lists_ ? t_.stages * 4 : 0, kMessages}})
      parts_.push_back(part);
    total_ = at.total;
  }
  void pairs(const QueryPairsLayout& at) {
    parts_ = {{at.keys, 64 * d_}, {at.values, 64 * 2 * d_}};
    for (int tile : {at.tiles, at.tiles + at.tile_bytes}) {
      parts_.push_back({tile + at.tile_queries, 64 * d_});
      parts_.push_back({tile + at.tile_dout, 64 * 2 * d_});
      parts_.push_back({tile + at.tile_rows, 4 * 64 * 4});
    }
  }
  void dkv_pair(const BackwardDkvPairLayout& at) {
    pairs(at);
    for (const Part& part :
         List{{at.first_piece, 3 * 64 * d_},
              // P and dS in 8 bits and two scales a thread of each, from both warpgroups
              {at.handed, 2 * (2 * 64 * 64 + 2 * 128 * 8), kVectors},
              {at.channel_scales, 2 * 2 * unit_bytes(), kVectors},
              {at.tile_barriers, 2 * 16, kBarriers},
              {at.piece_barriers, 3 * 16, kBarriers},
              {at.ready, 16, kBarriers},
              {at.taken, 16, kBarriers},
              {at.keys_came, 8, kBarriers}})
      parts_.push_back(part);
    total_ = at.total;
  }
  void dkv_pair16(const BackwardDkvPair16Layout& at) {
    pairs(at);
    for (const Part& part : List{{at.queries, 2 * 64 * 2 * d_},
                                 {at.handed, 2 * 64 * 64 * 2},
                                 {at.tile_barriers, 2 * 16, kBarriers},
                                 {at.query_barriers, 2 * 16, kBarriers},
                                 {at.ready, 16, kBarriers},
                                 {at.taken, 16, kBarriers},
                                 {at.keys_came, 8, kBarriers}})
      parts_.push_back(part);
    total_ = at.total;
  }
  void fused_ws(const BackwardWsLayout& at) {
    const int sum = sums_dq_in_fp16(s_) ? 2 : 4;
    parts_ = {{at.keys, 128 * d_},
              {at.values, 128 * 2 * d_},
              {at.key_rows, 128 * 2 * d_},
              {at.ds, 2 * 128 * 64 * 2},
              {at.dq, 64 * d_ * sum, kVectors}};
    for (int i = 0; i < t_.stages; ++i) {
      const int stage = at.first_stage + i * at.stage_bytes;
      parts_.push_back({stage + at.queries, 64 * d_});
      parts_.push_back({stage + at.dout, 64 * 2 * d_});
      parts_.push_back({stage + at.rows, 3 * 64 * 4}); // the fourth vector's place is used
      parts_.push_back({stage + at.tile, 8, kBarriers});
      parts_.push_back({stage + at.factors, sum == 2 ? 64 * 2 : 0, kVectors});
      parts_.push_back({stage + at.query_rows, 64 * 2 * d_});
    }
    for (const Part& part : List{{at.barriers, 2 * t_.stages * 16, kBarriers},
                                 {at.kept_came, 8, kBarriers},
                                 {at.ds_written, 8, kBarriers}})
      parts_.push_back(part);
    total_ = at.total;
  }

  /// A run of dK and dV has two vectors of Q's channels, and two of dO's.
  int unit_bytes() const {
    return blocks_ || !(int8_.dk || int8_.dv)
               ? 0
               : 4 * (t_.family == Family::pair ? d_ / 2 : part_) * 4;
  }
  /// Runs that can begin in the stages of a ring: with lists each of one step.
  int runs_of(int step) const {
    const int steps = lists_ ? 1 : channel_tokens_kv(s_) / step;
    return (t_.stages + steps - 1) / steps;
  }

  using List = std::vector<Part>;
  const AttentionSpec& s_;
  const TileConfig& t_;
  BlockShape shape_;
  int own_warps_;
  Int8Products int8_ = which_int8(s_.precision);
  bool blocks_ = s_.granularity == Granularity::block, lists_ = s_.sparse_q > 0;
  int d_ = width(s_), part_ = std::min(d_, 128), score_ = int8_.s ? d_ : 2 * d_;
  List parts_;
  int total_ = 0;
  int end_of_rows_ = 0; ///< that registers hold later
};

TEST(Layouts, HaveRoomForEveryPart) {
  std::vector<AttentionSpec> specs = test::all_specs();
  for (AttentionSpec spec : test::all_specs())
    if (spec.head_dim <= 128 && spec.granularity == Granularity::row) {
      spec.deterministic = false; // for kernels of all gradients
      specs.push_back(spec);
    }
  for (Granularity granularity : {Granularity::row, Granularity::block})
    for (int head_dim : {64, 128, 256}) {
      specs.emplace_back();
      specs.back().head_dim = head_dim, specs.back().granularity = granularity;
      specs.back().sparse_q = specs.back().sparse_kv = 128;
    }
  specs.push_back(test::with_fp16_sums());
  for (const auto& [precision, word] : Words<Precision>::all)
    for (bool deterministic : {true, false}) {
      specs.push_back(test::with_half_dp());
      specs.back().precision = precision, specs.back().deterministic = deterministic;
    }
  std::map<std::string, int> tiles;
  for (const AttentionSpec& spec : specs)
    for (KernelKind kind : {forward, backward_dq, backward_dkv, backward})
      for (Family family : families_of(kind))
        for (int warps : tiling_of(kind, family).warps)
          for (int stages : tiling_of(kind, family).stages) {
            const ResolvedSpec s = resolved(spec);
            const TileConfig tile = tile_with(kind, s, family, warps, stages, 1);
            const Tiling& tiling = tiling_of(kind, family);
            if (!tiling.objection(s, tile).empty() || spec.head_dim > 256 ||
                family == Family::team) // see very_wide_test.cpp
              continue;
            SCOPED_TRACE(std::string(to_string(kind)) + " of " + to_string(*s) + " by " +
                         to_string(tile));
            const Parts parts(kind, s, tile);
            ASSERT_NO_FATAL_FAILURE(parts.expect_in_order());
            ASSERT_EQ(parts.total(), tiling.shared_bytes(s, tile));
            ++tiles[std::string(to_string(kind)) + " " + value_text(family)];
          }
  for (const auto& [kernel, count] : tiles)
    EXPECT_GT(count, kernel == "backward ws" ? 50 : 100) << kernel;
  EXPECT_EQ(tiles.size(), 13u);
}

} // namespace
