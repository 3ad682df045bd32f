//===- operation.cpp - The kernels of one attention operation --------------===//

#include "generator/operation.h"
#include "generator/definition.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

namespace sagebwd {
namespace {

/// The tile of a fused backward, or nothing if the backward is split.
std::optional<TileConfig> tile_of_fused(const ResolvedSpec& spec, const Arch& arch,
                                        const Tiles& given) {
  if (const auto fused = given.find(KernelKind::backward); fused != given.end())
    return fused->second;
  for (KernelKind kind : tiled_kernels(Pass::backward)) // the kernels of a split backward
    if (given.contains(kind))
      return std::nullopt;
  return default_fused_tile(spec, arch);
}

ResolvedSpec built_from(const ResolvedSpec& spec, const Arch& arch, bool fused, bool any_given) {
  if (spec->gradient_kernels != Backward::either && is_fused(spec) != fused)
    throw SpecError(
        "gradient_kernels = ", spec->gradient_kernels, " contradicts the tile that was given for ",
        fused ? KernelKind::backward : KernelKind::backward_dq, "; leave one of the two out");
  if (sums_dq_in_fp16(spec) && !fused)
    throw SpecError("dq_sums = ", spec->dq_sums, " is not supported on ", arch.name,
                    any_given ? " with these tiles" : "",
                    ": the backward is split there, or adds up dQ in FP32; family '", Family::ws,
                    "' of sm_90a has it, by default; leave it out for fp32, which all have");
  try {
    return spec.with(fused ? Backward::fused : Backward::split);
  } catch (const SpecError& error) {
    if (!any_given || is_fused(spec))
      throw;
    throw SpecError("the tile that was given for ", KernelKind::backward,
                    " means gradient_kernels = ", Backward::fused, ": leave that tile out. ",
                    error.what());
  }
}

/// From how many tokens on one kernel forms all gradients faster than two, on a GPU whose tensor
/// cores bind. That kernel adds dQ up in memory, in order, which costs as much for each token as
/// the products that it saves do for so many keys. Predicted for an RTX 4090
/// (bench/results/balance.json, 1024 and 8192 tokens, pre-pass included): between two lengths times
/// are taken to be a straight line in the tokens. For an L40S, whose 16-bit products are faster, it
/// would be 2100 to 12600.
int64_t fewest_tokens_of_fused(const AttentionSpec& s) {
  const bool causal = bounded_behind(s);
  if (sums_dp_in_fp16(s))
    return wide(s) ? (causal ? 10364 : 4143) : (causal ? 5930 : 2198);
  return wide(s) ? (causal ? 3440 : 950) : (causal ? 3587 : 946);
}

} // namespace

Problem of_mean_lengths(const AttentionSpec& s, Problem p) {
  if (s.packed)
    for (int64_t* tokens : {&p.seq_q, &p.seq_kv}) // the problem may not have been checked
      *tokens = std::max<int64_t>(1, *tokens / std::max<int64_t>(1, p.batch));
  return p;
}

bool split_may_be_faster(const AttentionSpec& s, const Arch& arch) {
  // Only these were predicted. In any order dQ costs less, and windows and masks leave fewer scores
  // for each token.
  return arch.is_bound_by_tensor_cores() && s.gradient_kernels == Backward::either &&
         s.deterministic && s.precision == Precision::six_of_seven && !bounded_before(s) &&
         !hides_anywhere(s);
}

bool split_is_faster(const AttentionSpec& s, const Arch& arch, const Problem& problem) {
  if (!split_may_be_faster(s, arch))
    return false;
  const Problem p = of_mean_lengths(s, problem);
  // A call of M queries and N keys costs a (M + N) + b M N, so that it counts as one of 2MN / (M +
  // N) tokens. In floating point, so that lengths which no GPU holds do not overflow.
  const double q = static_cast<double>(p.seq_q), kv = static_cast<double>(p.seq_kv);
  return 2 * q * kv < static_cast<double>(fewest_tokens_of_fused(s)) * (q + kv);
}

std::vector<KernelSpec> each_once(const std::vector<KernelSpec>& kernels) {
  std::vector<KernelSpec> distinct;
  std::set<std::string> names;
  for (const KernelSpec& kernel : kernels)
    if (names.insert(kernel_name(kernel)).second)
      distinct.push_back(kernel);
  return distinct;
}

Operation::Operation(const ResolvedSpec& spec, const Arch& arch, const Tiles& given)
    : spec_(spec), arch_(arch), given_(given), fused_tile_(tile_of_fused(spec, arch, given)),
      built_(built_from(spec, arch, fused(), !given.empty())) {
  if (sums_dp_in_fp16(spec) && arch.has_wgmma())
    check_dp_sums();
}

void Operation::check_dp_sums() const {
  AttentionSpec with_fp32 = spec_; // every family has tiles for it
  with_fp32.dp_sums = DpSums::fp32;
  for (KernelKind kind : launch_order(Pass::backward, built_)) {
    const TileConfig tile = tile_of(kind, with_fp32);
    if (definition_of(kind).tiling && tile.family.instruction() != Instruction::mma)
      throw SpecError("dp_sums = ", spec_->dp_sums, " is not supported on ", arch_.name,
                      given_.empty() ? "" : " with these tiles", ": ", kind, " is of the family '",
                      tile.family, "' there; the family '", Family::mma,
                      "' has it, which all other GPUs have by default: give tiles of that family "
                      "for the backward, or leave dp_sums out for fp32");
  }
}

TileConfig Operation::tile_of(KernelKind kind, const AttentionSpec& spec) const {
  if (kind == KernelKind::backward)
    return *fused_tile_;
  const auto given = given_.find(kind);
  return given == given_.end() ? default_tile(kind, spec, arch_) : given->second;
}

std::vector<KernelSpec> Operation::kernels(Pass pass) const {
  AttentionSpec seen = built_;
  if (pass == Pass::forward) { // no kernel of the forward depends on how dQ and dP are summed
    seen.deterministic = true;
    seen.dq_sums = DqSums::fp32;
    seen.dp_sums = DpSums::fp32;
    seen.gradient_kernels = Backward::either;
  }
  std::vector<KernelSpec> kernels;
  for (KernelKind kind : launch_order(pass, built_))
    kernels.push_back(kernel_of(kind, pass, seen, arch_, tile_of(kind, spec_)));
  return kernels;
}

std::optional<Operation> Operation::of_short_calls() const {
  if (!fused() || !given_.empty() || !split_may_be_faster(spec_, arch_))
    return std::nullopt;
  Operation split = *this;
  split.fused_tile_.reset();
  split.built_ = spec_.with(Backward::split);
  return split;
}

Operation Operation::for_call(const Problem& problem) const {
  const bool is_short = split_is_faster(spec_, arch_, problem);
  return is_short ? of_short_calls().value_or(*this) : *this;
}

std::vector<KernelSpec> Operation::kernels_of_any_call(Pass pass) const {
  std::vector<KernelSpec> all = kernels(pass);
  if (const auto split = of_short_calls())
    for (KernelSpec& kernel : split->kernels(pass))
      all.push_back(std::move(kernel));
  return each_once(all);
}

std::vector<KernelSpec> Operation::distinct_kernels(bool backward) const {
  std::vector<KernelSpec> all = kernels(Pass::forward);
  if (backward)
    for (KernelSpec& kernel : kernels_of_any_call(Pass::backward))
      all.push_back(std::move(kernel));
  for (KernelSpec& kernel : kernels_beside(built_, arch_))
    all.push_back(std::move(kernel));
  return each_once(all);
}

bool has_linear_kernels(const AttentionSpec& s) {
  return is_sparse(s) && !hides_anywhere(s) && has_linear_width(s);
}

std::vector<KernelSpec> kernels_beside(const ResolvedSpec& spec, const Arch& arch) {
  using enum KernelKind;
  std::vector<KernelSpec> kernels;
  for (KernelKind kind : {front, front_gradients, front_gains, gate, gate_gradients})
    kernels.push_back(kernel_of(kind, Pass::forward, *spec, arch, {}));
  if (hides_anywhere(*spec))
    kernels.push_back(kernel_of(has_intervals(*spec) ? interval_bits : mask_bits, Pass::forward,
                                *spec, arch, {}));
  else if (is_sparse(*spec))
    for (KernelKind kind : {pack_mask, pack_indices, pool_blocks, top_blocks, route_blocks})
      kernels.push_back(kernel_of(kind, Pass::forward, *spec, arch, {}));
  if (has_linear_kernels(*spec))
    for (KernelKind kind :
         {linear_states, linear_sums, linear_out, linear_dout, linear_dsums, linear_dkv,
          linear_mean, linear_dk, estimated_rest, estimated_dq, estimated_dk})
      kernels.push_back(kernel_of(kind, Pass::forward, *spec, arch, {}));
  return kernels;
}

const std::vector<KernelKind>& Operation::tunable_kernels() const {
  return fused() ? tiled_kernels(Pass::forward) : tiled_kernels();
}

std::vector<TileContest> Operation::contests(const std::vector<KernelKind>& wanted,
                                             const std::vector<TileConfig>& named) const {
  if (const ResolvedSpec recorded = spec_.as_in_records(); recorded != spec_)
    return Operation(recorded, arch_, given_).contests(wanted, named);
  std::vector<TileContest> contests;
  for (KernelKind kind : wanted) {
    if (!includes(tunable_kernels(), kind))
      continue;
    TileContest contest = tile_contest(kind, spec_, arch_, named);
    contest.operation = kernels(Pass::forward);
    if (tiling_of(kind).pass == Pass::backward)
      for (KernelSpec& kernel : kernels(Pass::backward))
        contest.operation.push_back(std::move(kernel));
    while (contest.operation.back().kind != kind) // dQ does not need dK and dV
      contest.operation.pop_back();
    contests.push_back(std::move(contest));
  }
  return contests;
}

} // namespace sagebwd
