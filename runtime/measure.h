//===- measure.h - Measure the rates of instructions on a GPU -------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

/// One measured rate of a GPU, in units of `unit`.
struct MeasuredRate {
  std::string name; ///< e.g. "mma_s8"
  std::string what; ///< a description for people
  std::string unit; ///< "operations" (a multiply-add is two), "results" or "bytes"
  double per_clock; ///< units per clock and SM, by the SM's own clock
  double tera;      ///< 10^12 units per second on the whole GPU, timed with the device's events
  double clock_ghz; ///< in GHz, the clock frequency that both rates imply
};

/// The source of all rates for NVRTC. Each rate has an entry point, "sagebwd_measure_" and its
/// name.
std::string measure_source();
std::vector<std::string> measured_names();

/// Compiles the source, runs each rate a few times on the device and keeps the fastest run. Raises
/// LibraryError, CompileError, DriverError, or SpecError (for an architecture that is not
/// supported).
std::vector<MeasuredRate> measure_rates(int device);

} // namespace sagebwd
