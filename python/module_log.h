//===- module_log.h - The library's log as Python's -------------------------===//
#pragma once

#include "runtime/log.h"

#include <pybind11/pybind11.h>

namespace sagebwd::python {

/// Hands what has been logged to Python's logger "sagebwd": kernels that were compiled as INFO,
/// those that were found as DEBUG. Called with the GIL, by whoever had let go of it.
inline void log_to_python() {
  if (!has_log_lines())
    return;
  namespace py = pybind11;
  const py::object logger = py::module_::import("logging").attr("getLogger")("sagebwd");
  for (const LogLine& line : take_log_lines())
    logger.attr(line.compiled ? "info" : "debug")("%s", line.text);
}

} // namespace sagebwd::python
