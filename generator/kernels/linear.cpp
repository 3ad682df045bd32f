//===- linear.cpp - The linear branch of attention over lists of blocks ------===//
//
// These kernels let queries see something of the blocks that their lists leave out (SLA2, arXiv
// 2602.12675), and mix that with the exact attention to listed blocks.
//
//===----------------------------------------------------------------------===//

#include "templates/layouts/linear.cuh"
#include "generator/definition.h"

#include <algorithm>

namespace sagebwd {
namespace {

using O = Operand;

constexpr int kRows = 64;         ///< of a block without tiles
constexpr int kMeanChannels = 32; ///< of a block of linear_mean
constexpr int kThreadsOfRows = 256;

/// A warp takes 16 tokens.
template <Tokens OF> int tokens_of_linear(const AttentionSpec& s) {
  return OF == Tokens::queries ? s.sparse_q : s.sparse_kv;
}
template <Tokens OF> int threads_of_linear(const KernelSpec& k) {
  return 2 * tokens_of_linear<OF>(k.attention);
}

template <Tokens OF, int TILES, bool MATRIX> int bytes_of_linear(const KernelSpec& k) {
  return LinearLayout(width(k.attention), tokens_of_linear<OF>(k.attention), TILES, MATRIX).total;
}

/// Whether the kernel is one that sums over blocks with wgmma.
bool sums_with_wgmma(const KernelSpec& k) {
  const bool sums = k.kind == KernelKind::linear_sums || k.kind == KernelKind::linear_dsums;
  return sums && k.arch.has_wgmma();
}

template <int (*BYTES)(const KernelSpec&)>
void configure_linear(Configuration& c, const KernelSpec& k) {
  visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
  c.add("LEAN_COPIES", false);
  c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
  c.add("MOST_MEAN_CHUNKS", static_cast<int>(kMostMeanChunks));
  c.add("SHARED_BYTES", BYTES(k));
  c.add("BLOCKS_PER_SM", sums_with_wgmma(k) ? 1 : 2);
}

bool is_launched(Pass, const AttentionSpec& s) { return is_mixed(s); }
/// The gradient of linear attention's keys contains that of their mean.
bool takes_mean(Pass, const AttentionSpec& s) { return is_mixed(s) && s.smooth_k; }

template <Tokens OF> Grid grid_of_linear(const KernelSpec& k, const Problem& p) {
  return {list_blocks(OF, k.attention, p), heads_of(OF, p), p.batch};
}

template <Tokens OF, int TILES, bool MATRIX>
KernelDefinition linear_kernel(KernelKind kind, const std::vector<Pass>& passes,
                               std::initializer_list<O> operands, std::string_view root_template) {
  return {
      .kind = kind,
      .passes = passes,
      .needed = is_launched,
      .narrow = narrow_to_lists,
      .fields = fields_named(operands),
      .root_template = root_template,
      .configure = configure_linear<bytes_of_linear<OF, TILES, MATRIX>>,
      .threads = threads_of_linear<OF>,
      .grid = grid_of_linear<OF>,
      .shared_bytes = bytes_of_linear<OF, TILES, MATRIX>,
  };
}

/// A kernel that goes over rows of keys, without shared memory.
KernelDefinition linear_kernel_of_rows(KernelKind kind, std::initializer_list<O> operands,
                                       std::string_view root_template) {
  KernelDefinition definition =
      linear_kernel<Tokens::keys, 0, false>(kind, {Pass::backward}, operands, root_template);
  definition.configure = [](Configuration& c, const KernelSpec& k) {
    visit_lists(k.attention, [&](auto... constant) { c.add(constant...); });
    c.add("LINEAR_ROWS", kRows);
  };
  definition.threads = [](const KernelSpec&) { return kThreadsOfRows; };
  definition.shared_bytes = nullptr;
  definition.grid = [](const KernelSpec&, const Problem& p) -> Grid {
    return {ceil_div(p.seq_kv, kRows), p.heads_kv, p.batch};
  };
  return definition;
}

SumsLayout layout_of_sums(const KernelSpec& k) {
  return SumsLayout(width(k.attention), sums_with_wgmma(k));
}
int bytes_of_sums(const KernelSpec& k) { return layout_of_sums(k).total; }

/// A kernel that sums over blocks. All tensors are bf16 or FP32, whatever those of the call are.
KernelDefinition sums_kernel(KernelKind kind, const std::vector<Pass>& passes,
                             std::initializer_list<O> operands, std::string_view root_template) {
  return {
      .kind = kind,
      .passes = passes,
      .needed = is_launched,
      .narrow =
          [](AttentionSpec& s) {
            s = {.head_dim = s.head_dim, .sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv};
          },
      .fields = fields_named(operands),
      .root_template = root_template,
      .configure = configure_linear<bytes_of_sums>,
      .threads = [](const KernelSpec& k) { return 2 * layout_of_sums(k).rows; },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        const int64_t results =
            k.kind == KernelKind::linear_sums
                ? p.heads / p.heads_kv * list_blocks(Tokens::queries, k.attention, p)
                : list_blocks(Tokens::keys, k.attention, p);
        const SumsLayout layout = layout_of_sums(k);
        const int64_t tiles = ceil_div(results, layout.rows);
        return {ceil_div(results, kSummedNorms) + tiles * layout.runs(tiles * p.heads_kv * p.batch),
                p.heads_kv, p.batch};
      },
      .shared_bytes = bytes_of_sums,
  };
}

} // namespace

std::vector<KernelDefinition> linear_kernels() {
  const std::vector<Pass> both = {Pass::forward, Pass::backward}, backward = {Pass::backward};
  std::vector<KernelDefinition> kernels = {
      linear_kernel<Tokens::keys, 2, false>(
          KernelKind::linear_states, both,
          {O::k, O::v, O::given_k_mean, O::k_partial, O::key_states, O::key_norms},
          "kernels/linear_states.cuh"),
      sums_kernel(KernelKind::linear_sums, both,
                  {O::key_states, O::key_norms, O::row_bits, O::row_stride_b, O::row_stride_h,
                   O::query_sums, O::query_norms, O::one_sum},
                  "kernels/linear_sums.cuh"),
      linear_kernel<Tokens::queries, 1, true>(
          KernelKind::linear_out, {Pass::forward},
          {O::q, O::query_sums, O::query_norms, O::alpha, O::alpha_tokens, O::alpha_of_rest, O::lse,
           O::row_bits, O::row_stride_b, O::row_stride_h, O::sparse_out, O::out, O::one_sum},
          "kernels/linear_out.cuh"),
      linear_kernel<Tokens::queries, 2, true>(
          KernelKind::linear_dout, backward,
          {O::q, O::dout, O::query_sums, O::query_norms, O::alpha, O::alpha_tokens,
           O::alpha_of_rest, O::lse, O::row_bits, O::row_stride_b, O::row_stride_h, O::sparse_out,
           O::k_mean, O::dalpha, O::dq_more, O::dq, O::query_dsums, O::query_dnorms, O::one_sum},
          "kernels/linear_dout.cuh"),
      sums_kernel(KernelKind::linear_dsums, backward,
                  {O::query_dsums, O::query_dnorms, O::row_bits, O::row_stride_b, O::row_stride_h,
                   O::key_dsums, O::key_dnorms, O::one_sum},
                  "kernels/linear_dsums.cuh"),
      linear_kernel<Tokens::keys, 2, true>(KernelKind::linear_dkv, backward,
                                           {O::k, O::v, O::given_k_mean, O::k_partial, O::key_dsums,
                                            O::key_dnorms, O::dk_more, O::dv_more, O::dk, O::dv,
                                            O::dk_sums, O::one_sum},
                                           "kernels/linear_dkv.cuh"),
      linear_kernel_of_rows(KernelKind::linear_mean, {O::dk_sums, O::dk_mean},
                            "kernels/linear_mean.cuh"),
      linear_kernel_of_rows(KernelKind::linear_dk, {O::dk_linear, O::dk_more, O::dk_mean, O::dk},
                            "kernels/linear_dk.cuh"),
  };
  for (KernelDefinition& definition : kernels)
    if (definition.kind == KernelKind::linear_mean || definition.kind == KernelKind::linear_dk)
      definition.needed = takes_mean;
  KernelDefinition& mean = *std::find_if(kernels.begin(), kernels.end(), [](const auto& d) {
    return d.kind == KernelKind::linear_mean;
  });
  // Few blocks, each of which waits for memory.
  mean.threads = [](const KernelSpec&) { return 1024; };
  mean.grid = [](const KernelSpec& k, const Problem& p) -> Grid {
    return {width(k.attention) / kMeanChannels, p.heads_kv, p.batch};
  };
  return kernels;
}

} // namespace sagebwd
