//===- workspace.cpp - The buffers of a pass, and where they lie -----------===//

#include "generator/definition.h"
#include "generator/mixture.h"
#include "templates/layouts/copies.cuh"

#include <algorithm>

namespace sagebwd {
namespace {

using O = Operand;

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

/// Buffers of linear attention: matrices of channels by channels in 16 bits, and vectors in FP32,
/// of blocks, or of all together.
void add_linear(Pass pass, const AttentionSpec& s, const Problem& p, const auto& add) {
  const int64_t d = s.head_dim, heads_q = p.batch * p.heads, heads_k = p.batch * p.heads_kv;
  const int64_t blocks_q = list_blocks(Tokens::queries, s, p);
  const int64_t blocks_k = list_blocks(Tokens::keys, s, p);
  const bool one = s.linear == LinearKeys::all;
  const auto add_sums = [&](Operand matrices, Operand vectors, int64_t heads, int64_t blocks) {
    add(matrices, {heads, blocks, d, d, 2});
    add(vectors, {heads, blocks, d, 4});
  };
  add_sums(O::key_states, O::key_norms, heads_k, blocks_k);
  add_sums(O::query_sums, O::query_norms, one ? heads_k : heads_q, one ? 1 : blocks_q);
  if (pass == Pass::forward)
    return;
  if (!scales_dout(
          s)) // else attention has rows of its own (templates/tile/prepass/shared_dout.cuh)
    add(O::sparse_dout, {heads_q, p.seq_q, d, 2});
  add_sums(O::query_dsums, O::query_dnorms, heads_q, blocks_q);
  add_sums(O::key_dsums, O::key_dnorms, heads_k, one ? 1 : blocks_k);
  if (!s.smooth_k)
    return;
  add(O::dk_linear, {heads_k, p.seq_kv, d, 2});
  add(O::dk_sums, {heads_k, blocks_k, d, 4});
  add(O::dk_mean, {heads_k, d, 4});
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
  // A transposed copy, for a product that sums over tokens. Each unit has two vectors of scales,
  // and one more that of smoothed values.
  const auto add_transposed = [&](Operand copy, Operand scales, int64_t heads, int64_t tokens,
                                  int64_t units, int more = 0) {
    add(copy, {heads, tokens, d});
    add(scales, {heads, units, kChannelVectors + more, d, 4});
  };
  const bool smooth_v = s.smooth_v && !backward;
  if ((s.smooth_k && (int8.s || backward || is_mixed(s))) || smooth_v || dq_in_fp16 || dp_in_fp16) {
    add(O::k_partial, {heads_k, mean_chunks(s, p), d, 4});
    add(O::k_mean, {p.batch, p.heads_kv, d, 4});
  }
  if (smooth_v)
    add(O::value_sums, {heads_k, mean_chunks(s, p), d, 4});
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
  if (is_mixed(s))
    add_linear(pass, s, p, add);
  add(O::q_rows, {heads_q, tokens_q, kRowVectors, 4});
  if (int8.s) {
    add(O::q8, {heads_q, tokens_q, d});
    add(O::k8, {heads_k, tokens_k, d});
    add(O::k8_scale, {heads_k, tokens_k / kKeysAScale, 4});
  }
  if (!backward) {
    add_transposed(O::vt8, O::vt8_scale, heads_k, tokens_k, units_k, smooth_v);
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

/// Takes the buffers that are kept from the others, and gives their places one behind the other.
std::vector<Placement> place_kept(std::vector<Buffer>& buffers, const AttentionSpec& spec,
                                  int64_t& bytes) {
  std::vector<Placement> placements;
  bytes = 0;
  std::erase_if(buffers, [&](const Buffer& buffer) {
    if (!is_kept(buffer.operand, spec))
      return false;
    placements.push_back({buffer.operand, O::kept_sums, static_cast<uint64_t>(bytes)});
    bytes += aligned(buffer.bytes);
    return true;
  });
  return placements;
}

/// The kernels of a pass, and what they take.
struct Launches {
  Pass pass;
  const AttentionSpec& spec;
  std::vector<KernelKind> order;
};

/// Whether the kernel has the operand in any family.
bool takes(const Launches& launches, KernelKind kind, Operand operand) {
  const auto has = [&](const ParamFields& fields) {
    return std::any_of(fields.begin(), fields.end(), [&](Operand field) {
      return taken_as(field, kind, launches.pass, launches.spec) == operand;
    });
  };
  const auto among = [&](const KernelDefinition& definition) {
    return has(definition.fields) || has(definition.half_fields) ||
           has(definition.listed_fields[0]) || has(definition.listed_fields[1]) ||
           has(definition.smooth_v_fields);
  };
  const std::vector<Family> families = families_of(kind);
  return families.empty() ? among(definition_of(kind))
                          : std::any_of(families.begin(), families.end(), [&](Family family) {
                              return among(definition_of(kind, family));
                            });
}

/// Whether no kernel needs the buffer any more when the pass begins to write the result: neither
/// the first kernel that has the result as an operand nor any later one has the buffer.
bool is_done_before(Operand buffer, Operand result, const Launches& launches) {
  const std::vector<KernelKind>& order = launches.order;
  const auto writer = std::find_if(order.begin(), order.end(),
                                   [&](KernelKind kind) { return takes(launches, kind, result); });
  return writer != order.end() && std::none_of(writer, order.end(), [&](KernelKind kind) {
           return takes(launches, kind, buffer);
         });
}

/// Where a buffer lies in the workspace, and the first and the last kernel that take it.
struct Place {
  int64_t begin, end;
  size_t first, last;
};

/// The place of a buffer among those of others: as far in front as it does not meet one that any
/// kernel from its first to its last may need. Calls without linear attention give each a place of
/// its own.
Place place_among(const std::vector<Place>& others, const Buffer& buffer,
                  const Launches& launches) {
  const std::vector<KernelKind>& order = launches.order;
  Place place{0, aligned(buffer.bytes), 0, order.size()};
  if (is_mixed(launches.spec)) {
    place.first = order.size(), place.last = 0;
    for (size_t i = 0; i < order.size(); ++i)
      if (takes(launches, order[i], buffer.operand))
        place.first = std::min(place.first, i), place.last = i;
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (const Place& other : others)
      if (other.first <= place.last && place.first <= other.last && other.begin < place.end &&
          place.begin < other.end) {
        require_addressable(aligned(buffer.bytes) <= kMaxBytes - other.end);
        place.begin = other.end, place.end = other.end + aligned(buffer.bytes);
        moved = true;
      }
  }
  return place;
}

} // namespace

Workspace lay_out(Pass pass, const ResolvedSpec& spec, const Problem& problem,
                  const std::vector<Loan>& loans, bool keeps_sums) {
  check(spec, problem);
  Workspace workspace;
  std::vector<Buffer> buffers = workspace_buffers(pass, spec, first_launch(*spec, problem));
  Launches launches{pass, *spec, launch_order(pass, spec)};
  if (keeps_sums) {
    int64_t bytes;
    workspace.placements = place_kept(buffers, spec, bytes);
    if (pass == Pass::backward)
      std::erase_if(launches.order, [&](KernelKind kind) { return is_spared(kind, spec); });
    std::erase_if(buffers, [&](const Buffer& buffer) { // of kernels that are left out alone
      return std::none_of(launches.order.begin(), launches.order.end(),
                          [&](KernelKind kind) { return takes(launches, kind, buffer.operand); });
    });
  }
  for (const Loan& loan : loans) {
    std::stable_sort(buffers.begin(), buffers.end(),
                     [](const Buffer& a, const Buffer& b) { return a.bytes > b.bytes; });
    int64_t left = static_cast<int64_t>(loan.bytes), taken = 0;
    std::erase_if(buffers, [&](const Buffer& buffer) {
      if (buffer.bytes > left || !is_done_before(buffer.operand, loan.result, launches))
        return false;
      workspace.placements.push_back({buffer.operand, loan.result, static_cast<uint64_t>(taken)});
      taken += aligned(buffer.bytes);
      left -= aligned(buffer.bytes);
      return true;
    });
  }
  int64_t total = 0;
  if (is_mixed(*spec))
    std::stable_sort(buffers.begin(), buffers.end(),
                     [](const Buffer& a, const Buffer& b) { return a.bytes > b.bytes; });
  std::vector<Place> places;
  for (const Buffer& buffer : buffers) {
    places.push_back(place_among(places, buffer, launches));
    workspace.placements.push_back(
        {buffer.operand, O::count, static_cast<uint64_t>(places.back().begin)});
    total = std::max(total, places.back().end);
  }
  workspace.bytes = static_cast<size_t>(total);
  return workspace;
}

size_t kept_sums_bytes(const ResolvedSpec& spec, const Problem& problem) {
  check(spec, problem);
  if (!is_mixed(*spec))
    throw SpecError("the spec has no linear attention, whose sums can be kept: take a spec with "
                    "linear=complement or linear=all");
  std::vector<Buffer> buffers = workspace_buffers(Pass::forward, spec, problem);
  int64_t bytes;
  place_kept(buffers, spec, bytes);
  return static_cast<size_t>(bytes);
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

} // namespace sagebwd
