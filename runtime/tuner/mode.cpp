//===- mode.cpp - What the environment says about tuning ---------------------===//

#include "runtime/tuner/mode.h"

#include "generator/spec.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

namespace sagebwd {
namespace {

constexpr std::pair<TuneMode, std::string_view> kModes[] = {{TuneMode::off, "off"},
                                                            {TuneMode::use, "use"},
                                                            {TuneMode::tune, "tune"},
                                                            {TuneMode::frozen, "frozen"}};

} // namespace

std::string_view to_string(TuneMode mode) { return kModes[static_cast<size_t>(mode)].second; }

TuneMode parse_tune_mode(std::string_view text) {
  for (const auto& [mode, name] : kModes)
    if (name == text)
      return mode;
  throw SpecError("SAGEBWD_TUNE is '" + std::string(text) +
                  "': supported are off (default tiles), use (tuned tiles where there is a "
                  "record), tune (tune what has none) and frozen (a missing record is an error)");
}

TuneMode tune_mode() {
  const char* value = std::getenv("SAGEBWD_TUNE");
  return value && *value ? parse_tune_mode(value) : TuneMode::use;
}

std::optional<int> process_rank() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"})
    if (const char* value = std::getenv(name)) {
      int rank = 0;
      const char* end = value + std::strlen(value);
      const auto [stop, error] = std::from_chars(value, end, rank);
      if (error == std::errc() && stop == end && rank >= 0)
        return rank;
    }
  return std::nullopt;
}

} // namespace sagebwd
