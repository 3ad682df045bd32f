//===- sparse_test.cpp - Specs with lists of blocks -------------------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "templates/layouts/linear.cuh"
#include "tests/generator/specs.h"

#include <gtest/gtest.h>

using namespace sagebwd;
using test::expect_refusal;

namespace {

AttentionSpec sparse(int queries, int keys) {
  AttentionSpec s;
  s.sparse_q = queries, s.sparse_kv = keys;
  return s;
}

TEST(Sparse, NoGroupStraddlesTwoBlocksAndNoKeyIsApart) {
  for (const auto& [keys, group] : {std::pair{64, 64}, {128, 128}}) {
    const ResolvedSpec s = resolved(sparse(128, keys));
    EXPECT_EQ(s->group_kv, group);
    EXPECT_EQ(s->sink_keys, 0);
    EXPECT_EQ(*resolved(*s), *s);
    EXPECT_EQ(parse_spec(to_string(s)), *s);
  }
  AttentionSpec s = sparse(64, 128);
  s.group_kv = 64;
  EXPECT_EQ(resolved(s)->group_kv, 64);
  s = sparse(128, 64), s.granularity = Granularity::block;
  EXPECT_EQ(resolved(s)->group_q, 128);
  EXPECT_EQ(to_string(AttentionSpec()).find("sparse"), std::string::npos);
  EXPECT_EQ(resolved(parse_spec("sparse_kv=64 d64 sparse_q=64"))->sparse_kv, 64);
}

TEST(Sparse, ListsBeyond32BitsAreRefused) {
  // 2^31 words of 32 blocks, by as many blocks of keys as of queries.
  const int64_t most = int64_t{1} << 24;
  EXPECT_NO_THROW(check(resolved(sparse(64, 64)), {1, 1, 1, most - 2048, most}));
  expect_refusal(
      [&] {
        check(resolved(sparse(64, 64)), {1, 1, 1, most, most});
      },
      {"query length = 16777216 and key length = 16777216", "blocks of 64 and 64", "8 GiB",
       "larger blocks"});
  EXPECT_NO_THROW(check(resolved(sparse(128, 128)), {1, 1, 1, most, most}));
  EXPECT_NO_THROW(check(resolved(AttentionSpec()), {1, 1, 1, 2 * most, 2 * most}));
}

TEST(Sparse, WhatIsNotBuiltIsRefused) {
  for (const auto& [queries, keys] : {std::pair{128, 32}, {0, 64}, {64, 0}, {96, 64}, {-64, 64}})
    expect_refusal([&] { resolved(sparse(queries, keys)); },
                   {std::to_string(queries).c_str(), std::to_string(keys).c_str(),
                    "a block has 64 or 128 of each"});
  const auto refused = [](void (*change)(AttentionSpec&),
                          std::initializer_list<const char*> parts) {
    AttentionSpec s = sparse(128, 64);
    change(s);
    expect_refusal([&] { resolved(s); }, parts);
  };
  refused([](auto& s) { s.granularity = Granularity::block, s.sparse_q = 64; },
          {"under 'block'", "take 128 queries"});
  refused([](auto& s) { s.group_kv = 128; }, {"group_kv = 128", "blocks of 64 keys"});
  refused([](auto& s) { s.packed = true; }, {"packed sequences", "a call for each"});
  refused([](auto& s) { s.smooth_q = true; }, {"smooth_q", "leave one"});
  refused([](auto& s) { s.window_left = 5; }, {"a window", "leave one"});
  refused([](auto& s) { s.window_right = 5; }, {"a window", "leave one"});
  refused([](auto& s) { s.sink_keys = 1; }, {"sink_keys = 1", "with lists of blocks", "pass 0"});
  refused([](auto& s) { s.gradient_kernels = Backward::fused; },
          {"gradient_kernels = fused", "with lists of blocks", "split"});
  refused(
      [](auto& s) {
        s.dq_sums = DqSums::fp16, s.deterministic = false, s.precision = Precision::gradients16;
      },
      {"dq_sums = fp16", "with lists of blocks"});
}

/// The backward is split on every GPU, tiles lie in blocks, and kernels without lists are shared.
TEST(Sparse, TilesLieInBlocks) {
  for (const Arch& arch : all_archs())
    for (int queries : kSparseBlocks)
      for (int keys : kSparseBlocks) {
        AttentionSpec s = sparse(queries, keys);
        s.head_dim = 64;
        const Operation operation(resolved(s), arch);
        EXPECT_FALSE(operation.fused());
        AttentionSpec dense = *operation.spec();
        dense.sparse_q = dense.sparse_kv = 0, dense.gradient_kernels = Backward::split;
        const auto of_dense = Operation(resolved(dense), arch).distinct_kernels(true);
        for (const KernelSpec& k : operation.distinct_kernels(true)) {
          if (!definition_of(k).tiling) {
            const std::string_view name = to_string(k.kind);
            const bool of_lists = name.starts_with("pack_") || name.starts_with("linear_") ||
                                  name.starts_with("estimated_") || name == "transpose_bits" ||
                                  name == "order_lists" || name == "pool_blocks" ||
                                  name == "top_blocks" || name == "route_blocks";
            EXPECT_EQ(std::count(of_dense.begin(), of_dense.end(), k), !of_lists);
            continue;
          }
          EXPECT_EQ(queries % k.tile.block_q, 0) << kernel_name(k);
          EXPECT_EQ(keys % k.tile.block_kv, 0) << kernel_name(k);
        }
      }
  expect_refusal(
      [] {
        const AttentionSpec s = *resolved(sparse(64, 64));
        emit(kernel_of(KernelKind::forward, Pass::forward, s, find_arch("sm_80"),
                       parse_tile("mma 128x64 w8 s1 b1")));
      },
      {"128 queries must lie in one", "64"});
  expect_refusal(
      [] {
        const AttentionSpec s = *resolved(sparse(128, 64));
        emit(kernel_of(KernelKind::backward_dkv, Pass::backward, s, find_arch("sm_80"),
                       parse_tile("mma 64x128 w8 s1 b1")));
      },
      {"128 keys must lie in one", "64"});
}

/// Kernels exist for every size of blocks, for 64 and 128 channels alone, and on every GPU.
TEST(Sparse, TheLinearBranchFitsEveryGpu) {
  for (const Arch& arch : all_archs())
    for (int head_dim : {56, 64, 128, 256})
      for (int queries : kSparseBlocks)
        for (int keys : kSparseBlocks) {
          AttentionSpec s = sparse(queries, keys);
          s.head_dim = head_dim;
          const bool has = head_dim == 64 || head_dim == 128;
          EXPECT_EQ(has_linear_kernels(s), has);
          const std::vector<KernelSpec> kernels = kernels_beside(resolved(s), arch);
          EXPECT_EQ(kernels.size(), (has ? 16u : 5u) + 5u); // and those of norm, RoPE and gates
          for (const KernelSpec& k : kernels)
            EXPECT_LE(shared_bytes(k), arch.max_shared_bytes) << kernel_name(k);
        }
  EXPECT_FALSE(has_linear_kernels({.head_dim = 64}));
  EXPECT_EQ(kernels_beside(resolved({.head_dim = 64}), find_arch("sm_80")).size(), 5u);
  const AttentionSpec s = *resolved(sparse(128, 64));
  const auto bytes = [&](KernelKind kind, const char* arch = "sm_80") {
    return shared_bytes(kernel_of(kind, Pass::backward, s, find_arch(arch), {}));
  };
  EXPECT_EQ(bytes(KernelKind::linear_states), 2 * 64 * 256 + 2048);
  EXPECT_EQ(bytes(KernelKind::linear_sums), 4 * 32 * 256);
  EXPECT_EQ(bytes(KernelKind::linear_dsums), bytes(KernelKind::linear_sums));
  EXPECT_EQ(bytes(KernelKind::linear_sums, "sm_90a"), 8 * 64 * 256 + 8 * 2 * 8);
  EXPECT_EQ(bytes(KernelKind::linear_dsums, "sm_90a"), bytes(KernelKind::linear_sums, "sm_90a"));
  EXPECT_EQ(bytes(KernelKind::linear_out), 128 * 256 + 128 * 256 + 2048);
  EXPECT_EQ(bytes(KernelKind::linear_dout), 2 * 128 * 256 + 128 * 256 + 2048);
  EXPECT_EQ(bytes(KernelKind::linear_dkv), 2 * 64 * 256 + 128 * 256 + 2048);
  EXPECT_EQ(bytes(KernelKind::estimated_rest), 128 * 256 + 2 * 64 * 256 + 1536);
  EXPECT_EQ(bytes(KernelKind::estimated_dq), bytes(KernelKind::estimated_rest));
  EXPECT_EQ(bytes(KernelKind::estimated_dk), 3 * 64 * 256 + 1536);
}

/// Runs of 4, 2 or 1 tiles of columns, whichever keep an H200's multiprocessors at work.
TEST(Sparse, RunsOfTilesOfSums) {
  const SumsLayout with_wgmma(128, true), without(128, false);
  EXPECT_EQ(with_wgmma.tiles, 128);
  EXPECT_EQ(with_wgmma.runs(16), 32);
  EXPECT_EQ(with_wgmma.runs(10), 64);
  EXPECT_EQ(with_wgmma.runs(5), 128);
  EXPECT_EQ(with_wgmma.runs(1), 128);
  EXPECT_EQ(without.runs(16), without.tiles);
  // Blocks of vectors of 4 lists, and of their matrices.
  const Problem p{1, 16, 16, 512, 512};
  const AttentionSpec s = *resolved(sparse(128, 64));
  const auto blocks = [&](const char* arch) {
    return grid_of(kernel_of(KernelKind::linear_sums, Pass::forward, s, find_arch(arch), {}), p).x;
  };
  EXPECT_EQ(blocks("sm_90a"), 1u + 32);
  EXPECT_EQ(blocks("sm_80"), 1u + 128);
}

/// As many as fill a GPU, of whole lists, with sums that are no larger than half of the queries.
TEST(Sparse, PartsOfTheEstimatesGradients) {
  const auto parts = [](int queries, int keys, int64_t seq_q, int64_t seq_kv) {
    return estimated_parts(sparse(queries, keys), {1, 1, 1, seq_q, seq_kv});
  };
  EXPECT_EQ(parts(128, 64, 32768, 32768), 16);
  EXPECT_EQ(parts(128, 64, 8192, 8192), 16);
  EXPECT_EQ(parts(64, 128, 8192, 8192), 16);
  EXPECT_EQ(parts(128, 64, 17 * 128, 64), 9); // of two lists, the last of one
  EXPECT_EQ(parts(128, 64, 300, 333), 3);
  EXPECT_EQ(parts(128, 64, 1, 1 << 20), 1);
  EXPECT_EQ(parts(64, 64, 1 << 14, 1 << 16), 4);
  for (int64_t seq_q : {1, 100, 1000, 4000, 100'000})
    for (int64_t seq_kv : {1, 700, 5000, 65'000}) {
      const int64_t n = parts(128, 64, seq_q, seq_kv), blocks = (seq_kv + 63) / 64;
      EXPECT_TRUE(n == 1 || 4 * n * blocks <= seq_q) << n;
    }
}

TEST(Sparse, TheWorkspaceHasTheListsOfKeys) {
  const Problem p = {2, 6, 3, 1000, 5000};
  const ResolvedSpec s = resolved(sparse(64, 128));
  EXPECT_EQ(list_blocks(Tokens::queries, *s, p), 16);
  EXPECT_EQ(list_blocks(Tokens::keys, *s, p), 40);
  EXPECT_EQ(list_words(*s, p), 2);
  EXPECT_EQ(column_words(*s, p), 1);
  EXPECT_EQ(list_words(*s, {1, 1, 1, 1, 32 * 128}), 2); // one bit is of no block
  EXPECT_EQ(list_words(*s, {1, 1, 1, 1, 31 * 128}), 1);
  AttentionSpec dense = *s;
  dense.sparse_q = dense.sparse_kv = 0, dense.gradient_kernels = Backward::split;
  // A word of bits for each query head and block of keys; a length, and a place of four words.
  const size_t of_bits = 2048, of_lengths = 1024, of_places = 3840; // multiples of 256
  EXPECT_EQ(workspace_bytes(Pass::backward, s, p),
            workspace_bytes(Pass::backward, resolved(dense), p) + of_bits + of_lengths + of_places);
  EXPECT_EQ(workspace_bytes(Pass::forward, s, p),
            workspace_bytes(Pass::forward, resolved(dense), p));
}

} // namespace
