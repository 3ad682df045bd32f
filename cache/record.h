//===- record.h - The result of tuning one kernel -------------------------===//
//
// A record is JSON, for people as well as for the library. It says what was tuned on which GPU, and
// has every timing.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/key.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

/// A tile that was tried.
struct TriedTile {
  std::string tile;       ///< as to_string(TileConfig) prints it
  std::string outcome;    ///< "timed", or why it dropped out: "crashed", "hung", "wrong", ...
  std::string detail;     ///< details of the outcome, for people
  std::vector<double> ms; ///< every timing in milliseconds, in the order of measurement
  double median_ms = 0, mad_ms = 0;

  bool operator==(const TriedTile&) const = default;
};

/// The tile that won for one kernel, shape bucket and GPU.
struct TuningRecord {
  /// The key has these fields: schema, the kernel's numerics, arch, GPU name, SM count, driver,
  /// shape bucket, and the digest of the default tile's generated source.
  CacheKey key;
  std::string tile;         ///< the tile that won
  std::string default_tile; ///< the tile against which the others competed
  std::string compiler;     ///< e.g. "nvrtc 13.0 build 36424714"
  std::vector<TriedTile> candidates;
};

/// The schema of a record's file and key. A file with a higher number was written by a newer
/// version.
inline constexpr const char* kTuningSchema = "sagebwd tuning 1";

/// Indented JSON with a checksum; the same record gives the same bytes.
std::string serialize(const TuningRecord&);
/// Reads a record. Returns nothing unless its digest is that of its fields and its checksum is that
/// of its contents; `why` gets the reason.
std::optional<TuningRecord> parse_record(const std::string& bytes, std::string* why = nullptr);
/// Whether bytes are a record of a later schema, which this version must neither read nor remove.
bool is_newer_record(const std::string& bytes);

/// A file of records, for other machines of the same kind.
std::string serialize_records(const std::vector<TuningRecord>&);
/// Reads a file of records or a single record. Returns nothing if any record is bad.
std::optional<std::vector<TuningRecord>> parse_records(const std::string& bytes,
                                                       std::string* why = nullptr);

} // namespace sagebwd
