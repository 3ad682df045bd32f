//===- module_interrupt.h - Ctrl-C in Python -------------------------------===//
#pragma once

#include "runtime/parallel_for.h"

#include <pybind11/pybind11.h>

namespace sagebwd::python {

/// What `work` gives, computed without the GIL. Ctrl-C ends what it waits for in the library, and
/// is raised as Python raises it.
template <typename Work> auto interruptibly(const Work& work) {
  const ScopedWatch watch([] {
    const pybind11::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0)
      throw pybind11::error_already_set();
  });
  const pybind11::gil_scoped_release released;
  return work();
}

} // namespace sagebwd::python
