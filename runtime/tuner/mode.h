//===- mode.h - What the environment says about tuning ----------------------===//
#pragma once

#include <optional>
#include <string_view>

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
/// SAGEBWD_TUNE, by default `use`. Raises SpecError.
TuneMode tune_mode();

/// This process's number in its group, where a launcher started one: torchrun, Open MPI, Slurm or
/// another MPI. Rank 0 tunes, the others read.
std::optional<int> process_rank();

} // namespace sagebwd
