//===- module_log.cpp - The library's log as Python's -----------------------===//

#include "python/module.h"
#include "runtime/log.h"

namespace sagebwd::python {

void log_to_python() {
  if (!has_log_lines())
    return;
  const py::object logger = py::module_::import("logging").attr("getLogger")("sagebwd");
  for (const LogLine& line : take_log_lines())
    logger.attr(line.compiled ? "info" : "debug")("%s", line.text);
}

} // namespace sagebwd::python
