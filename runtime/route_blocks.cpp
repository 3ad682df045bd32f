//===- route_blocks.cpp - Which blocks are listed -------------------------===//

#include "runtime/route_blocks.h"

#include "runtime/arguments.h"
#include "runtime/driver/driver.h"
#include "runtime/loaded_kernels.h"
#include "runtime/overlap.h"
#include "runtime/pack_lists.h"

#include <utility>
#include <vector>

namespace sagebwd {
namespace {

constexpr int64_t kWordBytes = sizeof(uint32_t); ///< and those of a float
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

uint64_t as_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

void check_lists(const std::string& kernel, const AttentionSpec& spec) {
  if (!is_sparse(spec))
    throw SpecError(kernel + " is called for a spec without lists of blocks: take one with "
                             "sparse_q and sparse_kv, the sizes of blocks");
  if (hides_anywhere(spec))
    throw SpecError(
        kernel + " is called for a spec with intervals or a mask, whose lists are made of these: "
                 "take one without");
}

void check_words(const char* name, const void* pointer) {
  if (as_address(pointer) % kWordBytes != 0)
    throw SpecError(std::string(name) +
                    ": the address is not a multiple of 4 bytes, which floats and int32 have");
}

/// Four floats are read at once.
void check_vectors(const char* name, const void* pointer) {
  if (as_address(pointer) % (4 * kWordBytes) != 0)
    throw SpecError(std::string(name) +
                    ": the address is not a multiple of 16 bytes, in which kernels read it");
}

void check_given(const char* name, const void* pointer) {
  if (!pointer)
    throw SpecError(std::string(name) + ": the address is null; pass device memory");
}

/// Each is read or written as a whole, without gaps.
MemoryArea whole_area(std::string_view name, const void* pointer, int64_t bytes, bool written) {
  MemoryArea area{name, written, as_address(pointer)};
  area.row_bytes = bytes;
  return area;
}

MemoryArea strided_area(const CallerTensor& of, const Tensor& tensor, const Problem& p,
                        int channels) {
  return {told_name(of.operand),
          false,
          as_address(tensor.data),
          {p.batch, heads_of(of.tokens, p), tokens_of(of.tokens, p)},
          {tensor.stride_b * kElementBytes, tensor.stride_h * kElementBytes,
           tensor.stride_s * kElementBytes},
          channels * kElementBytes};
}

/// `areas` gets what the call reads and writes.
OperandValues checked_values(const BlocksToPool& a, const ResolvedSpec& spec,
                             std::vector<MemoryArea>& areas) {
  const Problem& p = a.problem;
  if (pooled_blocks(*spec, p) > kMostBlocks)
    throw SpecError("pool_blocks of " + std::to_string(pooled_blocks(*spec, p)) +
                    " blocks is not supported: 2^31 - 1 at most; divide the batch");
  check_given("query_sums", a.query_sums), check_given("key_sums", a.key_sums);
  check_words("query_sums", a.query_sums), check_words("key_sums", a.key_sums);
  OperandValues values{};
  put_sizes(spec, p, values);
  const std::pair<Operand, const Tensor&> kTensors[] = {{Operand::q, a.q}, {Operand::k, a.k}};
  for (const auto& [operand, tensor] : kTensors) {
    const CallerTensor& of = caller_tensor(operand);
    check_address(of, as_address(tensor.data), Pass::forward, *spec);
    put_strides(values, of, tensor, p, spec->head_dim);
    set(values, operand, as_address(tensor.data));
    areas.push_back(strided_area(of, tensor, p, spec->head_dim));
  }
  const int64_t row = spec->head_dim * kWordBytes;
  const int64_t lists = p.batch * p.heads * list_blocks(Tokens::queries, *spec, p);
  areas.push_back(whole_area("query_sums", a.query_sums, lists * row, true));
  const int64_t blocks = pooled_blocks(*spec, p) - lists;
  areas.push_back(whole_area("key_sums", a.key_sums, blocks * row, true));
  set(values, Operand::query_block_sums, as_address(a.query_sums));
  set(values, Operand::key_block_sums, as_address(a.key_sums));
  return values;
}

/// Of BlocksToList and of BlocksToRoute: sets what says which lists are wanted, and where.
template <typename Call>
void put_wanted(OperandValues& values, const Call& a, const Problem& p, const ResolvedSpec& spec,
                std::vector<MemoryArea>& areas) {
  if (a.kept < 1)
    throw SpecError("kept = " + std::to_string(a.kept) +
                    " is not supported: a list has 1 block or more");
  if (!a.mask && !a.row_bits)
    throw SpecError("mask and row_bits are both null: pass device memory for one of the two");
  check_words("row_bits", a.row_bits);
  const int64_t blocks = list_blocks(Tokens::keys, *spec, p);
  const int64_t lists = p.batch * p.heads * list_blocks(Tokens::queries, *spec, p);
  areas.push_back(whole_area("always", a.always, blocks, false));
  areas.push_back(whole_area("mask", a.mask, lists * blocks, true));
  areas.push_back(
      whole_area("row_bits", a.row_bits, lists * list_words(*spec, p) * kWordBytes, true));
  set(values, Operand::always, as_address(a.always));
  set(values, Operand::listed_mask, as_address(a.mask));
  set(values, Operand::packed_bits, as_address(a.row_bits));
  set(values, Operand::kept, static_cast<uint64_t>(a.kept));
}

OperandValues checked_values(const BlocksToList& a, const Problem& p, const ResolvedSpec& spec) {
  check_given("scores", a.scores);
  check_words("scores", a.scores);
  const int64_t blocks = list_blocks(Tokens::keys, *spec, p);
  const int64_t of_head = list_blocks(Tokens::queries, *spec, p);
  if (double(p.batch) * double(p.heads) * double(of_head) * double(blocks + 1) > 0x1p58)
    throw SpecError("lists of " + std::to_string(p.batch) + " sequences with " +
                    std::to_string(p.heads) +
                    " heads would take more than 2^60 bytes; make fewer at a time");
  const int64_t lists = p.batch * p.heads * of_head;
  std::vector<MemoryArea> areas = {
      whole_area("scores", a.scores, lists * blocks * kWordBytes, false)};
  OperandValues values{};
  put_sizes(spec, p, values);
  put_wanted(values, a, p, spec, areas);
  check_shared_memory(areas);
  set(values, Operand::block_scores, as_address(a.scores));
  set(values, Operand::lists, static_cast<uint64_t>(lists));
  return values;
}

/// What both kernels take.
OperandValues checked_values(const BlocksToRoute& a, const ResolvedSpec& spec) {
  const Problem& p = a.pooled.problem;
  if (const int64_t blocks = list_blocks(Tokens::keys, *spec, p); blocks > kMostRoutedBlocks)
    throw SpecError("route_blocks of " + std::to_string(blocks) +
                    " blocks of keys is not supported: " + std::to_string(kMostRoutedBlocks) +
                    " at most; form scores, and call top_blocks");
  std::vector<MemoryArea> areas;
  OperandValues values = checked_values(a.pooled, spec, areas);
  check_vectors("key_sums", a.pooled.key_sums);
  put_wanted(values, a, p, spec, areas);
  const int64_t floats = int64_t{spec->head_dim} * spec->head_dim;
  const auto put_map = [&](const char* name, const RouterMap& map, Operand address, Operand step) {
    check_vectors(name, map.values);
    const int64_t maps = map.per_head ? p.heads : 1;
    areas.push_back(whole_area(name, map.values, maps * floats * kWordBytes, false));
    set(values, address, as_address(map.values));
    set(values, step, static_cast<uint64_t>(map.per_head ? floats : 0));
  };
  put_map("query_map", a.query_map, Operand::query_map, Operand::query_map_step);
  put_map("key_map", a.key_map, Operand::key_map, Operand::key_map_step);
  check_shared_memory(areas);
  return values;
}

/// `overlaps`: the kernel before it on the stream is one of ours, behind which it may begin.
void launch_router(KernelKind kind, const Problem& problem, const OperandValues& values,
                   const Attention& attention, void* stream, bool overlaps = false) {
  const ResolvedSpec& spec = attention.spec();
  const KernelSpec kernel = kernel_of(kind, Pass::forward, *spec, attention.arch(), {});
  const driver::DeviceScope scope(attention.device());
  launch(loaded_beside(kernel, spec, attention.device(), stream), problem, values,
         static_cast<driver::Stream>(stream), overlaps);
}

} // namespace

void pool_blocks(const BlocksToPool& a, const Attention& attention) {
  check_lists("pool_blocks", attention.spec());
  check(attention.spec(), a.problem);
  std::vector<MemoryArea> areas;
  const OperandValues values = checked_values(a, attention.spec(), areas);
  check_shared_memory(areas);
  launch_router(KernelKind::pool_blocks, a.problem, values, attention, a.stream);
}

void top_blocks(const BlocksToList& a, const Attention& attention) {
  check_lists("top_blocks", attention.spec());
  Problem problem = a.problem;
  problem.heads_kv = 1; // lists are of the heads of queries
  check(attention.spec(), problem);
  launch_router(KernelKind::top_blocks, problem, checked_values(a, problem, attention.spec()),
                attention, a.stream);
}

void route_blocks(const BlocksToRoute& a, const Attention& attention) {
  check_lists("route_blocks", attention.spec());
  check(attention.spec(), a.pooled.problem);
  const OperandValues values = checked_values(a, attention.spec());
  const auto launch_one = [&](KernelKind kind, bool overlaps) {
    launch_router(kind, a.pooled.problem, values, attention, a.pooled.stream, overlaps);
  };
  launch_one(KernelKind::pool_blocks, false);
  launch_one(KernelKind::route_blocks, true);
}

} // namespace sagebwd
