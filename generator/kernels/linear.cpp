//===- linear.cpp - The linear branch of attention over lists of blocks ------===//
//
// These kernels let queries see something of the blocks that their lists leave out (SLA2, arXiv
// 2602.12675). Between these kernels the caller sums matrices over blocks.
//
//===----------------------------------------------------------------------===//

#include "templates/layouts/linear.cuh"
#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

constexpr int kRows = 64; ///< of a block without tiles
constexpr int kThreadsOfRows = 256;

/// A warp takes 16 tokens.
template <Tokens OF> int tokens_of_linear(const AttentionSpec& s) {
  return OF == Tokens::queries ? s.sparse_q : s.sparse_kv;
}
template <Tokens OF> int threads_of_linear(const KernelSpec& k) {
  return 2 * tokens_of_linear<OF>(k.attention);
}

template <Tokens OF, int TILES, bool MATRIX> int bytes_of_linear(const AttentionSpec& s) {
  return LinearLayout(width(s), tokens_of_linear<OF>(s), TILES, MATRIX).total;
}

template <int (*BYTES)(const AttentionSpec&)>
void configure_linear(Configuration& c, const KernelSpec& k) {
  visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
  c.add("LEAN_COPIES", false);
  c.add("SHARED_BYTES", BYTES(k.attention));
  c.add("BLOCKS_PER_SM", 2);
}

template <Tokens OF> Grid grid_of_linear(const KernelSpec& k, const Problem& p) {
  return {list_blocks(OF, k.attention, p), heads_of(OF, p), p.batch};
}

template <Tokens OF, int TILES, bool MATRIX>
KernelDefinition linear_kernel(KernelKind kind, std::initializer_list<O> operands,
                               std::string_view root_template) {
  return {
      .kind = kind,
      .narrow = narrow_to_lists,
      .fields = fields_named(operands),
      .root_template = root_template,
      .configure = configure_linear<bytes_of_linear<OF, TILES, MATRIX>>,
      .threads = threads_of_linear<OF>,
      .grid = grid_of_linear<OF>,
      .shared_bytes = bytes_of_linear<OF, TILES, MATRIX>,
  };
}

/// A kernel that goes over rows, without shared memory.
template <Tokens OF>
KernelDefinition linear_kernel_of_rows(KernelKind kind, std::initializer_list<O> operands,
                                       std::string_view root_template) {
  KernelDefinition definition = linear_kernel<OF, 0, false>(kind, operands, root_template);
  definition.configure = [](Configuration& c, const KernelSpec&) { c.add("LINEAR_ROWS", kRows); };
  definition.threads = [](const KernelSpec&) { return kThreadsOfRows; };
  definition.shared_bytes = nullptr;
  definition.grid = [](const KernelSpec&, const Problem& p) -> Grid {
    return {ceil_div(tokens_of(OF, p), kRows), heads_of(OF, p), p.batch};
  };
  return definition;
}

} // namespace

std::vector<KernelDefinition> linear_kernels() {
  return {
      linear_kernel<Tokens::keys, 2, false>(
          KernelKind::linear_states, {O::k, O::v, O::given_k_mean, O::key_states, O::key_norms},
          "kernels/linear_states.cuh"),
      linear_kernel<Tokens::queries, 1, true>(
          KernelKind::linear_out,
          {O::q, O::query_sums, O::query_norms, O::alpha, O::sparse_out, O::out, O::one_sum},
          "kernels/linear_out.cuh"),
      linear_kernel<Tokens::queries, 2, true>(
          KernelKind::linear_dout,
          {O::q, O::dout, O::query_sums, O::query_norms, O::alpha, O::sparse_out, O::sparse_dout,
           O::dalpha, O::dq_more, O::dq, O::query_dsums, O::query_dnorms, O::one_sum},
          "kernels/linear_dout.cuh"),
      linear_kernel<Tokens::keys, 2, true>(KernelKind::linear_dkv,
                                           {O::k, O::v, O::given_k_mean, O::key_dsums,
                                            O::key_dnorms, O::dk_more, O::dv_more, O::dk, O::dv,
                                            O::dk_sums, O::one_sum},
                                           "kernels/linear_dkv.cuh"),
      linear_kernel_of_rows<Tokens::queries>(KernelKind::linear_share,
                                             {O::dout, O::alpha, O::sparse_dout},
                                             "kernels/linear_share.cuh"),
      linear_kernel_of_rows<Tokens::keys>(KernelKind::linear_dk,
                                          {O::dk_linear, O::dk_more, O::dk_mean, O::dk},
                                          "kernels/linear_dk.cuh"),
  };
}

} // namespace sagebwd
