//===- pack_lists.cpp - Lists of blocks become bits ------------------------===//

#include "runtime/pack_lists.h"

#include "generator/pointwise.h"
#include "runtime/arguments.h"
#include "runtime/driver/driver.h"
#include "runtime/loaded_kernels.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sagebwd {
namespace {

/// What lists are made of.
enum class Source { mask, indices, intervals, expression };

Source source_of(const ListsToPack& a, const AttentionSpec& spec) {
  if (!is_sparse(spec))
    throw SpecError("lists of blocks are given to a spec that has none: take one with sparse_q and "
                    "sparse_kv, the sizes of blocks");
  if (has_intervals(spec)) {
    if (a.mask || a.indices || !a.intervals.numbers)
      throw SpecError("lists of a spec with intervals are packed from these: pass `intervals`, and "
                      "no mask and no indices");
    return Source::intervals;
  }
  if (!spec.mask.empty()) {
    if (a.mask || a.indices || a.intervals.numbers)
      throw SpecError(
          "lists of a spec with a mask are packed from its expression: pass `tables` if "
          "it has operands, and no mask of blocks, indices or intervals");
    return Source::expression;
  }
  if ((a.mask != nullptr) == (a.indices != nullptr))
    throw SpecError("lists are packed from a mask or from indices: pass one of the two");
  if (a.intervals.numbers)
    refuse_given(name_of(Operand::intervals));
  return a.mask ? Source::mask : Source::indices;
}

KernelKind kernel_from(Source source) {
  return source == Source::mask        ? KernelKind::pack_mask
         : source == Source::indices   ? KernelKind::pack_indices
         : source == Source::intervals ? KernelKind::interval_bits
                                       : KernelKind::mask_bits;
}

/// How many tables the mask reads, which come before those of a score function.
int mask_tables(const AttentionSpec& spec) {
  return spec.mask.empty() ? 0 : static_cast<int>(mask_of(spec).operands().size());
}

void check(const ListsToPack& a) {
  if (a.mask && (a.counts || a.width != 0))
    throw SpecError(std::string(a.counts ? "counts" : "width") +
                    " is given with a mask, which has none: pass " +
                    (a.counts ? "no counts" : "a width of 0") +
                    ", or indices in place of the mask");
  if (a.indices && a.width < 1)
    throw SpecError("width = " + std::to_string(a.width) +
                    " is not supported: a list has 1 index or more, of which counts may be 0");
  if (!a.row_bits)
    throw SpecError("row_bits: the address is null; pass device memory for list_words() words of "
                    "each list");
  const std::pair<const char*, const void*> kOfWords[] = {
      {"indices", a.indices}, {"counts", a.counts}, {"row_bits", a.row_bits}};
  for (const auto& [name, pointer] : kOfWords)
    if (reinterpret_cast<uint64_t>(pointer) % sizeof(uint32_t) != 0)
      throw SpecError(std::string(name) +
                      ": the address is not a multiple of 4 bytes, which int32 has");
}

/// Refuses lists that would be written to what they are made of.
void check_places(const ListsToPack& a, const ResolvedSpec& spec, const Problem& p) {
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  const int64_t blocks = list_blocks(Tokens::keys, spec, p);
  const int64_t most = std::max<int64_t>({blocks, a.width * kWordBytes, list_words(spec, p)});
  const int64_t of_head = list_blocks(Tokens::queries, spec, p);
  if (double(p.batch) * double(p.heads) * double(of_head) * double(most) > 0x1p60)
    throw SpecError("lists of " + std::to_string(p.batch) + " sequences with " +
                    std::to_string(p.heads) +
                    " heads would take more than 2^60 bytes; pack fewer at a time");
  const int64_t lists = p.batch * p.heads * of_head;
  std::vector<MemoryArea> areas;
  const auto add = [&](std::string_view name, const void* pointer, int64_t bytes_of_list) {
    areas.push_back({name, false, reinterpret_cast<uint64_t>(pointer)});
    areas.back().row_bytes = lists * bytes_of_list;
  };
  add("mask", a.mask, blocks);
  add("indices", a.indices, a.width * kWordBytes);
  add("counts", a.counts, kWordBytes);
  add("row_bits", a.row_bits, list_words(spec, p) * kWordBytes);
  areas.back().written = true;
  if (has_intervals(spec))
    areas.push_back(area_of(a.intervals, spec, p));
  for (int i = 0; i < mask_tables(spec); ++i)
    areas.push_back(area_of(table_operand(i), a.tables[static_cast<size_t>(i)]));
  check_shared_memory(areas);
}

OperandValues values_of(const ListsToPack& a, const ResolvedSpec& spec, const Problem& problem) {
  OperandValues values{};
  put_sizes(spec, problem, values);
  const auto put = [&](Operand operand, const void* pointer) {
    set(values, operand, reinterpret_cast<uint64_t>(pointer));
  };
  put(Operand::block_mask, a.mask);
  put(Operand::block_indices, a.indices);
  put(Operand::block_counts, a.counts);
  put(Operand::packed_bits, a.row_bits);
  put(Operand::intervals, a.intervals.numbers);
  set(values, Operand::interval_stride_b, static_cast<uint64_t>(a.intervals.stride_b));
  set(values, Operand::interval_stride_h, static_cast<uint64_t>(a.intervals.stride_h));
  for (int i = 0; i < mask_tables(spec); ++i) {
    const Table& table = a.tables[static_cast<size_t>(i)];
    put(table_operand(i), table.numbers);
    put_sizes_of(values, table_operand(i), table);
  }
  set(values, Operand::list_width, static_cast<uint64_t>(a.width));
  const int64_t lists =
      problem.batch * problem.heads * list_blocks(Tokens::queries, *spec, problem);
  set(values, Operand::lists, static_cast<uint64_t>(lists));
  return values;
}

} // namespace

DriverError not_loaded(const std::string& which, const AttentionSpec& spec) {
  return DriverError("the stream is being captured into a CUDA graph and the " + which +
                         " kernels of " + to_string(spec) +
                         " are not loaded yet: call warmup() before the capture",
                     900); // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
}

LoadedKernel loaded_beside(const KernelSpec& kernel, const ResolvedSpec& spec, int device,
                           void* stream) {
  if (const std::optional<LoadedKernel> loaded = find_loaded(kernel, device))
    return *loaded;
  if (driver::is_capturing(static_cast<driver::Stream>(stream)))
    throw not_loaded(std::string(to_string(kernel.kind)), spec);
  return load_once(*build_operation({kernel}, spec).front(), device);
}

void launch_packing(const ListsToPack& a, const ResolvedSpec& spec, const Arch& arch, int device) {
  const Source source = source_of(a, spec);
  Problem problem = a.problem;
  if (source != Source::intervals)
    problem.heads_kv = 1; // lists are of the heads of queries
  sagebwd::check(spec, problem);
  check(a);
  check_intervals(a.intervals, spec, problem);
  if (source == Source::intervals)
    check_address(caller_tensor(Operand::intervals),
                  reinterpret_cast<uint64_t>(a.intervals.numbers), Pass::forward, spec);
  check_tables(a.tables, spec, problem, static_cast<size_t>(mask_tables(spec)));
  for (int i = 0; i < mask_tables(spec); ++i)
    check_address(caller_tensor(table_operand(i)),
                  reinterpret_cast<uint64_t>(a.tables[static_cast<size_t>(i)].numbers),
                  Pass::forward, spec);
  check_places(a, spec, problem);
  const KernelSpec kernel = kernel_of(kernel_from(source), Pass::forward, spec, arch, {});
  const driver::DeviceScope scope(device);
  launch(loaded_beside(kernel, spec, device, a.stream), problem, values_of(a, spec, problem),
         static_cast<driver::Stream>(a.stream), /*overlaps=*/false);
}

} // namespace sagebwd
