//===- diagnosis.h - What this machine has, and what is missing for what --===//
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// Something this machine lacks.
struct Missing {
  std::string what, needed_for, remedy;
};

/// What a caller knows besides: name and value of its own parts, and what it misses.
struct CallersParts {
  std::vector<std::pair<std::string, std::string>> parts;
  std::vector<Missing> missing;
};

struct Diagnosis {
  std::string json; ///< one object, indented
  std::string text; ///< the same for people
  /// Whether whatever is set here can be used: the variables, by name and value, the cache
  /// directory, the packs and all in them; and whether attention can run where there is a GPU. What
  /// is merely not there, such as a GPU, is no defect.
  bool sound = true;
};

/// Looks for the compiler (not under SAGEBWD_OFFLINE=1), the driver, GPUs, the cache and packs, as
/// building and running would; tries the cache directory by a file, which is gone afterwards.
/// Raises nothing for what is missing.
Diagnosis diagnose(const CallersParts& = {});

} // namespace sagebwd
