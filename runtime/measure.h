//===- measure.h - How fast a GPU does what the kernels are made of --------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

/// One rate of a GPU, counted in what `unit` names.
struct MeasuredRate {
  std::string name; ///< e.g. "mma_s8"
  std::string what; ///< for people
  std::string unit; ///< "operations" (two a multiply-add), "results" or "bytes"
  double per_clock; ///< and SM, by the SM's own clock
  double tera;      ///< 10^12 a second of the whole GPU, by the device's events
  double clock_ghz; ///< that both together imply
};

/// All rates in one source for NVRTC, an entry point each: "sagebwd_measure_" and its name.
std::string measure_source();
std::vector<std::string> measured_names();

/// Compiles, runs each a few times on the device and takes the fastest. Raises LibraryError,
/// CompileError, DriverError or SpecError (an architecture that is not built for).
std::vector<MeasuredRate> measure_rates(int device);

} // namespace sagebwd
