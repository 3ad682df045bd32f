//===- plan.cpp - Problems, workspace and launch geometry ------------------===//

#include "generator/definition.h"
#include "generator/pointwise.h"
#include "templates/layouts/copies.cuh"
#include "templates/layouts/front.cuh"

#include <algorithm>

namespace sagebwd {
namespace {

using O = Operand;

static_assert(kTokensPerTile == TOKENS_PER_TILE && kRowVectors == ROW_VECTORS &&
              kChannelVectors == CHANNEL_VECTORS && kKeysAScale == KEYS_A_SCALE);

} // namespace

bool takes(const AttentionSpec& spec, const CallerTensor& tensor, Pass pass) {
  return (pass == Pass::forward ? tensor.in_forward : tensor.in_backward) &&
         (tensor.of == CallerTensor::packing     ? spec.packed
          : tensor.of == CallerTensor::lists     ? is_sparse(spec)
          : tensor.of == CallerTensor::intervals ? has_intervals(spec)
          : tensor.of == CallerTensor::heads     ? spec.max_logits
          : tensor.of == CallerTensor::tables
              ? int(tensor.operand) < int(table_operand(static_cast<int>(tables_of(spec).size())))
              : !tensor.mixed || is_mixed(spec));
}

int64_t estimated_parts(const AttentionSpec& s, const Problem& p) {
  constexpr int64_t kMost = 16;
  const int64_t lists = list_blocks(Tokens::queries, s, p);
  // Sums of 4 bytes a channel for each block of keys, queries of 2 bytes.
  const int64_t fitting = p.seq_q / (4 * list_blocks(Tokens::keys, s, p));
  const int64_t lists_a_part = ceil_div(lists, std::clamp<int64_t>(fitting, 1, kMost));
  return ceil_div(lists, lists_a_part);
}

int64_t front_chunks(Tokens of, const AttentionSpec& s, const Problem& p) {
  return ceil_div(tokens_of(of, p), front_tokens(width(s)));
}

int64_t front_blocks(const AttentionSpec& s, const Problem& p, int64_t heads_a_block) {
  return p.batch * (ceil_div(p.heads, heads_a_block) * front_chunks(Tokens::queries, s, p) +
                    ceil_div(p.heads_kv, heads_a_block) * front_chunks(Tokens::keys, s, p));
}

int64_t front_heads(const AttentionSpec& s, const Problem& p) {
  // Heads share a row of the table, and few blocks leave multiprocessors without work.
  constexpr int64_t kMost = 8, kEnoughBlocks = 1024;
  int64_t heads = kMost;
  while (heads > 1 && front_blocks(s, p, heads) < kEnoughBlocks)
    heads /= 2;
  return heads;
}

void put_sizes(const ResolvedSpec& spec, const Problem& p, OperandValues& values) {
  const auto put = [&](Operand operand, int64_t value) {
    set(values, operand, static_cast<uint64_t>(value));
  };
  put(O::channels, spec->head_dim);
  put(O::value_channels, spec->head_dim);
  put(O::heads, p.heads);
  put(O::heads_kv, p.heads_kv);
  put(O::seq_q, p.seq_q);
  put(O::seq_kv, p.seq_kv);
  put(O::padded_q, padded_tokens(Tokens::queries, *spec, p));
  put(O::padded_kv, padded_tokens(Tokens::keys, *spec, p));
  // The edges of a packed sequence depend on its lengths, which only the device knows, so that
  // kernels shift the edges. The edges here are for as many queries as keys, more than any sequence
  // has.
  const int64_t most = p.seq_q + p.seq_kv;
  const MaskEdges edges =
      spec->packed ? mask_edges(*spec, most, most) : mask_edges(*spec, p.seq_q, p.seq_kv);
  put(O::causal_offset, edges.last);
  put(O::window_offset, edges.first);
  put(O::sequences, p.batch);
  put(O::diagonal_at_ends, spec->causal != Causal::top_left);
  put(O::one_sum, spec->linear == LinearKeys::all);
}

Grid grid_of(const KernelSpec& k, const Problem& p) { return definition_of(k).grid(k, p); }

Grid grid_on(int multiprocessors, const KernelSpec& k, const Problem& p) {
  Grid grid = grid_of(k, p);
  if (!is_sparse(k.attention) || !definition_of(k).takes_work_tiles)
    return grid;
  // A block does some work once, which takes a third of a work tile of a short list. More work
  // tiles a block make it worse that the last blocks leave multiprocessors without work; so do few
  // blocks where lists differ in length.
  constexpr unsigned kMostItems = 16;
  constexpr int64_t kFewestRounds = 4;
  constexpr double kOnce = 1.0 / 3;
  unsigned best = 1;
  double least = 0;
  for (unsigned items = 1; items <= std::min(kMostItems, grid.x); ++items) {
    const int64_t blocks = ceil_div(grid.x, items) * grid.y * grid.z;
    const int64_t rounds = ceil_div(blocks, multiprocessors);
    if (items > 1 && rounds < kFewestRounds)
      break;
    const double cost = static_cast<double>(rounds) * (items + kOnce);
    if (items == 1 || cost < least)
      best = items, least = cost;
  }
  grid.x = static_cast<unsigned>(ceil_div(grid.x, best));
  return grid;
}

bool is_idle(const KernelSpec& k, const OperandValues& values) {
  const auto idle = definition_of(k).idle;
  return idle && idle(k, values);
}

TensorShape shape_of(Operand map, const KernelSpec& k, const Problem& p,
                     const OperandValues& values) {
  const Operand tensor = tensor_of(map);
  const Tokens tokens = caller_tensor(tensor).tokens;
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const uint64_t channels =
      get(values, tensor == O::q || tensor == O::k ? O::channels : O::value_channels);
  const uint64_t row_bytes = channels * 2;
  TensorShape shape{get(values, tensor),
                    {channels, size(tokens_of(tokens, p)), size(heads_of(tokens, p)),
                     size(sequences_apart(k.attention, p))},
                    {}};
  for (int i = 0; i < 3; ++i) { // batch, head, token; if the size is 1, any stride will do
    const auto stride = static_cast<Operand>(static_cast<int>(strides_of(tensor)) + i);
    shape.strides[2 - i] = shape.sizes[3 - i] > 1 ? get(values, stride) * 2 : row_bytes;
  }
  return shape;
}

void check(const ResolvedSpec& spec, const Problem& p) {
  // kMaxGrid is the greatest extent of a grid in y. Token counts must be 32-bit integers after
  // padding.
  constexpr int64_t kMaxGrid = 65535, kMaxTokens = (int64_t{1} << 31) - 1024;
  constexpr int64_t kMostSequences = int64_t{1} << 24;
  if (p.batch < 1 || p.batch > kMostSequences)
    throw SpecError(spec->packed ? "packed sequences" : "batch", " = ", p.batch,
                    " is not supported: 1 to 2^24");
  // Several blocks divide the channels of a wide head; they are neighbours in the grid's y.
  const int64_t parts =
      very_wide(*spec) ? 2 : ceil_div(width(spec), sum_channels(KernelKind::backward_dq, *spec));
  if (p.heads < 1 || p.heads > kMaxGrid / parts)
    throw SpecError("heads = ", p.heads, " is not supported: 1 to ", kMaxGrid / parts,
                    "; pass more heads as sequences of the batch");
  if (p.heads_kv < 1)
    throw SpecError("key/value heads = ", p.heads_kv,
                    " is not supported: 1 to the number of heads");
  if (p.heads % p.heads_kv != 0)
    throw SpecError("heads = ", p.heads, " is not a multiple of key/value heads = ", p.heads_kv,
                    ": each key/value head serves the same number of query heads");
  for (const auto& [name, tokens] :
       {std::pair("query length", p.seq_q), std::pair("key length", p.seq_kv)})
    if (tokens < 1 || tokens > kMaxTokens)
      throw SpecError(name, " = ", tokens, " is not supported: 1 to 2^31 - 1024 tokens");
  if (bounded_before(*spec) && p.seq_q + p.seq_kv > kMaxTokens)
    throw SpecError("query length = ", p.seq_q, " and key length = ", p.seq_kv,
                    " are not supported with a window: 2^31 - 1024 tokens together");
  constexpr int64_t kMostPacked = int64_t{1} << 29;
  if (spec->packed && p.seq_q + p.seq_kv > kMostPacked)
    throw SpecError("queries of all sequences = ", p.seq_q,
                    " and keys of all sequences = ", p.seq_kv,
                    " are not supported packed: 2^29 tokens together");
  // Kernels count the words of a head's lists of queries in 32 bits
  // (templates/tile/walk/lists.cuh).
  if (is_sparse(*spec) && list_blocks(Tokens::keys, *spec, p) * column_words(*spec, p) >= int64_t{1}
                                                                                              << 31)
    throw SpecError("query length = ", p.seq_q, " and key length = ", p.seq_kv,
                    " are not supported with lists of blocks of ", spec->sparse_q, " and ",
                    spec->sparse_kv,
                    ": the lists of one head would take 8 GiB or more; take larger blocks or "
                    "shorter sequences");
  if (!grouping_of(spec->granularity).one_scale)
    return;
  const double tiles = double(p.batch) * double(p.heads) * double(padded(p.seq_q) / spec->group_q) *
                       double(padded(p.seq_kv) / spec->group_kv);
  if (tiles >= 2147483648.0)
    throw SpecError("granularity '", spec->granularity, "' keeps two maxima for each of ", tiles,
                    " tiles: 2^31 are supported; take 'row' or a smaller batch");
}

} // namespace sagebwd
