//===- log.h - Which kernels this process has got, and from where -----------===//
//
// One line per kernel: to standard error or a file, as SAGEBWD_LOG says, and to a front end that
// has a log of its own.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

struct LogLine {
  std::string text; ///< without "sagebwd: "
  bool compiled;    ///< else the kernel was found
};

/// A kernel that was compiled here (then `place` is empty), or found in a directory or pack.
void log_kernel(const std::string& name, const std::string& arch, const std::string& place,
                double seconds);

/// From now on the latest lines are kept for take_log_lines().
void keep_log_lines();
/// Whether there are any; costs next to nothing.
bool has_log_lines();
std::vector<LogLine> take_log_lines();

} // namespace sagebwd
