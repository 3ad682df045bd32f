//===- estimated.cpp - The estimate of what unlisted keys weigh ------------===//
//
// SLA2's alpha="estimated" takes all keys of a block that is not listed for their mean. The caller
// forms the means, and adds the parts of their gradients up.
//
//===----------------------------------------------------------------------===//

#include "templates/layouts/estimated.cuh"
#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// A block owns so many tokens: a list's queries, or a tile of means. A warp takes 16.
template <Tokens OF> int tokens_of_estimated(const AttentionSpec& s) {
  return OF == Tokens::queries ? s.sparse_q : kPooledTile;
}
template <Tokens OF> int bytes_of_estimated(const KernelSpec& k) {
  return EstimatedLayout(width(k.attention), tokens_of_estimated<OF>(k.attention)).total;
}

template <Tokens OF>
KernelDefinition estimated_kernel(KernelKind kind, std::initializer_list<O> operands,
                                  std::string_view root_template) {
  return {
      .kind = kind,
      .narrow = narrow_to_lists,
      .fields = fields_named(operands),
      .root_template = root_template,
      .configure =
          [](Configuration& c, const KernelSpec& k) {
            visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
            c.add("LEAN_COPIES", true);
            c.add("SHARED_BYTES", bytes_of_estimated<OF>(k));
            c.add("BLOCKS_PER_SM", OF == Tokens::queries ? 2 : 3);
          },
      .threads = [](const KernelSpec& k) { return 2 * tokens_of_estimated<OF>(k.attention); },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        const AttentionSpec& s = k.attention;
        const int64_t across =
            OF == Tokens::queries
                ? list_blocks(Tokens::queries, s, p)
                : ceil_div(list_blocks(Tokens::keys, s, p), kPooledTile) * estimated_parts(s, p);
        return {across, p.heads, p.batch};
      },
      .shared_bytes = bytes_of_estimated<OF>,
  };
}

} // namespace

std::vector<KernelDefinition> estimated_kernels() {
  return {
      estimated_kernel<Tokens::queries>(KernelKind::estimated_rest,
                                        {O::q, O::pooled_keys, O::pooled_mean, O::block_mask,
                                         O::row_stride_b, O::row_stride_h, O::rest,
                                         O::centred_rest},
                                        "kernels/estimated_rest.cuh"),
      estimated_kernel<Tokens::queries>(KernelKind::estimated_dq,
                                        {O::q, O::pooled_keys, O::pooled_mean, O::block_mask,
                                         O::row_stride_b, O::row_stride_h, O::centred_rest,
                                         O::drest, O::dq_more, O::dq},
                                        "kernels/estimated_dq.cuh"),
      estimated_kernel<Tokens::keys>(KernelKind::estimated_dk,
                                     {O::q, O::pooled_keys, O::block_mask, O::row_stride_b,
                                      O::row_stride_h, O::centred_rest, O::drest, O::pooled_dsums},
                                     "kernels/estimated_dk.cuh"),
  };
}

} // namespace sagebwd
