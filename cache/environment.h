//===- environment.h - Switches in the environment -------------------------===//
#pragma once

namespace sagebwd {

/// A variable that switches something on: unset, "" and "0" mean no, "1" means yes. Raises
/// std::invalid_argument for anything else: a switch that is misspelt must not pass for off.
bool is_switched_on(const char* variable);

} // namespace sagebwd
