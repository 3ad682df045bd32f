//===- router.cpp - Which blocks are listed --------------------------------===//
//
// SLA2's router compares blocks of queries and of keys by their means, and lists the best.
// pool_blocks gives the sums that means are made of, and route_blocks the lists. top_blocks makes
// lists of scores that are the caller's.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "templates/layouts/route.cuh"

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

/// A block makes the lists of some blocks of queries of a head.
Grid grid_of_route(const KernelSpec& k, const Problem& p) {
  const int rows = RouteLayout().rows(list_blocks(Tokens::keys, k.attention, p));
  return {p.batch * p.heads * ceil_div(list_blocks(Tokens::queries, k.attention, p), rows)};
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
      {
          // All sums are FP32, and a call says how many channels they have.
          .kind = KernelKind::route_blocks,
          .narrow = narrow_to_sizes,
          .fields = fields_named({O::query_block_sums, O::key_block_sums, O::query_map,
                                  O::query_map_step, O::key_map, O::key_map_step, O::always,
                                  O::listed_mask, O::packed_bits, O::kept}),
          .root_template = "kernels/route_blocks.cuh",
          .configure = configure_router,
          .threads = threads_of_router,
          .grid = grid_of_route,
          .shared_bytes = [](const KernelSpec&) { return RouteLayout().total; },
      },
  };
}

} // namespace sagebwd
