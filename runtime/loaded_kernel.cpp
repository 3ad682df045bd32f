//===- loaded_kernel.cpp - A kernel that is loaded on a device ------------===//

#include "runtime/loaded_kernel.h"

#include "generator/definition.h"

#include <algorithm>
#include <array>

namespace sagebwd {

namespace {

struct alignas(64) TensorMap {
  std::byte bytes[128];
};

bool is_map(Operand field) { return tensor_of(field) != Operand::count; }

void pack_with_maps(const KernelSpec& spec, const Problem& problem, OperandValues values,
                    std::byte* params) {
  constexpr uint32_t kBox[] = {kTokensPerTile, kTokensPerTile}; // channels, tokens
  std::array<TensorMap, 4> maps;                                // no kernel has more
  size_t count = 0;
  for (Operand field : fields_of(spec))
    if (is_map(field)) {
      const TensorShape shape = shape_of(field, spec, problem, values);
      TensorMap& map = maps.at(count++);
      driver::encode_tensor_map(&map, shape.address, shape.sizes, shape.strides, kBox);
      set(values, field, reinterpret_cast<uint64_t>(&map));
    }
  pack_params(fields_of(spec), values, params);
}

} // namespace

LoadedKernel load_kernel(const KernelSpec& spec, const std::string& name, const std::string& cubin,
                         int threads, int shared_bytes, int device) {
  LoadedKernel kernel;
  kernel.spec = spec;
  kernel.function = driver::get_function(driver::load_module(cubin), name);
  kernel.threads = static_cast<unsigned>(threads);
  kernel.shared_bytes = static_cast<unsigned>(shared_bytes);
  kernel.multiprocessors = driver::device_info(device).sm_count;
  if (shared_bytes > 0)
    driver::set_max_dynamic_shared(kernel.function, shared_bytes);
  return kernel;
}

void launch(const LoadedKernel& kernel, const Problem& problem, const OperandValues& values,
            driver::Stream stream, bool overlaps) {
  alignas(64) std::byte params[kMaxParamsBytes];
  const ParamFields& fields = fields_of(kernel.spec);
  const bool maps = std::any_of(fields.begin(), fields.end(), is_map);
  if (maps)
    pack_with_maps(kernel.spec, problem, values, params);
  else
    pack_params(fields, values, params);
  const Grid grid = grid_on(kernel.multiprocessors, kernel.spec, problem);
  // Drivers before CUDA 12.3 cannot capture launches that may overlap into a graph.
  static const bool may_overlap = driver::driver_version() >= 12030;
  driver::launch(kernel.function, grid.x, grid.y, grid.z, kernel.threads, kernel.shared_bytes,
                 stream, params, overlaps && may_overlap && kernel.spec.arch.major >= 9);
}

} // namespace sagebwd
