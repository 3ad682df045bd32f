//===- arguments.cpp - Checks of a call's arguments -----------------------===//

#include "runtime/arguments.h"
#include "generator/pointwise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace sagebwd {

namespace {

/// The kernels copy 16 bytes at a time.
constexpr int64_t kAlignBytes = 16;

[[noreturn]] void refuse_layout(Operand tensor, const std::string& what) {
  throw SpecError(std::string(name_of(tensor)) + ": " + what +
                  "; channels must be contiguous and every token 16-byte aligned: make a "
                  "contiguous copy");
}

/// A result whose tokens, heads or sequences would be written over each other.
[[noreturn]] void refuse_overlap(Operand result, const std::string& stride, int64_t channels) {
  throw SpecError(std::string(name_of(result)) + ": " + stride + ", and each token has " +
                  std::to_string(channels) +
                  " channels that are written: pass memory in which every element has a place of "
                  "its own");
}

/// No GPU has so much memory, and beyond it sizes in bytes could exceed 64 bits.
constexpr int64_t kMostElements = int64_t{1} << 40;

[[noreturn]] void refuse_reach(const std::string& stride, int64_t size) {
  throw SpecError(stride + ", and the size there is " + std::to_string(size) +
                  ": together they reach over more than 2^40 elements, which no GPU has; pass the "
                  "strides of memory that you have allocated");
}

} // namespace

void put_strides(OperandValues& values, const CallerTensor& of, const Tensor& tensor,
                 const Problem& p, int64_t channels) {
  const struct {
    const char* name;
    int64_t size, stride;
  } dimensions[] = {{"batch", p.batch, tensor.stride_b},
                    {"head", heads_of(of.tokens, p), tensor.stride_h},
                    {"token", tokens_of(of.tokens, p), tensor.stride_s}};
  int64_t strides[3] = {};
  for (int i = 0; i < 3; ++i) {
    const auto& dimension = dimensions[i];
    if (dimension.size <= 1)
      continue;
    const std::string stride =
        "the " + std::string(dimension.name) + " stride is " + std::to_string(dimension.stride);
    if (dimension.stride % (kAlignBytes / kElementBytes) != 0)
      refuse_layout(of.operand, stride + " elements, not a multiple of 8");
    if (dimension.stride < 0) // no tensor map of a GPU has such strides
      refuse_layout(of.operand, stride + ", and strides are 0 or more");
    if (of.written && dimension.stride < channels)
      refuse_overlap(of.operand, stride, channels);
    if (dimension.stride > 0 && dimension.size - 1 > kMostElements / dimension.stride)
      refuse_reach(std::string(name_of(of.operand)) + ": " + stride, dimension.size);
    strides[i] = dimension.stride;
  }
  set_tensor(values, of.operand, /*address=*/0, strides);
}

size_t bytes_without_gaps(const CallerTensor& of, const Tensor& tensor, const Problem& p,
                          int64_t channels) {
  std::pair<int64_t, int64_t> dimensions[] = {{tensor.stride_s, tokens_of(of.tokens, p)},
                                              {tensor.stride_h, heads_of(of.tokens, p)},
                                              {tensor.stride_b, p.batch}};
  std::sort(std::begin(dimensions), std::end(dimensions));
  int64_t elements = channels;
  for (const auto& [stride, size] : dimensions) {
    if (size == 1)
      continue;
    if (stride != elements)
      return 0;
    elements *= size;
  }
  return static_cast<size_t>(elements * kElementBytes);
}

std::string_view told_name(Operand operand) {
  return operand == Operand::given_k_mean ? "k_mean" : name_of(operand);
}

void check_address(const CallerTensor& of, uint64_t address, Pass pass, const AttentionSpec& spec) {
  const auto refuse_null = [&](const char* wanted) {
    throw SpecError(std::string(told_name(of.operand)) + ": the address is null; pass " + wanted);
  };
  if (address == 0 && (of.operand == Operand::first_queries || of.operand == Operand::first_keys))
    refuse_null("device memory of the first token of each packed sequence and the end, as int32");
  if (address != 0 && of.of == CallerTensor::means && is_mixed(spec))
    throw SpecError("k_mean is given, and the spec has linear attention, whose gradient contains "
                    "that of the mean: pass none");
  if (address != 0 && of.of == CallerTensor::means && !spec.smooth_k)
    throw SpecError("k_mean is given and smooth_k is off: pass no k_mean, or turn smooth_k on");
  if (address == 0 && of.of == CallerTensor::lists)
    refuse_null(
        "device memory of the lists of blocks, as pack_lists() of a spec with sparse_q writes "
        "them");
  if (of.of == CallerTensor::intervals) {
    if (address == 0)
      refuse_null("device memory of each key's numbers, as int32");
    if (address % (sizeof(int32_t) * spec.intervals) != 0)
      throw SpecError("intervals: the address is not a multiple of the " +
                      std::to_string(sizeof(int32_t) * spec.intervals) +
                      " bytes of a key's numbers, which kernels read at once");
  }
  if (address == 0 && of.of == CallerTensor::tables)
    refuse_null("device memory of what the spec's expressions index, as int32 or float32");
  if (address == 0 && of.of == CallerTensor::shares)
    refuse_null("device memory of exact attention's shares, as float32");
  if (of.of == CallerTensor::kept) // check_kept_sums() knows whether the call has some
    return;
  if (address == 0 && !of.optional && of.operand != Operand::dalpha)
    refuse_null(of.strided()                   ? "device memory"
                : of.of == CallerTensor::heads ? "(heads) floats, as the spec has max_logits"
                : pass == Pass::forward        ? "(batch, heads, query) floats"
                                               : "what the forward pass gave");
  if (of.strided() && address % kAlignBytes != 0)
    refuse_layout(of.operand, "the address is not a multiple of 16 bytes");
  if (address % sizeof(float) != 0)
    throw SpecError(std::string(told_name(of.operand)) +
                    ": the address is not a multiple of 4 bytes, which floats and int32 have");
}

void refuse_given(std::string_view what) {
  if (what == name_of(Operand::row_bits))
    throw SpecError("lists of blocks are given, and the spec has none: pass none, or take a spec "
                    "with sparse_q and sparse_kv, the sizes of blocks");
  if (what == name_of(Operand::intervals))
    throw SpecError("intervals are given, and the spec has none: pass none, or take a spec with "
                    "intervals=1, 2 or 4, the numbers of a key");
  if (what.starts_with("table_"))
    throw SpecError(std::string(what) + " is given, and the spec's mask indexes fewer tables: pass "
                                        "as many as its expression has operands");
  if (what == name_of(Operand::max_logits))
    throw SpecError("max_logits are given, and the spec does not have them: pass none, or take a "
                    "spec with max_logits");
  for (Operand operand : {Operand::alpha, Operand::kept_sums, Operand::dalpha, Operand::sparse_out})
    if (what == name_of(operand))
      throw SpecError(std::string(what) +
                      " is given, and the spec has no linear attention: pass none, or take a spec "
                      "with linear=complement or linear=all");
  throw SpecError("packing." + std::string(what) +
                  " is given, and the spec is of sequences that are not packed: pass none, or take "
                  "a spec that is packed");
}

void check_list_strides(const Lists& lists, const ResolvedSpec& spec, const Problem& p) {
  const struct {
    const char *name, *sharing;
    int64_t size, stride;
  } dimensions[] = {{"batch", "sequences share their lists", p.batch, lists.stride_b},
                    {"head", "heads share their lists", p.heads, lists.stride_h}};
  for (const auto& dimension : dimensions) {
    const std::string given = "lists: the " + std::string(dimension.name) + " stride is " +
                              std::to_string(dimension.stride);
    if (!is_sparse(spec)) {
      if (dimension.stride != 0)
        throw SpecError(given + ", and the spec has no lists: leave the lists at zero, or take a "
                                "spec with sparse_q and sparse_kv, the sizes of blocks");
      continue;
    }
    const int64_t words = list_blocks(Tokens::queries, spec, p) * list_words(spec, p);
    if (dimension.size <= 1 || dimension.stride == 0)
      continue;
    if (dimension.stride < words)
      throw SpecError(given + " words, and the lists of a head have " + std::to_string(words) +
                      ": strides are 0, with which " + dimension.sharing + ", or at least that");
    if (dimension.size - 1 > kMostElements / dimension.stride)
      refuse_reach(given + " words", dimension.size);
  }
}

void check_intervals(const Intervals& intervals, const ResolvedSpec& spec, const Problem& p) {
  const struct {
    const char* name;
    int64_t size, stride;
  } dimensions[] = {{"batch", p.batch, intervals.stride_b},
                    {"head", p.heads_kv, intervals.stride_h}};
  for (const auto& [name, size, stride] : dimensions) {
    const std::string given =
        "intervals: the " + std::string(name) + " stride is " + std::to_string(stride);
    if (!has_intervals(spec)) {
      if (stride != 0)
        throw SpecError(given + ", and the spec has no intervals: leave them at zero, or take a "
                                "spec with intervals");
      continue;
    }
    if (size <= 1 || stride == 0)
      continue;
    if (stride < 0 || stride % spec->intervals != 0)
      throw SpecError(given +
                      ": strides are 0, with which all share their numbers, or positive "
                      "multiples of the " +
                      std::to_string(spec->intervals) + " numbers of a key");
    if (size - 1 > kMostElements / stride)
      refuse_reach(given, size);
  }
}

MemoryArea area_of(const Intervals& intervals, const ResolvedSpec& spec, const Problem& p) {
  constexpr int64_t kBytes = sizeof(int32_t);
  return {name_of(Operand::intervals),
          false,
          reinterpret_cast<uint64_t>(intervals.numbers),
          {intervals.stride_b ? p.batch : 1, intervals.stride_h ? p.heads_kv : 1, 1},
          {intervals.stride_b * kBytes, intervals.stride_h * kBytes, 0},
          p.seq_kv * spec->intervals * kBytes};
}

void check_tables(const Tables& tables, const ResolvedSpec& spec, const Problem& p, size_t most) {
  const std::vector<TableOfSpec> named = tables_of(spec);
  for (size_t i = 0; i < std::min(most, named.size()); ++i) {
    const auto& [name, indices, of_score] = named[i];
    const std::string table = "table_" + std::to_string(i) + ", which the " +
                              (of_score ? "score function" : "mask") + " reads as " + name + "[" +
                              (indices == 2 ? "i, j" : "i") + "], has ";
    for (const auto& [what, size] :
         {std::pair("rows", tables[i].rows), std::pair("columns", tables[i].columns)})
      if (size < 1 || size > INT32_MAX)
        throw SpecError(table + std::to_string(size) + " " + what +
                        ": 1 to 2^31 - 1 are supported");
    if (indices == 1 && tables[i].rows != 1)
      throw SpecError(table + std::to_string(tables[i].rows) +
                      " rows: pass 1, or an expression with " + name + "[i, j]");
  }
  if ((mask_depends_on_batch(spec) || score_depends_on_batch(spec)) && p.batch > kMostInALaunch)
    throw SpecError("batch = " + std::to_string(p.batch) +
                    " is not supported with a mask or score function that depends on b: 65535 "
                    "sequences at most; divide the batch");
  constexpr int64_t kExact = 1 << 24; // up to which positions are floats (rescaled())
  if (has_score(spec) && std::max(p.seq_q, p.seq_kv) > kExact)
    throw SpecError("sequences of " + std::to_string(std::max(p.seq_q, p.seq_kv)) +
                    " tokens are not supported with a score function: 2^24 tokens at most");
}

void put_sizes_of(OperandValues& values, Operand table, const Table& sizes) {
  const int i = static_cast<int>(table) - static_cast<int>(Operand::table_0);
  set(values, rows_operand(i), static_cast<uint64_t>(sizes.rows));
  set(values, columns_operand(i), static_cast<uint64_t>(sizes.columns));
}

MemoryArea area_of(Operand operand, const Table& table) {
  MemoryArea area{name_of(operand), false, reinterpret_cast<uint64_t>(table.numbers)};
  area.row_bytes = table.rows * table.columns * static_cast<int64_t>(sizeof(int32_t));
  return area;
}

void check_shares(const Shares& shares, const ResolvedSpec& spec, const Problem& p) {
  if (!is_mixed(spec)) { // an address is refused where addresses are known
    for (const int64_t stride : {shares.stride_b, shares.stride_h, shares.stride_s})
      if (stride != 0)
        throw SpecError("shares: a stride is " + std::to_string(stride) +
                        ", and the spec has no linear attention: leave the strides at zero, or "
                        "take a spec with linear=complement or linear=all");
    if (shares.keeps_sums)
      throw SpecError(
          "shares.keeps_sums is set, and the spec has no linear attention, whose sums "
          "are kept: leave it out, or take a spec with linear=complement or linear=all");
    return;
  }
  if (shares.keeps_sums && p.batch > kMostInALaunch)
    throw SpecError(
        "shares.keeps_sums with batch = " + std::to_string(p.batch) +
        " is not supported: 65535 sequences at most; divide the batch, or leave it out");
  if (shares.tokens < 1)
    throw SpecError("shares: tokens is " + std::to_string(shares.tokens) +
                    "; it is how many queries share a number, 1 or more, such as the spec's "
                    "sparse_q");
  const std::pair<int64_t, int64_t> dimensions[] = {
      {p.batch, shares.stride_b},
      {p.heads, shares.stride_h},
      {ceil_div(p.seq_q, shares.tokens), shares.stride_s}};
  for (const auto& [size, stride] : dimensions) {
    if (stride < 0)
      throw SpecError("shares: a stride is " + std::to_string(stride) +
                      ", and strides are 0 or more");
    if (stride > 0 && size - 1 > kMostElements / stride)
      refuse_reach("shares: a stride is " + std::to_string(stride), size);
  }
}

void check_kept_sums(uint64_t address, bool keeps_sums) {
  if (address == 0 && keeps_sums)
    throw SpecError("kept_sums: the address is null, and shares.keeps_sums is set: pass device "
                    "memory of kept_sums_bytes(), or leave keeps_sums out");
  if (address != 0 && !keeps_sums)
    throw SpecError("kept_sums is given, and shares.keeps_sums is not set: set it in both passes, "
                    "or pass none");
  if (address % kAlignBytes != 0)
    throw SpecError("kept_sums must be device memory aligned to 16 bytes");
}

void check_scale(float scale, const AttentionSpec& spec) {
  const bool negative = scale < 0 && !which_int8(spec.precision).s;
  if (std::isfinite(scale) && !negative &&
      (scale == 0 || std::abs(scale) >= static_cast<float>(kLeastSoftmaxScale)))
    return;
  char given[32];
  std::snprintf(given, sizeof(given), "%g", static_cast<double>(scale));
  throw SpecError("softmax_scale = " + std::string(given) + " is not supported" +
                  (negative ? " under '" + value_text(spec.precision) +
                                  "', where Q is not copied: negate Q, or take another precision"
                            : ": it must be finite, and 0 or at least 1e-20 in magnitude (usual "
                              "is 1 / sqrt(head_dim))"));
}

void check_workspace_bytes(size_t given, size_t needed) {
  if (given < needed)
    throw SpecError("the workspace has " + std::to_string(given) + " bytes and " +
                    std::to_string(needed) +
                    " are needed: ask for the pass's workspace bytes first");
}

void check_value_dim(int value_dim, const AttentionSpec& spec) {
  const std::string given = "value_dim = " + std::to_string(value_dim) +
                            " with head_dim = " + std::to_string(spec.head_dim) +
                            " is not supported: ";
  if (value_dim < kLeastHeadDim || value_dim > spec.head_dim || value_dim % kHeadDimStep != 0)
    throw SpecError(given + "it is a multiple of " + std::to_string(kHeadDimStep) + " from " +
                    std::to_string(kLeastHeadDim) + " to head_dim" +
                    (value_dim > spec.head_dim ? "; pad q and k with zero channels" : ""));
  if (value_dim != spec.head_dim && fills_width(spec))
    throw SpecError(given +
                    "kernels of 64, 128, 256 and 512 channels take V with all of them; pad v "
                    "with zero channels, and cut off out's");
}

} // namespace sagebwd
