//===- module_interrupt.h - Ctrl-C in Python -------------------------------===//
#pragma once

#include "python/module.h"
#include "python/module_gil.h"
#include "runtime/parallel_for.h"

namespace sagebwd::python {

/// Returns what `work` gives, computed without the GIL. Ctrl-C ends what it waits for in the
/// library, and is raised as Python raises it. Python's logger hears of kernels meanwhile.
template <typename Work> auto interruptibly(const Work& work) {
  const ScopedWatch watch([] {
    const Held held;
    if (PyErr_CheckSignals() != 0)
      throw pybind11::error_already_set();
    log_to_python();
  });
  auto result = [&] {
    const Released released;
    return work();
  }();
  log_to_python();
  return result;
}

} // namespace sagebwd::python
