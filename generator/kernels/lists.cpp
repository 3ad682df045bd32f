//===- lists.cpp - Lists of blocks, packed and transposed -----------------===//
//
// A list is a row of bits (templates/tile/walk/lists.cuh). pack_mask, pack_indices, interval_bits
// and mask_bits make it from what callers have; transpose_bits makes the lists of blocks of keys
// from those of blocks of queries, and order_lists says which of them come first.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

constexpr int kWarps = 8; ///< of a block

/// The kernels depend on the sizes of blocks alone.
void narrow_lists(AttentionSpec& s) { s = {.sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv}; }
/// That of intervals also on what their numbers mean, and the one that reads its lists on whether
/// there are some.
void narrow_intervals(AttentionSpec& s) {
  s = {.causal = s.causal == Causal::none ? Causal::none : Causal::top_left,
       .sparse_q = s.sparse_q,
       .sparse_kv = s.sparse_kv,
       .intervals = s.intervals};
}
/// That of a mask on its expression alone.
void narrow_to_mask(AttentionSpec& s) {
  s = {.sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv, .mask = s.mask};
}
void narrow_rows(AttentionSpec& s) {
  const bool hides = hides_anywhere(s);
  narrow_lists(s);
  s.intervals = hides ? kIntervalColumns[0] : 0;
}

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
  transpose.narrow = narrow_rows;
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
  KernelDefinition intervals =
      list_kernel(KernelKind::interval_bits,
                  {O::intervals, O::interval_stride_b, O::interval_stride_h, O::packed_bits},
                  "kernels/interval_bits.cuh");
  intervals.narrow = narrow_intervals;
  intervals.configure = [](Configuration& c, const KernelSpec& k) {
    configure_lists(c, k);
    visit_mask(k.attention, [&](auto... constant) { c.add(constant...); });
  };
  intervals.grid = [](const KernelSpec& k, const Problem& p) -> Grid {
    return {(list_blocks(Tokens::keys, k.attention, p) / 32 + 1) * p.heads * p.batch};
  };
  KernelDefinition mask =
      list_kernel(KernelKind::mask_bits, {O::packed_bits}, "kernels/mask_bits.cuh");
  mask.fields = fields_and(mask.fields, table_operands());
  mask.narrow = narrow_to_mask;
  mask.threads = [](const KernelSpec&) { return 1024; }; // a warp for each block of keys of a word
  mask.grid = [](const KernelSpec& k, const Problem& p) -> Grid { // a block makes a word of a list
    return {list_words(k.attention, p) / 2 * list_blocks(Tokens::queries, k.attention, p), p.heads,
            p.batch};
  };
  return {list_kernel(KernelKind::pack_mask, {O::block_mask, O::packed_bits, O::lists},
                      "kernels/pack_mask.cuh"),
          list_kernel(KernelKind::pack_indices,
                      {O::block_indices, O::block_counts, O::packed_bits, O::lists, O::list_width},
                      "kernels/pack_indices.cuh"),
          intervals,
          mask,
          transpose,
          order};
}

} // namespace sagebwd
