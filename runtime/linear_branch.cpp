//===- linear_branch.cpp - Kernels of linear attention beside lists -------===//

#include "runtime/linear_branch.h"

#include "generator/definition.h"
#include "generator/operation.h"
#include "runtime/driver/driver.h"
#include "runtime/loaded_kernels.h"
#include "runtime/pack_lists.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// Kernels read 16 bytes at a time of all tensors, except of single numbers of queries, of masks
/// and of lists.
constexpr uint64_t kAlignment = 16;
constexpr int64_t kAlignedElements = 8;
constexpr int64_t kMostInAGrid = 65535; ///< along y and z

bool is_estimated(KernelKind kind) {
  using enum KernelKind;
  constexpr KernelKind kKinds[] = {estimated_rest, estimated_dq, estimated_dk};
  return includes(kKinds, kind);
}
bool is_linear(KernelKind kind) {
  using enum KernelKind;
  constexpr KernelKind kKinds[] = {linear_states, linear_sums, linear_out,  linear_dout,
                                   linear_dsums,  linear_dkv,  linear_mean, linear_dk};
  return includes(kKinds, kind);
}

/// Tensors that a kernel does without. Only sums of some blocks need lists.
bool is_optional(Operand tensor, const LinearCall& call) {
  using enum Operand;
  constexpr Operand kOptional[] = {given_k_mean, k_partial, k_mean,  sparse_out, alpha,  dalpha,
                                   lse,          dq_more,   dk_more, dv_more,    dk_sums};
  const bool sums =
      call.kernel == KernelKind::linear_sums || call.kernel == KernelKind::linear_dsums;
  return includes(kOptional, tensor) || (tensor == row_bits && (call.one_sum || !sums));
}
bool is_packing(Operand operand) {
  return static_cast<size_t>(operand) < caller_tensors().size() &&
         caller_tensor(operand).of == CallerTensor::packing;
}

void check_call(const LinearCall& call, const AttentionSpec& spec) {
  const std::string kind(to_string(call.kernel));
  if (!is_linear(call.kernel) && !is_estimated(call.kernel))
    throw SpecError(kind + " is no kernel of the linear branch");
  if (!is_sparse(spec))
    throw SpecError(kind + " is called for a spec without lists of blocks: take one with sparse_q "
                           "and sparse_kv, the sizes of blocks");
  if (!has_linear_kernels(spec))
    throw SpecError(kind + " with head_dim = " + std::to_string(spec.head_dim) +
                    " is not supported: there are kernels of 64 and 128 channels");
  const Problem& p = call.problem;
  if (std::max({p.batch, p.heads, p.heads_kv}) > kMostInAGrid)
    throw SpecError(kind + " with batch = " + std::to_string(p.batch) +
                    " is not supported: 65535 sequences at most; divide the batch");
}

/// A tensor that kernels read number by number is aligned to one number.
uint64_t alignment_of(Operand tensor) {
  using enum Operand;
  constexpr Operand kOfQueries[] = {alpha, dalpha, rest, centred_rest, drest};
  if (tensor == block_mask)
    return 1;
  const bool of_numbers = includes(kOfQueries, tensor) || tensor == row_bits;
  return of_numbers ? sizeof(float) : kAlignment;
}

void put(const LinearCall::Given& given, const std::string& kind, OperandValues& values) {
  const std::string name(name_of(given.tensor));
  const uint64_t alignment = alignment_of(given.tensor);
  if (given.address % alignment != 0)
    throw SpecError(name + " of " + kind + ": the address is not a multiple of " +
                    std::to_string(alignment) + " bytes");
  if (given.tensor == Operand::block_mask || given.tensor == Operand::row_bits) {
    set(values, Operand::row_stride_b, static_cast<uint64_t>(given.strides[0]));
    set(values, Operand::row_stride_h, static_cast<uint64_t>(given.strides[1]));
  }
  if (strides_of(given.tensor) == Operand::count) {
    set(values, given.tensor, given.address);
    return;
  }
  for (int64_t stride : given.strides)
    if (alignment == kAlignment && stride % kAlignedElements != 0)
      throw SpecError(name + " of " + kind + ": a stride is " + std::to_string(stride) +
                      " elements, not a multiple of 8");
  set_tensor(values, given.tensor, given.address, given.strides);
}

OperandValues values_of_call(const LinearCall& call, const KernelSpec& kernel,
                             const ResolvedSpec& spec) {
  const std::string kind(to_string(call.kernel));
  const ParamFields& fields = fields_of(kernel);
  OperandValues values{};
  put_sizes(spec, call.problem, values);
  for (const LinearCall::Given& given : call.given) {
    if (!includes(fields, given.tensor))
      throw SpecError(std::string(name_of(given.tensor)) + " is no tensor of " + kind);
    put(given, kind, values);
  }
  set(values, Operand::one_sum, uint64_t{call.one_sum});
  set(values, Operand::alpha_tokens, uint64_t{1});
  for (Operand field : fields)
    if (type_of(field).ends_with("*") && get(values, field) == 0 && !is_optional(field, call) &&
        !is_packing(field))
      throw SpecError(std::string(name_of(field)) + " of " + kind +
                      " is missing: pass device memory");
  if (includes(fields, Operand::alpha) && includes(fields, Operand::sparse_out) &&
      (get(values, Operand::alpha) == 0) != (get(values, Operand::sparse_out) == 0))
    throw SpecError(kind + " takes alpha and sparse_out together: pass both or neither");
  return values;
}

} // namespace

void launch_linear(const LinearCall& call, const Attention& attention) {
  const ResolvedSpec& spec = attention.spec();
  const int device = attention.device();
  check(spec, call.problem);
  check_call(call, *spec);
  const KernelSpec kernel = kernel_of(call.kernel, Pass::forward, *spec, attention.arch(), {});
  const OperandValues values = values_of_call(call, kernel, spec);
  const driver::DeviceScope scope(device);
  const auto stream = static_cast<driver::Stream>(call.stream);
  if (!find_loaded(kernel, device)) {
    if (driver::is_capturing(stream))
      throw not_loaded("linear branch's", *spec);
    // With those that a call launches next, side by side.
    std::vector<KernelSpec> kernels = kernels_beside(spec, attention.arch());
    const auto is_beside = is_estimated(call.kernel) ? is_estimated : is_linear;
    std::erase_if(kernels, [&](const KernelSpec& k) { return !is_beside(k.kind); });
    for (const auto& built : build_operation(kernels, spec))
      load_once(*built, device);
  }
  launch(*find_loaded(kernel, device), call.problem, values, stream, /*overlaps=*/false);
}

} // namespace sagebwd
