//===- module_interrupt.h - Ctrl-C in Python -------------------------------===//
#pragma once

#include "runtime/parallel_for.h"

#include <pybind11/pybind11.h>

namespace sagebwd::python {

/// While it lives, Ctrl-C ends what this thread waits for in the library, and is raised as Python
/// raises it. Made with the GIL or without.
class Interruptible : ScopedWatch {
public:
  Interruptible()
      : ScopedWatch([] {
          const pybind11::gil_scoped_acquire held;
          if (PyErr_CheckSignals() != 0)
            throw pybind11::error_already_set();
        }) {}
};

} // namespace sagebwd::python
