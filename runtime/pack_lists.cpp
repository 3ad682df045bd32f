//===- pack_lists.cpp - Lists of blocks become bits ------------------------===//

#include "runtime/pack_lists.h"

#include "runtime/driver/driver.h"
#include "runtime/loaded_kernels.h"

#include <utility>

namespace sagebwd {
namespace {

void check(const ListsToPack& a, const AttentionSpec& spec) {
  if (!is_sparse(spec))
    throw SpecError("lists of blocks are given to a spec that has none: take one with sparse_q and "
                    "sparse_kv, the sizes of blocks");
  if ((a.mask != nullptr) == (a.indices != nullptr))
    throw SpecError("lists are packed from a mask or from indices: pass one of the two");
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

OperandValues values_of(const ListsToPack& a, const ResolvedSpec& spec) {
  OperandValues values{};
  put_sizes(spec, a.problem, values);
  const auto put = [&](Operand operand, const void* pointer) {
    set(values, operand, reinterpret_cast<uint64_t>(pointer));
  };
  put(Operand::block_mask, a.mask);
  put(Operand::block_indices, a.indices);
  put(Operand::block_counts, a.counts);
  put(Operand::packed_bits, a.row_bits);
  set(values, Operand::list_width, static_cast<uint64_t>(a.width));
  const int64_t lists =
      a.problem.batch * a.problem.heads * list_blocks(Tokens::queries, *spec, a.problem);
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

void launch_packing(const ListsToPack& a, const ResolvedSpec& spec, const Arch& arch, int device) {
  sagebwd::check(spec, a.problem);
  check(a, spec);
  const KernelSpec kernel = kernel_of(a.mask ? KernelKind::pack_mask : KernelKind::pack_indices,
                                      Pass::forward, spec, arch, {});
  const driver::DeviceScope scope(device);
  const auto stream = static_cast<driver::Stream>(a.stream);
  std::optional<LoadedKernel> loaded = find_loaded(kernel, device);
  if (!loaded && driver::is_capturing(stream))
    throw not_loaded(std::string(to_string(kernel.kind)), spec);
  if (!loaded)
    loaded = load_once(*build_operation({kernel}, spec).front(), device);
  launch(*loaded, a.problem, values_of(a, spec), stream, /*overlaps=*/false);
}

} // namespace sagebwd
