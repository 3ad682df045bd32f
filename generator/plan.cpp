//===- plan.cpp - Problems, workspace and launch geometry ------------------===//

#include "generator/definition.h"
#include "templates/layouts/copies.cuh"

#include <algorithm>

namespace sagebwd {
namespace {

using O = Operand;

static_assert(kTokensPerTile == TOKENS_PER_TILE && kRowVectors == ROW_VECTORS &&
              kChannelVectors == CHANNEL_VECTORS && kKeysAScale == KEYS_A_SCALE);

/// One buffer of the workspace.
struct Buffer {
  Operand operand;
  int64_t bytes;
};

/// No device has so much memory, and the sum of a few such sizes is below 2^64.
constexpr int64_t kMaxBytes = int64_t{1} << 62;

void require_addressable(bool condition) {
  if (!condition)
    throw SpecError("the workspace would take more than 2^62 bytes; take a smaller batch, fewer "
                    "heads or shorter sequences");
}

/// The product of positive factors. Raises SpecError above kMaxBytes.
int64_t bytes_of(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors) {
    require_addressable(factor <= kMaxBytes / product);
    product *= factor;
  }
  return product;
}

std::vector<Buffer> workspace_buffers(Pass pass, const AttentionSpec& s, const Problem& p) {
  const int64_t d = width(s), apart = sequences_apart(s, p);
  const int64_t heads_q = apart * p.heads, heads_k = apart * p.heads_kv;
  const int64_t tokens_q = padded_tokens(Tokens::queries, s, p);
  const int64_t tokens_k = padded_tokens(Tokens::keys, s, p);
  const int64_t groups_q = tokens_q / s.group_q, groups_k = tokens_k / s.group_kv;
  const int64_t units_q = units(Tokens::queries, channel_tokens_q(s), s, p);
  const int64_t units_k = units(Tokens::keys, channel_tokens_kv(s), s, p);
  const bool backward = pass == Pass::backward;
  const Int8Products int8 = which_int8(s.precision);
  const bool dq_in_fp16 = backward && sums_dq_in_fp16(s);
  const bool dp_in_fp16 = backward && sums_dp_in_fp16(s);
  std::vector<Buffer> buffers;
  const auto add = [&](Operand operand, std::initializer_list<int64_t> factors) {
    buffers.push_back({operand, bytes_of(factors)});
  };
  // A transposed copy, for a product that sums over tokens. Each unit has two vectors of scales.
  const auto add_transposed = [&](Operand copy, Operand scales, int64_t heads, int64_t tokens,
                                  int64_t units) {
    add(copy, {heads, tokens, d});
    add(scales, {heads, units, kChannelVectors, d, 4});
  };
  if ((s.smooth_k && (int8.s || backward)) || dq_in_fp16 || dp_in_fp16) {
    add(O::k_partial, {heads_k, mean_chunks(s, p), d, 4});
    add(O::k_mean, {p.batch, p.heads_kv, d, 4});
  }
  if (dq_in_fp16) {
    add(O::key_range, {heads_k, mean_chunks(s, p), 2 * d + 1, 4});
    add(O::dq_factor, {heads_q, tokens_q, 2});
  }
  if (dp_in_fp16) {
    add(O::value_range, {heads_k, mean_chunks(s, p), 3 * d, 4});
    add(O::half_v, {heads_k, tokens_k, d, 2});
    add(O::half_dout, {heads_q, tokens_q, d, 2});
    add(O::dp_factor, {heads_q, tokens_q, 4});
  }
  if (s.smooth_q) {
    add(O::q_mean, {heads_q, units_q, d, 4});
    add(O::mean_scores, {heads_q, units_q, tokens_k, 4});
  }
  add(O::q_rows, {heads_q, tokens_q, kRowVectors, 4});
  if (int8.s) {
    add(O::q8, {heads_q, tokens_q, d});
    add(O::k8, {heads_k, tokens_k, d});
    add(O::k8_scale, {heads_k, tokens_k / kKeysAScale, 4});
  }
  if (!backward) {
    add_transposed(O::vt8, O::vt8_scale, heads_k, tokens_k, units_k);
    return buffers;
  }
  if (int8.dk)
    add_transposed(O::qt8, O::qt8_scale, heads_q, tokens_q, units_q);
  if (int8.dv)
    add_transposed(O::dot8, O::dot8_scale, heads_q, tokens_q, units_q);
  if (int8.dq)
    add_transposed(O::kt8, O::kt8_scale, heads_k, tokens_k, units_k);
  else
    add(O::k_rows, {heads_k, tokens_k, d, 2});
  if (is_fused(s))
    add(O::dq_sum, {heads_q, tokens_q, d, dq_in_fp16 ? 2 : 4});
  if (is_fused(s) && orders_dq(s))
    add(O::dq_turns, {1 + heads_q * (tokens_q / kPadding), 4});
  const bool for_bulk_copies = s.packed && !dp_in_fp16; // of the caller's rows
  if ((scales_dout(s) && !dp_in_fp16) || for_bulk_copies)
    add(O::dout_rows, {heads_q, tokens_q, d, 2});
  if (for_bulk_copies)
    add(O::v_rows, {heads_k, tokens_k, d, 2});
  if (for_bulk_copies && !int8.dk)
    add(O::query_rows, {heads_q, tokens_q, d, 2});
  if (s.sink_keys > 0)
    add(O::sink_partial, {heads_q, units_q, 2, d, 4});
  if (is_sparse(s)) {
    const int64_t blocks_k = list_blocks(Tokens::keys, s, p);
    add(O::column_bits, {heads_q, blocks_k, column_words(s, p), 4});
    add(O::list_lengths, {heads_k, blocks_k, 4});
    add(O::key_order, {heads_k, blocks_k, KEY_ORDER_WORDS, 4});
  }
  if (grouping_of(s.granularity).one_scale) {
    add(O::tile_p_max, {heads_q, groups_q, groups_k, 4});
    add(O::tile_ds_max, {heads_q, groups_q, groups_k, 4});
  }
  return buffers;
}

constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Whether the kernel has the operand in any family.
bool takes(KernelKind kind, Operand operand) {
  const auto among = [&](const KernelDefinition& definition) {
    return includes(definition.fields, operand) || includes(definition.half_fields, operand) ||
           includes(definition.listed_fields[0], operand);
  };
  const std::vector<Family> families = families_of(kind);
  return families.empty() ? among(definition_of(kind))
                          : std::any_of(families.begin(), families.end(), [&](Family family) {
                              return among(definition_of(kind, family));
                            });
}

/// Whether no kernel needs the buffer any more when the pass begins to write the result: neither
/// the first kernel that has the result as an operand nor any later one has the buffer.
bool is_done_before(Operand buffer, Operand result, const std::vector<KernelKind>& order) {
  const auto writer = std::find_if(order.begin(), order.end(),
                                   [&](KernelKind kind) { return takes(kind, result); });
  return writer != order.end() &&
         std::none_of(writer, order.end(), [&](KernelKind kind) { return takes(kind, buffer); });
}

} // namespace

Workspace lay_out(Pass pass, const ResolvedSpec& spec, const Problem& problem,
                  const std::vector<Loan>& loans) {
  check(spec, problem);
  Workspace workspace;
  std::vector<Buffer> buffers = workspace_buffers(pass, spec, first_launch(*spec, problem));
  const std::vector<KernelKind> order = launch_order(pass, spec);
  for (const Loan& loan : loans) {
    std::stable_sort(buffers.begin(), buffers.end(),
                     [](const Buffer& a, const Buffer& b) { return a.bytes > b.bytes; });
    int64_t left = static_cast<int64_t>(loan.bytes), taken = 0;
    std::erase_if(buffers, [&](const Buffer& buffer) {
      if (buffer.bytes > left || !is_done_before(buffer.operand, loan.result, order))
        return false;
      workspace.placements.push_back({buffer.operand, loan.result, static_cast<uint64_t>(taken)});
      taken += aligned(buffer.bytes);
      left -= aligned(buffer.bytes);
      return true;
    });
  }
  int64_t total = 0;
  for (const Buffer& buffer : buffers) {
    workspace.placements.push_back({buffer.operand, O::count, static_cast<uint64_t>(total)});
    require_addressable(aligned(buffer.bytes) <= kMaxBytes - total);
    total += aligned(buffer.bytes);
  }
  workspace.bytes = static_cast<size_t>(total);
  return workspace;
}

size_t workspace_bytes(Pass pass, const ResolvedSpec& spec, const Problem& problem) {
  return lay_out(pass, spec, problem).bytes;
}

void place(const Workspace& workspace, uint64_t address, OperandValues& values) {
  for (const auto& [buffer, in, offset] : workspace.placements)
    set(values, buffer, offset + (in == O::count ? address : get(values, in)));
}

void place_workspace(Pass pass, const ResolvedSpec& spec, const Problem& p, uint64_t workspace,
                     OperandValues& values) {
  place(lay_out(pass, spec, p), workspace, values);
  put_sizes(spec, p, values);
}

int64_t estimated_parts(const AttentionSpec& s, const Problem& p) {
  constexpr int64_t kMost = 16;
  const int64_t lists = list_blocks(Tokens::queries, s, p);
  // Sums of 4 bytes a channel for each block of keys, queries of 2 bytes.
  const int64_t fitting = p.seq_q / (4 * list_blocks(Tokens::keys, s, p));
  const int64_t lists_a_part = ceil_div(lists, std::clamp<int64_t>(fitting, 1, kMost));
  return ceil_div(lists, lists_a_part);
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
  const auto named = [](std::string_view name, int64_t value) {
    return std::string(name) + " = " + std::to_string(value);
  };
  // kMaxGrid is the greatest extent of a grid in y. Token counts must be 32-bit integers after
  // padding.
  constexpr int64_t kMaxGrid = 65535, kMaxTokens = (int64_t{1} << 31) - 1024;
  constexpr int64_t kMostSequences = int64_t{1} << 24;
  if (p.batch < 1 || p.batch > kMostSequences)
    throw SpecError(named(spec->packed ? "packed sequences" : "batch", p.batch) +
                    " is not supported: 1 to 2^24");
  // Several blocks divide the channels of a wide head; they are neighbours in the grid's y.
  const int64_t parts = ceil_div(width(spec), sum_channels(KernelKind::backward_dq, *spec));
  if (p.heads < 1 || p.heads > kMaxGrid / parts)
    throw SpecError(named("heads", p.heads) + " is not supported: 1 to " +
                    std::to_string(kMaxGrid / parts) +
                    "; pass more heads as sequences of the batch");
  if (p.heads_kv < 1)
    throw SpecError(named("key/value heads", p.heads_kv) +
                    " is not supported: 1 to the number of heads");
  if (p.heads % p.heads_kv != 0)
    throw SpecError(named("heads", p.heads) + " is not a multiple of " +
                    named("key/value heads", p.heads_kv) +
                    ": each key/value head serves the same number of query heads");
  for (const auto& [name, tokens] :
       {std::pair("query length", p.seq_q), std::pair("key length", p.seq_kv)})
    if (tokens < 1 || tokens > kMaxTokens)
      throw SpecError(named(name, tokens) + " is not supported: 1 to 2^31 - 1024 tokens");
  if (bounded_before(*spec) && p.seq_q + p.seq_kv > kMaxTokens)
    throw SpecError(named("query length", p.seq_q) + " and " + named("key length", p.seq_kv) +
                    " are not supported with a window: 2^31 - 1024 tokens together");
  constexpr int64_t kMostPacked = int64_t{1} << 29;
  if (spec->packed && p.seq_q + p.seq_kv > kMostPacked)
    throw SpecError(named("queries of all sequences", p.seq_q) + " and " +
                    named("keys of all sequences", p.seq_kv) +
                    " are not supported packed: 2^29 tokens together");
  // Kernels count the words of a head's lists of queries in 32 bits
  // (templates/tile/walk/lists.cuh).
  if (is_sparse(*spec) && list_blocks(Tokens::keys, *spec, p) * column_words(*spec, p) >= int64_t{1}
                                                                                              << 31)
    throw SpecError(named("query length", p.seq_q) + " and " + named("key length", p.seq_kv) +
                    " are not supported with lists of blocks of " + std::to_string(spec->sparse_q) +
                    " and " + std::to_string(spec->sparse_kv) +
                    ": the lists of one head would take 8 GiB or more; take larger blocks or "
                    "shorter sequences");
  if (!grouping_of(spec->granularity).one_scale)
    return;
  const double tiles = double(p.batch) * double(p.heads) * double(padded(p.seq_q) / spec->group_q) *
                       double(padded(p.seq_kv) / spec->group_kv);
  if (tiles >= 2147483648.0)
    throw SpecError("granularity '" + value_text(spec->granularity) +
                    "' keeps two maxima for each of " + std::to_string(tiles) +
                    " tiles: 2^31 are supported; take 'row' or a smaller batch");
}

} // namespace sagebwd
