//===- environment.cpp - Switches in the environment -----------------------===//

#include "cache/environment.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sagebwd {

bool is_switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  const std::string text = value ? value : "";
  if (text.empty() || text == "0")
    return false;
  if (text == "1")
    return true;
  throw std::invalid_argument(std::string(variable) + " is '" + text +
                              "'; it takes 1 for yes, and 0 or nothing for no");
}

} // namespace sagebwd
