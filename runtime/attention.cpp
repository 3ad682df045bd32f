//===- attention.cpp - The operation --------------------------------------===//

#include "runtime/attention.h"
#include "generator/mixture.h"
#include "runtime/arguments.h"
#include "runtime/attention_state.h"
#include "runtime/compile_width.h"
#include "runtime/driver/driver.h"
#include "runtime/kernels.h"
#include "runtime/overlap.h"
#include "runtime/pack_lists.h"
#include "runtime/tuner/trials.h"

#include <limits>
#include <utility>

namespace sagebwd {
namespace {

void put_strides(OperandValues&, const CallerTensor&, const void*, const Problem&, int64_t) {}
void put_strides(OperandValues& values, const CallerTensor&, const Lists& lists, const Problem&,
                 int64_t) {
  set(values, Operand::row_stride_b, static_cast<uint64_t>(lists.stride_b));
  set(values, Operand::row_stride_h, static_cast<uint64_t>(lists.stride_h));
}
void put_strides(OperandValues& values, const CallerTensor&, const Intervals& intervals,
                 const Problem&, int64_t) {
  set(values, Operand::interval_stride_b, static_cast<uint64_t>(intervals.stride_b));
  set(values, Operand::interval_stride_h, static_cast<uint64_t>(intervals.stride_h));
}
void put_strides(OperandValues& values, const CallerTensor& of, const Table& table, const Problem&,
                 int64_t) {
  put_sizes_of(values, of.operand, table);
}
void put_strides(OperandValues& values, const CallerTensor& of, const Shares& shares,
                 const Problem&, int64_t) {
  set_tensor(values, of.operand, /*address=*/0,
             {shares.stride_b, shares.stride_h, shares.stride_s});
  set(values, Operand::alpha_tokens, static_cast<uint64_t>(shares.tokens));
  set(values, Operand::alpha_of_rest, uint64_t{shares.of_rest});
}
template <typename Given>
size_t bytes_without_gaps(const CallerTensor&, const Given&, const Problem&, int64_t) {
  return 0;
}

/// The problem in the shape of the caller's tensors: for packed sequences, one sequence of all
/// tokens or a padded batch.
Problem as_tensors(const AttentionSpec& spec, const Packing& packing, Problem p) {
  if (!spec.packed)
    return p;
  if (!packing.apart) {
    p.batch = 1;
    return p;
  }
  if (p.seq_q % p.batch != 0 || p.seq_kv % p.batch != 0)
    throw SpecError(std::to_string(p.seq_q) + " queries and " + std::to_string(p.seq_kv) +
                    " keys are not those of " + std::to_string(p.batch) +
                    " sequences padded to one length: pass multiples of their number");
  p.seq_q /= p.batch, p.seq_kv /= p.batch;
  return p;
}

/// The channels of a tensor that has strides: value_dim, where it is given, of those of V's width.
int channels_of(Operand operand, const AttentionSpec& spec, int value_dim) {
  const bool narrow = caller_tensor(operand).tokens == Tokens::queries
                          ? operand != Operand::q && operand != Operand::dq
                          : operand == Operand::v || operand == Operand::dv;
  return narrow && value_dim ? value_dim : spec.head_dim;
}

uint64_t address_of(const Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data); }
uint64_t address_of(const void* rows) { return reinterpret_cast<uint64_t>(rows); }
uint64_t address_of(const Lists& lists) { return reinterpret_cast<uint64_t>(lists.row_bits); }
uint64_t address_of(const Intervals& intervals) {
  return reinterpret_cast<uint64_t>(intervals.numbers);
}
uint64_t address_of(const Table& table) { return reinterpret_cast<uint64_t>(table.numbers); }
uint64_t address_of(const Shares& shares) { return reinterpret_cast<uint64_t>(shares.alpha); }

} // namespace

template <typename Args>
PreparedPass::PreparedPass(std::shared_ptr<Attention::State> state, Pass pass, const Args& a)
    : state_(std::move(state)), pass_(pass), problem_(a.problem), keeps_sums_(a.shares.keeps_sums) {
  check(spec(), problem_);
  check_scale(a.softmax_scale, spec());
  if (a.packing.apart && !spec()->packed)
    refuse_given("apart");
  const Problem tensors = as_tensors(spec(), a.packing, problem_);
  set(values_, Operand::apart, uint64_t{a.packing.apart});
  set(values_, Operand::softmax_scale, a.softmax_scale);
  const int head_dim = spec()->head_dim;
  const int value_dim = a.value_dim ? a.value_dim : head_dim;
  check_value_dim(value_dim, spec());
  check_list_strides(a.lists, spec(), problem_);
  check_intervals(a.intervals, spec(), problem_);
  check_tables(a.tables, spec(), problem_);
  check_shares(a.shares, spec(), problem_);
  // No loans of packed results, which have unwritten parts, nor of results of several launches.
  const bool lends = !spec()->packed && problem_.batch <= kMostInALaunch;
  std::vector<Loan> loans;
  visit_tensors(a, [&](Operand operand, const auto& given) {
    const CallerTensor& tensor = caller_tensor(operand);
    if (!takes(spec(), tensor, pass))
      return;
    tensors_.push_back(&tensor);
    const int channels = channels_of(operand, spec(), value_dim);
    put_strides(values_, tensor, given, tensors, channels);
    if (!lends || !tensor.written || tensor.in_forward)
      return;
    if (const size_t bytes = bytes_without_gaps(tensor, given, tensors, channels))
      loans.push_back({operand, bytes});
  });
  workspace_ = lay_out(pass, state_->operation.built(), problem_, loans, keeps_sums_);
  put_sizes(state_->operation.built(), problem_, values_);
  set(values_, Operand::value_channels, static_cast<uint64_t>(value_dim));
}

const ResolvedSpec& PreparedPass::spec() const { return state_->operation.spec(); }
int PreparedPass::device() const { return state_->device; }

void PreparedPass::run_each(std::span<const uint64_t> addresses, uint64_t workspace, void* stream,
                            const After& after) const {
  if (addresses.size() != tensors_.size())
    throw SpecError("this pass takes " + std::to_string(tensors_.size()) + " tensors, given are " +
                    std::to_string(addresses.size()));
  OperandValues values = values_;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    check_address(*tensors_[i], addresses[i], pass_, *spec());
    if (tensors_[i]->of == CallerTensor::kept)
      check_kept_sums(addresses[i], keeps_sums_);
    set(values, tensors_[i]->operand, addresses[i]);
  }
  if (workspace == 0 || workspace % kWorkspaceAlignment != 0)
    throw SpecError("the workspace must be device memory aligned to 256 bytes");
  place(workspace_, workspace, values);

  const driver::DeviceScope scope(state_->device);
  const auto on = static_cast<driver::Stream>(stream);
  const std::vector<LoadedKernel>& kernels = state_->kernels(pass_, problem_, on);
  // The forward's blocks raise it, in whatever order they come.
  if (const uint64_t max_logits = get(values, Operand::max_logits))
    driver::fill(max_logits, -std::numeric_limits<float>::infinity(),
                 static_cast<size_t>(problem_.heads), on);
  Problem part = first_launch(*spec(), problem_);
  const auto is_left_out = [&](KernelKind kind) {
    return keeps_sums_ && pass_ == Pass::backward && is_spared(kind, *spec());
  };
  const auto as_kernel_takes = [&](KernelKind kind) {
    return as_taken(kind, pass_, spec(), part, values);
  };
  for (int64_t left = problem_.batch; left > 0; left -= part.batch) {
    if (left < problem_.batch)
      pass_over(part, values);
    part.batch = std::min(part.batch, left);
    if (!spec()->packed) // else the kernels look for theirs among all
      set(values, Operand::sequences, static_cast<uint64_t>(part.batch));
    // The first kernel waits for the caller's earlier launches and for the part before.
    for (bool overlaps = false; const LoadedKernel& kernel : kernels)
      if (!is_idle(kernel.spec, values) && !is_left_out(kernel.spec.kind)) {
        launch(kernel, part, is_mixed(*spec()) ? as_kernel_takes(kernel.spec.kind) : values, on,
               std::exchange(overlaps, !after));
        if (after)
          after(kernel.spec.kind);
      }
  }
}

/// Advances the addresses to the sequences behind `part`.
void PreparedPass::pass_over(const Problem& part, OperandValues& values) const {
  for (const CallerTensor* tensor : tensors_) {
    const uint64_t address = get(values, tensor->operand);
    const int64_t floats =
        tensor->of == CallerTensor::means ? spec()->head_dim : tokens_of(tensor->tokens, part);
    const uint64_t bytes =
        tensor->strided() ? get(values, strides_of(tensor->operand)) * kElementBytes
        : tensor->of == CallerTensor::shares ? get(values, Operand::alpha_stride_b) * sizeof(float)
        : tensor->of == CallerTensor::lists  ? get(values, Operand::row_stride_b) * sizeof(uint32_t)
        : tensor->of == CallerTensor::intervals
            ? get(values, Operand::interval_stride_b) * sizeof(int32_t)
        : tensor->of == CallerTensor::tables || tensor->of == CallerTensor::heads
            ? 0
            : static_cast<uint64_t>(heads_of(tensor->tokens, part) * floats) * sizeof(float);
    if (address != 0) // an optional tensor such as dlse may be null
      set(values, tensor->operand, address + static_cast<uint64_t>(part.batch) * bytes);
  }
}

namespace {

MemoryArea area_of(const CallerTensor& of, const Tensor& tensor, const Problem& p, int channels,
                   const ResolvedSpec&, int64_t) {
  return {told_name(of.operand),
          false,
          address_of(tensor),
          {p.batch, heads_of(of.tokens, p), tokens_of(of.tokens, p)},
          {tensor.stride_b * kElementBytes, tensor.stride_h * kElementBytes,
           tensor.stride_s * kElementBytes},
          channels * kElementBytes};
}
/// Without gaps, and 4 bytes each. `p` has the shape of tensors, of which the sequences of a packed
/// call can be one.
MemoryArea area_of(const CallerTensor& of, const void* rows, const Problem& p, int channels,
                   const ResolvedSpec& spec, int64_t sequences) {
  MemoryArea area{told_name(of.operand), false, address_of(rows)};
  if (of.of == CallerTensor::kept) {
    area.row_bytes = rows ? static_cast<int64_t>(kept_sums_bytes(spec, p)) : 0;
    return area;
  }
  if (of.of == CallerTensor::heads) {
    area.row_bytes = 4 * p.heads;
    return area;
  }
  const bool firsts = of.operand == Operand::first_queries || of.operand == Operand::first_keys;
  area.row_bytes = 4 * (of.of == CallerTensor::packing ? sequences + firsts
                        : of.of == CallerTensor::means
                            ? sequences * heads_of(of.tokens, p) * channels
                            : p.batch * heads_of(of.tokens, p) * tokens_of(of.tokens, p));
  return area;
}

MemoryArea area_of(const CallerTensor& of, const Lists& lists, const Problem& p, int,
                   const ResolvedSpec& spec, int64_t) {
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  return {told_name(of.operand),
          false,
          address_of(lists),
          {lists.stride_b ? p.batch : 1, lists.stride_h ? p.heads : 1, 1},
          {lists.stride_b * kWordBytes, lists.stride_h * kWordBytes, 0},
          list_blocks(Tokens::queries, *spec, p) * list_words(*spec, p) * kWordBytes};
}

MemoryArea area_of(const CallerTensor&, const Intervals& intervals, const Problem& p, int,
                   const ResolvedSpec& spec, int64_t) {
  return area_of(intervals, spec, p);
}

MemoryArea area_of(const CallerTensor& of, const Table& table, const Problem&, int,
                   const ResolvedSpec&, int64_t) {
  return area_of(of.operand, table);
}

/// A place in memory may stand for many queries.
MemoryArea area_of(const CallerTensor& of, const Shares& shares, const Problem& p, int,
                   const ResolvedSpec&, int64_t) {
  constexpr int64_t kBytes = sizeof(float);
  return {told_name(of.operand),
          false,
          address_of(shares),
          {p.batch, p.heads, ceil_div(p.seq_q, shares.tokens)},
          {shares.stride_b * kBytes, shares.stride_h * kBytes, shares.stride_s * kBytes},
          kBytes};
}

/// Raises SpecError if the pass writes to memory that it reads, or twice to the same memory.
template <typename Args> void check_memory(const PreparedPass& prepared, Pass pass, const Args& a) {
  const ResolvedSpec& spec = prepared.spec();
  const Problem tensors = as_tensors(spec, a.packing, a.problem);
  std::vector<MemoryArea> areas;
  visit_tensors(a, [&](Operand operand, const auto& given) {
    const CallerTensor& of = caller_tensor(operand);
    if (!takes(spec, of, pass))
      return;
    check_address(of, address_of(given), pass, spec);
    if (of.of == CallerTensor::kept)
      check_kept_sums(address_of(given), a.shares.keeps_sums);
    areas.push_back(area_of(of, given, tensors, channels_of(operand, spec, a.value_dim), spec,
                            a.problem.batch));
    areas.back().written = of.written && of.in_forward == (pass == Pass::forward);
  });
  areas.push_back({"the workspace", true, address_of(a.workspace)});
  areas.back().row_bytes = static_cast<int64_t>(prepared.workspace_bytes());
  check_shared_memory(areas);
}

template <typename Args> void run(const PreparedPass& prepared, Pass pass, const Args& a) {
  std::vector<uint64_t> addresses;
  visit_tensors(a, [&](Operand operand, const auto& given) {
    if (takes(prepared.spec(), caller_tensor(operand), pass))
      addresses.push_back(address_of(given));
    else if (address_of(given) != 0)
      refuse_given(name_of(operand));
  });
  check_workspace_bytes(a.workspace_bytes, prepared.workspace_bytes());
  check_memory(prepared, pass, a);
  prepared.run(addresses, reinterpret_cast<uint64_t>(a.workspace), a.stream);
}

} // namespace

Attention::Attention(const AttentionSpec& given, int device, const std::optional<Tiles>& tiles) {
  const ResolvedSpec spec = resolved(given); // errors of the spec come before those of a driver
  const driver::DeviceInfo info = driver::device_info(device);
  const Operation operation(spec, arch_for_capability(info.major, info.minor),
                            tiles.value_or(Tiles{}));
  state_ = std::make_shared<State>(operation, device, info, tiles.has_value());
  if (const auto split = operation.of_short_calls())
    of_short_calls_ = std::make_shared<State>(*split, device, info, /*own_tiles=*/false);
}

Attention::~Attention() = default;

const ResolvedSpec& Attention::spec() const { return state_->operation.spec(); }
const Arch& Attention::arch() const { return state_->operation.arch(); }
int Attention::device() const { return state_->device; }

const std::shared_ptr<Attention::State>& Attention::state_for(const Problem& problem) const {
  return of_short_calls_ && split_is_faster(spec(), arch(), problem) ? of_short_calls_ : state_;
}

void Attention::warmup(bool backward, const std::optional<Problem>& problem) {
  const driver::DeviceScope scope(state_->device);
  if (!problem) {
    std::lock_guard lock(state_->mutex);
    state_->load(state_->operation.distinct_kernels(backward), /*may_load=*/true);
    return;
  }
  check(spec(), *problem);
  if (backward)
    build_ahead(*problem, nullptr);
  State& state = *state_for(*problem);
  state.kernels(Pass::forward, *problem, nullptr);
  if (backward)
    state.kernels(Pass::backward, *problem, nullptr);
  std::lock_guard lock(state.mutex); // these have one tile for all sizes
  state.load(kernels_beside(state.operation.built(), arch()), /*may_load=*/true);
}

void Attention::build_ahead(const Problem& problem, void* stream) {
  const driver::DeviceScope scope(state_->device);
  if (driver::is_capturing(static_cast<driver::Stream>(stream)))
    return;
  State& state = *state_for(problem);
  std::lock_guard lock(state.mutex);
  try {
    check(spec(), problem);
    const auto missing = [&](Pass pass) {
      std::vector<KernelSpec> found = state.tiles.kernels(pass, problem, /*may_tune=*/false);
      std::erase_if(found, [&](const KernelSpec& spec) {
        return find_loaded(spec, state.device).has_value();
      });
      return each_once(found);
    };
    const std::vector<KernelSpec> now = missing(Pass::forward), later = missing(Pass::backward);
    // Cores that the forward leaves begin with the backward at once.
    const size_t width = compile_width(), left = width - std::min(width, now.size());
    if (left > 0)
      build_in_background(later, left);
    build_all(now);
    if (left == 0)
      build_in_background(later, width);
  } catch (const SpecError&) {
  } catch (const CompileError&) {
  } catch (const OfflineError&) {
  } catch (const TuneError&) {
  }
}

TileConfig Attention::tile(KernelKind kind, const Problem& problem) {
  check(spec(), problem);
  State& state = *state_for(problem);
  std::lock_guard lock(state.mutex);
  return state.tiles.tile(kind, problem);
}

size_t Attention::forward_workspace_bytes(const Problem& problem) const {
  return workspace_bytes(Pass::forward, state_for(problem)->operation.built(), problem);
}
size_t Attention::backward_workspace_bytes(const Problem& problem) const {
  return workspace_bytes(Pass::backward, state_for(problem)->operation.built(), problem);
}
size_t Attention::kept_sums_bytes(const Problem& problem) const {
  return sagebwd::kept_sums_bytes(state_->operation.built(), problem);
}

void Attention::forward(const ForwardArgs& args) { run(prepare(args), Pass::forward, args); }
void Attention::backward(const BackwardArgs& args) { run(prepare(args), Pass::backward, args); }

void Attention::pack_lists(const ListsToPack& lists) const {
  launch_packing(lists, spec(), arch(), state_->device);
}

PreparedPass Attention::prepare(const ForwardArgs& args) const {
  return PreparedPass(state_for(args.problem), Pass::forward, args);
}
PreparedPass Attention::prepare(const BackwardArgs& args) const {
  return PreparedPass(state_for(args.problem), Pass::backward, args);
}

} // namespace sagebwd
