//===- driver_needs.cpp - The driver versions that kept kernels need ------===//

#include "runtime/driver_needs.h"
#include "runtime/driver/driver.h"

#include <algorithm>

namespace sagebwd {

DriverNeeds driver_needs(const std::string& directory,
                         const std::function<bool(const CacheKey&)>& wanted) {
  DriverNeeds needs;
  for (const KeptName& name : kept_names(directory))
    if (std::optional<KeptItem> item = read_kept(name);
        item && item->kernel && item->problem.empty() && wanted(item->key))
      ++needs[{item->arch, item->lowest_driver}];
  return needs;
}

std::string driver_warning(const DriverNeeds& needs, const std::string& place,
                           const std::vector<std::string>& archs, int driver_version) {
  size_t count = 0;
  int lowest = 0;
  for (const auto& [need, kernels] : needs) {
    const auto& [arch, driver] = need;
    if (driver <= driver_version || std::find(archs.begin(), archs.end(), arch) == archs.end())
      continue;
    count += kernels;
    lowest = std::max(lowest, driver);
  }
  if (count == 0)
    return "";
  return std::to_string(count) + (count == 1 ? " kernel in " : " kernels in ") + place +
         (count == 1 ? " needs" : " need") + " a driver for CUDA " + driver::version_text(lowest) +
         " or newer; this one is for CUDA " + driver::version_text(driver_version);
}

} // namespace sagebwd
