//===- module_jax.h - What jax.ffi registers --------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd::python {

/// A function that XLA calls, and the platform it calls it on; `simulated` is for tests.
struct JaxTarget {
  std::string name, platform;
  void* function;
};

/// Empty where the module was built without JAX's headers.
std::vector<JaxTarget> jax_targets();

} // namespace sagebwd::python
