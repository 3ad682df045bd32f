//===- record.h - What tuning one kernel found ----------------------------===//
//
// JSON, for people as much as for the library: what was tuned, on what, every timing.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/key.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

/// One tile that was tried.
struct TriedTile {
  std::string tile;       ///< as to_string(TileConfig) prints it
  std::string outcome;    ///< "timed", or why it dropped out: "crashed", "hung", "wrong", ...
  std::string detail;     ///< of the outcome, for people
  std::vector<double> ms; ///< every timing, in the order taken
  double median_ms = 0, mad_ms = 0;

  bool operator==(const TriedTile&) const = default;
};

/// The tile that won for one kernel, shape bucket and GPU.
struct TuningRecord {
  /// schema, the kernel's numerics, arch, GPU name, SM count, driver, shape bucket, digest of the
  /// generated source of the default tile.
  CacheKey key;
  std::string tile;         ///< the winner
  std::string default_tile; ///< what it competed with
  std::string compiler;     ///< e.g. "nvrtc 13.0 build 36424714"
  std::vector<TriedTile> candidates;
};

/// Of a record's file and its key. A file whose number is higher was written by a newer version.
inline constexpr const char* kTuningSchema = "sagebwd tuning 1";

/// Indented JSON with a checksum; the same record gives the same bytes.
std::string serialize(const TuningRecord&);
/// Nothing where the bytes are not a record whose digest is that of its fields and whose checksum
/// is that of its contents; `why` says.
std::optional<TuningRecord> parse_record(const std::string& bytes, std::string* why = nullptr);
/// A record of a later schema: it is not ours to read, nor to remove.
bool is_newer_record(const std::string& bytes);

/// What machines of one kind hand on to each other.
std::string serialize_records(const std::vector<TuningRecord>&);
/// All records of such a file or, also, a single one; nothing where any of them is bad.
std::optional<std::vector<TuningRecord>> parse_records(const std::string& bytes,
                                                       std::string* why = nullptr);

} // namespace sagebwd
