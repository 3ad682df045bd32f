//===- settings.h - The environment variables, read once ------------------===//
#pragma once

#include "cache/store.h"
#include "generator/fields.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

enum class TuneMode {
  off,    ///< use the default tiles
  use,    ///< use tuned tiles if there is a record
  tune,   ///< tune on first use if there is no record
  frozen, ///< a missing record is an error
};
template <> struct Words<TuneMode> {
  static constexpr const char* what = "mode of tuning";
  static constexpr Word<TuneMode> all[] = {{TuneMode::off, "off"},
                                           {TuneMode::use, "use"},
                                           {TuneMode::tune, "tune"},
                                           {TuneMode::frozen, "frozen"}};
};

/// The value of a variable; empty if it is not set.
std::string environment_variable(const char* name);

/// A variable of this library, for help texts and reports.
struct SettingVariable {
  const char *name, *values, *meaning;
};
const std::vector<SettingVariable>& setting_variables();
/// Variables that are set and begin like this library's, but that nothing reads: most likely they
/// are misspelt.
std::vector<std::string> unknown_variables();
/// "; did you mean SAGEBWD_STATS?", or empty.
std::string hint_for_variable(const std::string& unknown);
/// Names them on standard error, each in a line that begins with `speaker`. Once per process: later
/// calls do nothing. The first use of settings() calls it.
void warn_of_unknown_variables(const std::string& speaker);
/// Makes this process silent about them, because its caller names them.
void leave_unknown_variables_to_others();
/// Whether lines can be appended to a file, which may not exist yet.
bool is_appendable(const std::string& path);

/// The values of all variables. An empty variable counts as not set. A switch is on with 1 and off
/// with 0.
struct Settings {
  std::string cache_directory;          ///< absolute; empty if no variable names one
  std::vector<std::string> packs;       ///< absolute, in the order in which packs are read
  std::vector<uint32_t> trusted_owners; ///< users whose packs may be read
  uint64_t byte_limit = StoreOptions().byte_limit;
  bool offline = false, recompile = false, allow_spills = false, stats = false;
  bool debug_waits = false;
  /// One line per kernel is written there: an absolute path or one of the two constants. If it is
  /// empty, nothing is written, except one line on standard error if compiling takes long.
  std::string log;
  static constexpr char kStandardError[] = "1", kNoLog[] = "0";
  std::string nvrtc; ///< absolute; empty: NVRTC is looked for
  TuneMode tune = TuneMode::use;
  std::string tune_worker;  ///< absolute; empty: a worker is looked for
  std::string template_dir; ///< absolute; empty: embedded templates
  /// The rank of this process in its group, if a launcher started it: torchrun, Open MPI, Slurm or
  /// another MPI. Rank 0 tunes; the other ranks read its records.
  std::optional<int> rank;

  StoreOptions store_options() const;
  /// Reads all variables. Raises SpecError for a value that is not valid, so that a misspelt value
  /// does not silently become the default. If `problems` is given, the messages are added to it
  /// instead, and such a variable has its default.
  static Settings from_environment(std::vector<std::string>* problems = nullptr);
};

/// The settings of the process: the environment at the first call that raises no error.
const Settings& settings();

} // namespace sagebwd
