//===- loaded_kernel.cpp - A kernel on a device ------------------------------===//

#include "runtime/loaded_kernel.h"

namespace sagebwd {

LoadedKernel load_kernel(const KernelSpec& spec, const std::string& name, const std::string& cubin,
                         int threads, int shared_bytes) {
  LoadedKernel kernel;
  kernel.spec = spec;
  kernel.function = driver::get_function(driver::load_module(cubin), name);
  kernel.threads = static_cast<unsigned>(threads);
  kernel.shared_bytes = static_cast<unsigned>(shared_bytes);
  if (shared_bytes > 0)
    driver::set_max_dynamic_shared(kernel.function, shared_bytes);
  return kernel;
}

void launch(const LoadedKernel& kernel, const Problem& problem, const OperandValues& values,
            driver::Stream stream) {
  alignas(64) std::byte params[kMaxParamsBytes];
  pack_params(fields_of(kernel.spec), values, params);
  const Grid grid = grid_of(kernel.spec, problem);
  driver::launch(kernel.function, grid.x, grid.y, grid.z, kernel.threads, kernel.shared_bytes,
                 stream, params);
}

} // namespace sagebwd
