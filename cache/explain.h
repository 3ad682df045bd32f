//===- explain.h - Why a kernel is not in the cache -----------------------===//
#pragma once

#include "cache/inventory.h"

#include <string>
#include <vector>

namespace sagebwd {

/// A field of a key, and its two values; empty where a key has no such field.
struct FieldDifference {
  std::string label, wanted, kept;

  bool operator==(const FieldDifference&) const = default;
};

/// What the layers hold for a key.
struct Explanation {
  enum Verdict {
    present,        ///< sound, and taken at the next use
    other_compiler, ///< sound, but another compiler is wanted
    bad,            ///< something is there under its name, which is not sound: see `problem`
    differs,        ///< not there; the nearest that is differs in `differences`
    nothing,        ///< not there, nor anything to compare it with
  };
  Verdict verdict = nothing;
  KeptItem item;       ///< the entry, or the nearest; without a place where there is none
  std::string problem; ///< why the directory's or the pack's is bad; the latter is an error on use
  std::vector<FieldDifference> differences; ///< what made the difference, sorted by label
  std::vector<FieldDifference> following;   ///< fields whose values may merely follow from those
};

/// Looks for a key among what is kept, in the layers' order: the directory's items, then each
/// pack's. `compiler`, if given, is the only one whose entries count (SAGEBWD_RECOMPILE=1).
///
/// The nearest entry is that of the fewest differing fields; of several, one of the same kind of
/// kernel, and then whichever name comes first. Rotation follows from the precision, groups and
/// sinks default by the spec, tiles by spec and groups, options and source follow from all: a field
/// is named only where none differs that it may follow from.
Explanation explain(const CacheKey& wanted, const std::vector<KeptItem>& kept,
                    const std::string& compiler = "");

/// One line, e.g. "not kept; nearest: NAME (sm_90a) in DIRECTORY, whose head_dim is 128, not 64".
std::string to_string(const Explanation&);

} // namespace sagebwd
