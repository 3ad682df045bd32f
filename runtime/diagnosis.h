//===- diagnosis.h - The report of the doctor about this machine ----------===//
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// Something that this machine lacks, what needs it, and how to get it.
struct Missing {
  std::string what, needed_for, remedy;
};

/// The part of a caller, such as Python: names and values for the report, and what the caller
/// misses.
struct CallersParts {
  std::vector<std::pair<std::string, std::string>> parts;
  std::vector<Missing> missing;
};

struct Diagnosis {
  std::string json; ///< one indented JSON object
  std::string text; ///< the same as text for people
  /// Whether everything that is set here can be used: variables, cache directory and packs with all
  /// their items; and, if there is a GPU, whether attention can run. Something that is merely
  /// absent, such as a GPU, does not make this false.
  bool sound = true;
};

/// Looks for the compiler (not under SAGEBWD_OFFLINE=1), the driver, GPUs, the cache and packs in
/// the same way as building and running do. To test the cache directory, diagnose() writes a file
/// and removes it. If something is missing, it is reported, and no error is raised.
Diagnosis diagnose(const CallersParts& = {});

} // namespace sagebwd
