//===- driver_needs.h - The driver versions that kept kernels need --------===//
#pragma once

#include "cache/inventory.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// Numbers of kernels by architecture and lowest driver: {{"sm_90a", 13000}: 12} means that 12
/// kernels for sm_90a need a driver for CUDA 13.0 or newer.
using DriverNeeds = std::map<std::pair<std::string, int>, size_t>;

/// The needs of a directory's sound kernels whose keys are `wanted`. Reads the whole directory.
DriverNeeds driver_needs(const std::string& directory,
                         const std::function<bool(const CacheKey&)>& wanted);

/// "12 kernels in PLACE need a driver for CUDA 13.0 or newer; this one is for CUDA 12.8", or empty
/// if this driver can load all kernels of the given architectures.
std::string driver_warning(const DriverNeeds&, const std::string& place,
                           const std::vector<std::string>& archs, int driver_version);

} // namespace sagebwd
