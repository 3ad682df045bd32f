//===- driver_needs.h - Which drivers load what is kept -------------------===//
#pragma once

#include "cache/inventory.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// How many kernels of an architecture need at least which driver: {"sm_90a", 13000} to 12. Of a
/// pack, PackSummary::kernels_by_driver.
using DriverNeeds = std::map<std::pair<std::string, int>, size_t>;

/// Of the sound kernels of a directory. Reads all of it.
DriverNeeds driver_needs(const std::string& directory);

/// "12 kernels in PLACE need a driver for CUDA 13.0 or newer; this one is for CUDA 12.8", or empty
/// where this driver loads all kernels of the given architectures.
std::string driver_warning(const DriverNeeds&, const std::string& place,
                           const std::vector<std::string>& archs, int driver_version);

} // namespace sagebwd
