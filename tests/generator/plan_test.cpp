//===- plan_test.cpp - Workspace and launch geometry -----------------------===//

#include "generator/definition.h"
#include "tests/generator/specs.h"

#include <algorithm>
#include <map>
#include <set>

using namespace sagebwd;
using test::expect_refusal;
using enum KernelKind;
using O = Operand;

namespace {

constexpr Pass kBothPasses[] = {Pass::forward, Pass::backward};
const std::set<O> kWorkspace = {O::k_partial,    O::k_mean,     O::q8,         O::k8,
                                O::k8_scale,     O::vt8,        O::vt8_scale,  O::qt8,
                                O::kt8,          O::kt8_scale,  O::qt8_scale,  O::dot8,
                                O::q_rows,       O::dot8_scale, O::dout_rows,  O::k_rows,
                                O::sink_partial, O::tile_p_max, O::tile_ds_max};

const Problem kProblems[] = {{1, 1, 1, 1, 1},
                             {2, 4, 2, 64, 128},
                             {3, 6, 2, 129, 257},
                             {1, 8, 1, 1000, 77},
                             {2, 2, 2, 4096, 300}};

/// The workspace that kernels of a pass dereference, by the contract of the copies.
std::set<O> dereferenced(Pass pass, const AttentionSpec& s) {
  const Int8Products int8 = which_int8(s.precision);
  const bool backward = pass == Pass::backward;
  std::set<O> used = {O::q_rows};
  if (int8.s)
    used.insert({O::q8, O::k8, O::k8_scale});
  if (s.smooth_k && (int8.s || backward))
    used.insert({O::k_partial, O::k_mean});
  if (!backward) {
    used.insert({O::vt8, O::vt8_scale});
    return used;
  }
  if (int8.dk)
    used.insert({O::qt8, O::qt8_scale});
  if (int8.dv)
    used.insert({O::dot8, O::dot8_scale});
  if (int8.dq)
    used.insert({O::kt8, O::kt8_scale});
  else
    used.insert(O::k_rows);
  if (s.granularity == Granularity::block)
    used.insert({O::tile_p_max, O::tile_ds_max});
  else if (int8.dv)
    used.insert(O::dout_rows);
  if (s.sink_keys > 0)
    used.insert(O::sink_partial);
  return used;
}

/// The least a buffer must hold, from the layouts in templates/base.cuh and kernels/.
int64_t least_bytes(O operand, const AttentionSpec& s, const Problem& p) {
  const auto groups = [](int64_t tokens, int64_t group) { return (tokens + group - 1) / group; };
  const int64_t d = s.head_dim, heads = p.batch * p.heads, heads_kv = p.batch * p.heads_kv;
  // The copies hold whole tiles of 128 tokens.
  const int64_t tokens_q = groups(p.seq_q, 128) * 128, tokens_kv = groups(p.seq_kv, 128) * 128;
  switch (operand) {
  case O::k_partial:
    return heads_kv * std::min<int64_t>(16, groups(p.seq_kv, 256)) * d * 4;
  case O::k_mean:
    return heads_kv * d * 4;
  case O::q8:
  case O::qt8:
  case O::dot8:
    return heads * tokens_q * d;
  case O::dout_rows:
    return heads * tokens_q * d * 2;
  case O::k_rows:
    return heads_kv * tokens_kv * d * 2;
  case O::k8:
  case O::vt8:
  case O::kt8:
    return heads_kv * tokens_kv * d;
  case O::k8_scale:
    return heads_kv * tokens_kv / 8 * 4;
  case O::vt8_scale:
  case O::kt8_scale:
    return heads_kv * groups(tokens_kv, channel_tokens_kv(s)) * 2 * d * 4;
  case O::qt8_scale:
  case O::dot8_scale:
    return heads * groups(tokens_q, channel_tokens_q(s)) * 2 * d * 4;
  case O::q_rows:
    return heads * tokens_q * 4 * 4;
  case O::sink_partial:
    return heads * groups(tokens_q, channel_tokens_q(s)) * 2 * d * 4;
  default: // maxima of tiles
    return heads * groups(p.seq_q, s.group_q) * groups(p.seq_kv, s.group_kv) * 4;
  }
}

TEST(Workspace, SumsOfKeysAreFewHoweverLongTheSequence) {
  EXPECT_EQ(mean_chunks(1), 1);
  EXPECT_EQ(mean_chunks(257), 2);
  EXPECT_EQ(mean_chunks(4096), 16);
  EXPECT_EQ(mean_chunks(4097), 13); // of 320 keys
  EXPECT_EQ(mean_chunks((int64_t{1} << 31) - 1024), 16);
}

TEST(Workspace, HoldsEachBufferOnceAlignedAndWithoutOverlap) {
  constexpr uint64_t kBase = uint64_t{1} << 40, kNowhere = 7;
  for (const AttentionSpec& spec : test::all_specs())
    for (const Problem& p : kProblems)
      for (Pass pass : kBothPasses) {
        const ResolvedSpec s = resolved(spec);
        SCOPED_TRACE(to_string(*s) + ", " + std::string(to_string(pass)));
        OperandValues values;
        values.fill(kNowhere);
        place_workspace(pass, s, p, kBase, values);
        const size_t bytes = workspace_bytes(pass, s, p);

        std::vector<std::pair<uint64_t, O>> placed;
        for (O operand : kWorkspace)
          if (get(values, operand) != kNowhere)
            placed.emplace_back(get(values, operand), operand);
        for (O operand : dereferenced(pass, s))
          EXPECT_NE(get(values, operand), kNowhere) << name_of(operand);
        std::sort(placed.begin(), placed.end());
        EXPECT_EQ(placed.front().first, kBase);
        for (size_t i = 0; i < placed.size(); ++i) {
          const auto [address, operand] = placed[i];
          const uint64_t end = i + 1 < placed.size() ? placed[i + 1].first : kBase + bytes;
          EXPECT_EQ(address % 256, 0u) << name_of(operand);
          EXPECT_GE(int64_t(end - address), least_bytes(operand, s, p)) << name_of(operand);
        }
        for (O tensor : {O::q, O::k, O::v, O::out, O::lse, O::dout, O::dlse, O::dq, O::dk, O::dv,
                         O::q_stride_b, O::softmax_scale})
          EXPECT_EQ(get(values, tensor), kNowhere) << name_of(tensor);
      }
}

TEST(Workspace, BorrowsFromAResultWhatNoKernelHasFromThenOn) {
  const Problem p = {2, 4, 2, 384, 512};
  // The buffers in a result of so many bytes.
  const auto borrowed = [&](const AttentionSpec& spec, O result, size_t bytes) {
    const ResolvedSpec s = resolved(spec);
    const Workspace workspace = lay_out(Pass::backward, s, p, {{result, bytes}});
    EXPECT_EQ(workspace.placements.size(), lay_out(Pass::backward, s, p).placements.size());
    std::map<uint64_t, O> placed;
    for (const auto& [buffer, in, offset] : workspace.placements)
      if (in == result)
        EXPECT_TRUE(placed.emplace(offset, buffer).second) << name_of(buffer);
    std::set<O> found;
    for (auto at = placed.begin(); at != placed.end(); ++at) {
      const auto next = std::next(at);
      EXPECT_EQ(at->first % 256, 0u);
      EXPECT_GE(static_cast<int64_t>((next == placed.end() ? bytes : next->first) - at->first),
                least_bytes(at->second, s, p))
          << name_of(at->second);
      found.insert(at->second);
    }
    if (!found.empty())
      EXPECT_LT(workspace.bytes, workspace_bytes(Pass::backward, s, p));
    return found;
  };
  const size_t bytes_q = 2 * 4 * 384 * 128 * 2, bytes_k = 2 * 2 * 512 * 128 * 2;
  AttentionSpec spec; // D128, six-of-seven
  EXPECT_EQ(borrowed(spec, O::dq, bytes_q), (std::set<O>{O::qt8, O::dot8}));
  const std::set<O> less = borrowed(spec, O::dq, bytes_q - 256);
  EXPECT_TRUE(less.contains(O::qt8) && !less.contains(O::dot8));
  EXPECT_TRUE(borrowed(spec, O::dq, 0).empty());
  for (O needed : {O::k8, O::kt8, O::q8})
    EXPECT_FALSE(borrowed(spec, O::dk, bytes_k).contains(needed)) << name_of(needed);
  spec.granularity = Granularity::block; // dQ's kernel goes first
  EXPECT_FALSE(borrowed(spec, O::dq, bytes_q).contains(O::dot8));
  EXPECT_TRUE(borrowed(spec, O::dk, bytes_k).contains(O::k_partial));
  AttentionSpec fused;
  fused.deterministic = false, fused.precision = Precision::gradients16;
  fused.gradient_kernels = Backward::fused;
  EXPECT_TRUE(borrowed(fused, O::dq, bytes_q).contains(O::k8));
  EXPECT_FALSE(borrowed(fused, O::dq, bytes_q).contains(O::dq_sum));
}

TEST(Workspace, SizesComeAlong) {
  OperandValues values{};
  AttentionSpec s;
  s.causal = Causal::bottom_right;
  place_workspace(Pass::forward, resolved(s), {2, 6, 3, 129, 100}, 0, values);
  const auto value = [&](O operand) { return static_cast<int>(get(values, operand)); };
  EXPECT_EQ(value(O::heads), 6);
  EXPECT_EQ(value(O::heads_kv), 3);
  EXPECT_EQ(value(O::seq_q), 129);
  EXPECT_EQ(value(O::seq_kv), 100);
  EXPECT_EQ(value(O::padded_q), 256);
  EXPECT_EQ(value(O::padded_kv), 128);
  EXPECT_EQ(value(O::causal_offset), -29);
  s.causal = Causal::top_left;
  place_workspace(Pass::forward, resolved(s), {2, 6, 3, 129, 100}, 0, values);
  EXPECT_EQ(value(O::causal_offset), 0);
}

TEST(MaskEdges, CountFromAQuerysOwnIndex) {
  struct {
    Causal causal;
    int left, right;
    int64_t first, last;
  } cases[] = {{Causal::top_left, -1, -1, -129, 0},
               {Causal::bottom_right, -1, -1, -129, -29},
               {Causal::top_left, 10, -1, -10, 0},
               {Causal::bottom_right, 10, 7, -39, -29},
               {Causal::none, -1, -1, -129, 100},
               {Causal::none, 10, 7, -39, -22},
               {Causal::none, 0, -1, -29, 100},
               {Causal::none, -1, 0, -129, -29},
               {Causal::none, 2147483647, 2147483647, -129, 100}};
  for (const auto& c : cases) {
    AttentionSpec s;
    s.causal = c.causal, s.window_left = c.left, s.window_right = c.right;
    for (const AttentionSpec& spec : {s, *resolved(s)}) {
      const MaskEdges edges = mask_edges(spec, 129, 100);
      EXPECT_EQ(edges.first, c.first) << to_string(spec);
      EXPECT_EQ(edges.last, c.last) << to_string(spec);
    }
  }
}

TEST(Grid, CoversEveryToken) {
  const Problem p = {2, 6, 3, 300, 520};
  const auto grid = [&](KernelKind kind, Pass pass, Granularity granularity = Granularity::row) {
    AttentionSpec s;
    s.granularity = granularity, s.smooth_q = kind == mean_scores;
    const Grid g = grid_of(test::kernel_of(kind, pass, s, "sm_80"), p);
    return std::array<unsigned, 3>{g.x, g.y, g.z};
  };
  using Blocks = std::array<unsigned, 3>;
  EXPECT_EQ(grid(key_mean, Pass::forward), (Blocks{3, 3, 2})); // 256 keys each
  // 2 units of 384 padded queries, and 2 for each of K and V: a head has 3, and 2 heads of queries.
  EXPECT_EQ(grid(quantize, Pass::forward), (Blocks{6, 6, 2}));
  EXPECT_EQ(grid(quantize, Pass::backward), (Blocks{4, 6, 2}));
  EXPECT_EQ(grid(quantize, Pass::backward, Granularity::block), (Blocks{3 + 5, 6, 2}));
  EXPECT_EQ(grid(mean_scores, Pass::forward), (Blocks{5, 6, 2})); // 128 keys each
  EXPECT_EQ(grid(forward, Pass::forward), (Blocks{5, 6, 2}));
  EXPECT_EQ(grid(backward_dq, Pass::backward, Granularity::block), (Blocks{3, 6, 2}));
  EXPECT_EQ(grid(backward_dkv, Pass::backward), (Blocks{9, 3, 2}));
}

TEST(Grid, BlocksTakeItemsOverLists) {
  AttentionSpec lists;
  lists.sparse_q = lists.sparse_kv = 128;
  const auto blocks = [](AttentionSpec s, KernelKind kind, Pass pass, int sms, const Problem& p) {
    s.gradient_kernels = Backward::split;
    return grid_on(sms, test::kernel_of(kind, pass, s, "sm_90a"), p).x;
  };
  const auto of = [&](const AttentionSpec& s, int sms, const Problem& p) {
    return blocks(s, forward, Pass::forward, sms, p);
  };
  const Problem large = {1, 16, 16, 32768, 32768}; // 256 blocks of queries a head
  EXPECT_EQ(of(lists, 132, large), 32u);           // 8 each: 512 blocks, 3.9 rounds
  EXPECT_EQ(of(lists, 66, large), 16u);            // 16 each, the most
  EXPECT_EQ(of(lists, 1100, large), 256u);         // of 2 each there were 1.9 rounds
  EXPECT_EQ(of(lists, 4, {1, 2, 1, 1, 32768}), 1u);
  EXPECT_EQ(of(lists, 4, {1, 16, 1, 129, 128}), 1u); // both of a head
  EXPECT_EQ(of({}, 132, large), 171u);               // 192 queries each, without lists
  for (KernelKind kind : {backward_dq, backward_dkv})
    EXPECT_EQ(blocks(lists, kind, Pass::backward, 132, large), 256u);
  AttentionSpec by_wgmma = lists; // without a copier
  by_wgmma.causal = Causal::top_left;
  EXPECT_EQ(of(by_wgmma, 132, large), 512u);
}

TEST(Check, ProblemsNoKernelRunsAreRefused) {
  const auto checking = [](Problem p, Granularity granularity = Granularity::row) {
    AttentionSpec s;
    s.granularity = granularity;
    return [s = resolved(s), p] { check(s, p); };
  };
  for (const Problem& p : kProblems)
    EXPECT_NO_THROW(checking(p)());
  expect_refusal(checking({0, 1, 1, 1, 1}), {"batch = 0", "1 to 2^24"});
  EXPECT_NO_THROW(checking({1 << 24, 1, 1, 1, 1})());
  expect_refusal(checking({(1 << 24) + 1, 1, 1, 1, 1}), {"batch = 16777217", "1 to 2^24"});
  expect_refusal(checking({1, 0, 1, 1, 1}), {"heads = 0", "1 to 65535"});
  AttentionSpec wide;
  wide.head_dim = 256;
  EXPECT_NO_THROW(check(resolved(wide), {1, 32767, 1, 1, 1}));
  expect_refusal(
      [&] {
        check(resolved(wide), {1, 32768, 1, 1, 1});
      },
      {"heads = 32768", "1 to 32767", "sequences of the batch"});
  expect_refusal(checking({1, 65536, 1, 1, 1}), {"heads = 65536"});
  expect_refusal(checking({1, 4, 0, 1, 1}), {"key/value heads = 0"});
  expect_refusal(checking({1, 4, 3, 1, 1}),
                 {"heads = 4", "key/value heads = 3", "multiple", "same number of query heads"});
  expect_refusal(checking({1, 4, 8, 1, 1}), {"key/value heads = 8"});
  expect_refusal(checking({1, 1, 1, 0, 1}), {"query length = 0", "2^31 - 1024"});
  expect_refusal(checking({1, 1, 1, 1, -5}), {"key length = -5"});
  expect_refusal(checking({1, 1, 1, int64_t{1} << 31, 1}), {"query length = 2147483648"});
  const Problem large = {64, 64, 1, 131072, 131072};
  EXPECT_NO_THROW(checking(large)());
  expect_refusal(checking(large, Granularity::block), {"'block'", "2^31", "'row'"});
  expect_refusal(
      [&] {
        workspace_bytes(Pass::forward, resolved(AttentionSpec()), {0, 1, 1, 1, 1});
      },
      {"batch = 0"});
}

TEST(Workspace, ALargeBatchReusesThatOfALaunch) {
  const ResolvedSpec spec = resolved(AttentionSpec());
  for (Pass pass : kBothPasses) {
    const size_t most = workspace_bytes(pass, spec, {65535, 2, 1, 3, 5});
    EXPECT_EQ(workspace_bytes(pass, spec, {1 << 20, 2, 1, 3, 5}), most);
    EXPECT_LT(workspace_bytes(pass, spec, {65534, 2, 1, 3, 5}), most);
  }
}

TEST(Workspace, BeyondWhatCanBeAddressedIsRefused) {
  const int64_t tokens = (int64_t{1} << 31) - 1024;
  OperandValues values{};
  for (Pass pass : kBothPasses) {
    // One buffer of over 2^62 bytes; then several that are only together.
    for (const Problem& p :
         {Problem{65535, 65535, 65535, 1, tokens}, Problem{65535, 65535, 1, tokens, 1},
          Problem{1 << 14, 1 << 10, 1, tokens, 1}}) {
      expect_refusal([&] { workspace_bytes(pass, resolved(AttentionSpec()), p); },
                     {"2^62 bytes", "smaller batch"});
      expect_refusal([&] { place_workspace(pass, resolved(AttentionSpec()), p, 0, values); },
                     {"2^62 bytes"});
    }
    EXPECT_GT(workspace_bytes(pass, resolved(AttentionSpec()), {1 << 12, 1 << 9, 1, tokens, 1}),
              size_t{1} << 59);
  }
}

} // namespace
