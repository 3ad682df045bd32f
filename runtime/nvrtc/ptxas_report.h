//===- ptxas_report.h - What ptxas says about a kernel ----------------------===//
#pragma once

#include <optional>
#include <string>

namespace sagebwd::nvrtc {

struct PtxasReport {
  int registers = 0;           ///< the most any entry function uses
  int spill_bytes = 0;         ///< stores and loads of all functions
  int static_shared_bytes = 0; ///< the most any entry function uses
};

/// Reads the report that `--ptxas-options=-v` adds to a log (seen in NVRTC 12.8 and 13.0); nothing
/// where the log holds none.
std::optional<PtxasReport> parse_ptxas_report(const std::string& log);

} // namespace sagebwd::nvrtc
