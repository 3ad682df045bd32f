//===- mixture.cpp - How exact and linear attention share a call's tensors --===//

#include "generator/mixture.h"

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

struct Exchange {
  O operand, tensor;
};

constexpr Exchange kExactForward[] = {{O::out, O::sparse_out}};
constexpr Exchange kExactBackward[] = {{O::dout, O::sparse_dout}};
constexpr Exchange kLinearBackward[] = {
    {O::sparse_out, O::out}, {O::dq_more, O::dq}, {O::dk_more, O::dk}, {O::dv_more, O::dv}};
/// The mean of dK' is to be taken off before dK' is added to the other gradient.
constexpr Exchange kCentredKeys[] = {{O::dk, O::dk_linear}, {O::dk_more, O::count}};
constexpr Exchange kPlainKeys[] = {{O::dk_sums, O::count}};

/// Operands for which some kernel takes another tensor; each launch asks for them all.
const std::vector<O>& ever_exchanged() {
  static const auto operands = [] {
    std::vector<O> found = {O::k_partial, O::k_mean};
    for (const std::span<const Exchange> exchanges :
         {std::span<const Exchange>(kExactForward), std::span<const Exchange>(kExactBackward),
          std::span<const Exchange>(kLinearBackward), std::span<const Exchange>(kCentredKeys),
          std::span<const Exchange>(kPlainKeys)})
      for (const Exchange& exchange : exchanges)
        if (!includes(found, exchange.operand))
          found.push_back(exchange.operand);
    return found;
  }();
  return operands;
}

bool is_linear(KernelKind kind) { return to_string(kind).starts_with("linear_"); }

O exchanged(std::span<const Exchange> exchanges, O operand) {
  for (const Exchange& exchange : exchanges)
    if (exchange.operand == operand)
      return exchange.tensor;
  return operand;
}

} // namespace

Operand taken_as(Operand operand, KernelKind kind, Pass pass, const AttentionSpec& spec) {
  if (!is_mixed(spec))
    return operand;
  if ((operand == O::k_partial || operand == O::k_mean) && !spec.smooth_k && is_linear(kind))
    return O::count;
  if (!is_linear(kind)) {
    if (pass == Pass::forward)
      return exchanged(kExactForward, operand);
    // The former of the two writes sparse_dout, if anyone reads it.
    return kind == KernelKind::quantize || scales_dout(spec) ? operand
                                                             : exchanged(kExactBackward, operand);
  }
  if (pass == Pass::forward)
    return operand;
  if (kind == KernelKind::linear_dkv)
    if (const O own = exchanged(spec.smooth_k ? std::span<const Exchange>(kCentredKeys)
                                              : std::span<const Exchange>(kPlainKeys),
                                operand);
        own != operand)
      return own;
  return exchanged(kLinearBackward, operand);
}

// In FP16 dP's kernel of the means of keys also finds ranges of values, which are not kept.
bool is_kept(Operand buffer, const AttentionSpec& spec) {
  return buffer == O::query_sums || buffer == O::query_norms ||
         (buffer == O::k_partial && !sums_dp_in_fp16(spec));
}
bool is_spared(KernelKind kind, const AttentionSpec& spec) {
  return kind == KernelKind::linear_states || kind == KernelKind::linear_sums ||
         (kind == KernelKind::key_mean && !sums_dp_in_fp16(spec));
}

OperandValues as_taken(KernelKind kind, Pass pass, const ResolvedSpec& spec, const Problem& p,
                       OperandValues values) {
  const OperandValues given = values;
  for (const O operand : ever_exchanged()) {
    const O tensor = taken_as(operand, kind, pass, spec);
    if (tensor == operand)
      continue;
    set(values, operand, tensor == O::count ? 0 : get(given, tensor));
    if (strides_of(operand) == O::count || tensor == O::count)
      continue;
    const bool of_caller = strides_of(tensor) != O::count;
    const auto at = [](O strides, int n) { return static_cast<O>(static_cast<int>(strides) + n); };
    const Tokens tokens = caller_tensor(operand).tokens;
    const int64_t token = spec->head_dim, head = token * tokens_of(tokens, p);
    const int64_t without_gaps[] = {head * heads_of(tokens, p), head, token};
    for (int n = 0; n < 3; ++n)
      set(values, at(strides_of(operand), n),
          of_caller ? get(given, at(strides_of(tensor), n))
                    : static_cast<uint64_t>(without_gaps[n]));
  }
  return values;
}

} // namespace sagebwd
