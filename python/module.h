//===- module.h - The parts of sagebwd._core --------------------------------===//
#pragma once

#include "generator/kernel.h"
#include "python/module_problem.h"
#include "runtime/tuner/records.h"

#include <map>
#include <string>
#include <vector>

namespace sagebwd::python {

namespace py = pybind11;

// Each adds its functions and types to the module.
void bind_attention(py::module_&);
void bind_errors(py::module_&);
void bind_expressions(py::module_&);
void bind_front(py::module_&);
void bind_prebuild(py::module_&);
void bind_reference(py::module_&);
void bind_tuning(py::module_&);

/// Text that may hold a path, which need not be UTF-8: as os.fsdecode() gives it.
py::str path_text(const std::string&);
/// Hands what has been logged to Python's logger "sagebwd": kernels that were compiled as INFO,
/// those that were found as DEBUG. Called with the GIL, by whoever had let go of it.
void log_to_python();
/// Tiles by the names of their kernels, such as {"forward": "mma 64x128 w4 s1 b2"}. Raises
/// SpecError.
Tiles tiles_of_text(const std::map<std::string, std::string>&);
/// The records of a file's text. Raises SpecError.
std::vector<TuningRecord> records_of_text(const std::string&);

} // namespace sagebwd::python
