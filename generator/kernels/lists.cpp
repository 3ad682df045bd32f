//===- lists.cpp - Lists of blocks, packed and transposed -----------------===//
//
// A list is a row of bits (templates/tile/walk/lists.cuh). pack_mask and pack_indices make it from
// what callers have; transpose_bits makes the lists of blocks of keys from those of blocks of
// queries, and order_lists says which of them come first.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

constexpr int kWarps = 8; ///< of a block

/// The kernels depend on the sizes of blocks alone.
void narrow_lists(AttentionSpec& s) { s = {.sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv}; }

void configure_lists(Configuration& c, const KernelSpec& k) {
  visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
}

bool lists_needed(Pass, const AttentionSpec& s) { return is_sparse(s); }

/// A warp packs a list.
Grid grid_of_lists(const KernelSpec& k, const Problem& p) {
  return {ceil_div(p.batch * p.heads * list_blocks(Tokens::queries, k.attention, p), kWarps)};
}

KernelDefinition list_kernel(KernelKind kind, std::initializer_list<O> operands,
                             std::string_view root_template) {
  return {
      .kind = kind,
      .narrow = narrow_lists,
      .fields = fields_named(operands),
      .root_template = root_template,
      .configure = configure_lists,
      .threads = [](const KernelSpec&) { return 32 * kWarps; },
      .grid = grid_of_lists,
  };
}

} // namespace

std::vector<KernelDefinition> list_kernels() {
  KernelDefinition transpose =
      list_kernel(KernelKind::transpose_bits,
                  {O::row_bits, O::row_stride_b, O::row_stride_h, O::column_bits, O::list_lengths},
                  "kernels/transpose_bits.cuh");
  transpose.passes = {Pass::backward};
  transpose.needed = lists_needed;
  transpose.threads = [](const KernelSpec&) { return 1024; }; // many heads may share keys
  transpose.grid = [](const KernelSpec& k, const Problem& p) -> Grid {
    return {ceil_div(list_blocks(Tokens::keys, k.attention, p), 32), p.heads_kv, p.batch};
  };
  KernelDefinition order = list_kernel(KernelKind::order_lists, {O::list_lengths, O::key_order},
                                       "kernels/order_lists.cuh");
  order.passes = {Pass::backward};
  order.needed = lists_needed;
  order.threads = [](const KernelSpec&) { return 1024; };
  order.grid = [](const KernelSpec&, const Problem&) -> Grid { return {1}; };
  return {list_kernel(KernelKind::pack_mask, {O::block_mask, O::packed_bits, O::lists},
                      "kernels/pack_mask.cuh"),
          list_kernel(KernelKind::pack_indices,
                      {O::block_indices, O::block_counts, O::packed_bits, O::lists, O::list_width},
                      "kernels/pack_indices.cuh"),
          transpose, order};
}

} // namespace sagebwd
