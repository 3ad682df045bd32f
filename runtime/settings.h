//===- settings.h - What the environment says, read once ------------------===//
#pragma once

#include "cache/store.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

enum class TuneMode {
  off,    ///< the default tiles
  use,    ///< tuned tiles where there is a record
  tune,   ///< what has no record is tuned on first use
  frozen, ///< a missing record is an error
};
std::string_view to_string(TuneMode);
/// Raises SpecError for an unknown word, and lists the known ones.
TuneMode parse_tune_mode(std::string_view);

/// Empty where it is not set.
std::string environment_variable(const char* name);

/// A variable of ours, for help texts and reports.
struct SettingVariable {
  const char *name, *values, *meaning;
};
const std::vector<SettingVariable>& setting_variables();
/// Those named like ours that are set and that nothing reads: misspelt ones, most likely.
std::vector<std::string> unknown_variables();
/// "; did you mean SAGEBWD_STATS?", or nothing.
std::string hint_for_variable(const std::string& unknown);
/// Whether lines can be added to a file, which may have to be made.
bool is_appendable(const std::string& path);

/// An empty variable counts as one that is not set. A switch is on with 1 and off with 0.
struct Settings {
  std::string cache_directory;          ///< absolute; empty where nothing names one
  std::vector<std::string> packs;       ///< absolute; in the order in which they are asked
  std::vector<uint32_t> trusted_owners; ///< users whose packs are read
  uint64_t byte_limit = StoreOptions().byte_limit;
  bool offline = false, recompile = false, allow_spills = false, stats = false;
  bool debug_waits = false;
  /// Where a line per kernel goes: an absolute path, or one of these two. Empty: nowhere, and one
  /// line says of compiling that it lasts.
  std::string log;
  static constexpr char kStandardError[] = "1", kNoLog[] = "0";
  std::string nvrtc; ///< absolute; empty: looked for
  TuneMode tune = TuneMode::use;
  std::string tune_worker;  ///< absolute; empty: looked for
  std::string template_dir; ///< absolute; empty: the embedded templates
  /// This process's number in its group, where a launcher started one: torchrun, Open MPI, Slurm or
  /// another MPI. Rank 0 tunes, the others read.
  std::optional<int> rank;

  StoreOptions store_options() const;
  /// Raises SpecError for a value that is not valid: what is misspelt must not pass for the
  /// default. With `problems`, these take what it would raise, and the default stands in.
  static Settings from_environment(std::vector<std::string>* problems = nullptr);
};

/// The process's: the environment as it is at the first call that raises nothing.
const Settings& settings();

} // namespace sagebwd
