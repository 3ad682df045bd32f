//===- log.h - A log line for each kernel built or found ------------------===//
//
// The log has one line per kernel. SAGEBWD_LOG sends lines to standard error or to a file; front
// ends with a log of their own read them with take_log_lines().
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

struct LogLine {
  std::string text; ///< without "sagebwd: "
  bool compiled;    ///< true: compiled here; false: found in a layer of the cache
};

/// Logs a kernel that was found in the directory or pack `place`, or, if `place` is empty, compiled
/// here.
void log_kernel(const std::string& name, const std::string& arch, const std::string& place,
                double seconds);

/// From this call on, the latest lines are kept for take_log_lines().
void keep_log_lines();
/// Whether there are lines to take; this costs one atomic load.
bool has_log_lines();
std::vector<LogLine> take_log_lines();

} // namespace sagebwd
