//===- explain.h - Explain why a kernel is not in the cache ---------------===//
#pragma once

#include "cache/inventory.h"

#include <string>
#include <vector>

namespace sagebwd {

/// A field of a key and its two values. A value is empty if its key has no such field.
struct FieldDifference {
  std::string label, wanted, kept;

  bool operator==(const FieldDifference&) const = default;
};

/// The state of a key in the layers of the cache.
struct Explanation {
  enum Verdict {
    present,        ///< sound; the next use will load it
    other_compiler, ///< sound, but of another compiler than the wanted one
    bad,            ///< something with its name exists but is not sound: see `problem`
    differs,        ///< absent; `differences` lists how the nearest entry differs
    nothing,        ///< absent, and there is nothing to compare with
  };
  Verdict verdict = nothing;
  KeptItem item; ///< the entry or the nearest one; its place is empty if there is none
  /// Why the file of the directory or the item of a pack is bad. The latter is an error on use.
  std::string problem;
  /// The fields that made the difference, sorted by label.
  std::vector<FieldDifference> differences;
  /// The fields whose values may only follow from those.
  std::vector<FieldDifference> following;
};

/// Looks for a key among the kept items in the order of the layers: first the directory's items,
/// then each pack's. If `compiler` is given, only its entries count (SAGEBWD_RECOMPILE=1).
///
/// The nearest entry is the one with the fewest differing fields; of several, one of the same kind
/// of kernel; of several, the first by name. Rotation follows from the precision; groups and sinks
/// have defaults by the spec, tiles by spec and groups; options and source follow from all of
/// these. A field is listed in `differences` only if no field differs from which it may follow.
Explanation explain(const CacheKey& wanted, const std::vector<KeptItem>& kept,
                    const std::string& compiler = "");

/// The explanation in one line, e.g. "not kept; nearest: NAME (sm_90a) in DIRECTORY, whose head_dim
/// is 128, not 64".
std::string to_string(const Explanation&);

} // namespace sagebwd
