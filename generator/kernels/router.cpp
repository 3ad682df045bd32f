//===- router.cpp - Which blocks are listed --------------------------------===//
//
// SLA2's router compares blocks of queries and of keys by their means, and lists the best.
// pool_blocks gives the sums that means are made of, and top_blocks the lists. The scores between
// the two are the caller's.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

constexpr int kThreads = 256; ///< of a block

/// The best blocks depend on the sizes of blocks alone, by which lists are counted.
void narrow_to_sizes(AttentionSpec& s) { s = {.sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv}; }

void configure_router(Configuration& c, const KernelSpec& k) {
  visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
}

int threads_of_router(const KernelSpec&) { return kThreads; }

/// A block adds up a block of tokens: first all of Q, then all of K.
Grid grid_of_sums(const KernelSpec& k, const Problem& p) { return {pooled_blocks(k.attention, p)}; }

/// A warp makes a list.
Grid grid_of_best(const KernelSpec& k, const Problem& p) {
  return {
      ceil_div(p.batch * p.heads * list_blocks(Tokens::queries, k.attention, p), kThreads / 32)};
}

} // namespace

std::vector<KernelDefinition> router_kernels() {
  return {
      {
          .kind = KernelKind::pool_blocks,
          .narrow = narrow_to_lists,
          .fields = fields_named({O::q, O::k, O::query_block_sums, O::key_block_sums}),
          .root_template = "kernels/pool_blocks.cuh",
          .configure = configure_router,
          .threads = threads_of_router,
          .grid = grid_of_sums,
      },
      {
          .kind = KernelKind::top_blocks,
          .narrow = narrow_to_sizes,
          .fields = fields_named(
              {O::block_scores, O::always, O::listed_mask, O::packed_bits, O::lists, O::kept}),
          .root_template = "kernels/top_blocks.cuh",
          .configure = configure_router,
          .threads = threads_of_router,
          .grid = grid_of_best,
      },
  };
}

} // namespace sagebwd
