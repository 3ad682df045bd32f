//===- ptxas_report.h - Read the report of ptxas about a kernel -----------===//
#pragma once

#include <optional>
#include <string>

namespace sagebwd::nvrtc {

struct PtxasReport {
  int registers = 0;           ///< the maximum over all entry functions
  int spill_bytes = 0;         ///< bytes of spill stores and loads of all functions
  int static_shared_bytes = 0; ///< the maximum over all entry functions
};

/// Reads the report that `--ptxas-options=-v` adds to a log (the format of NVRTC 12.8 and 13.0);
/// nothing if the log has none.
std::optional<PtxasReport> parse_ptxas_report(const std::string& log);

} // namespace sagebwd::nvrtc
