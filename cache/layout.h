//===- layout.h - The names of files in the cache -------------------------===//
//
// A cache directory contains kernels, tuning records and crossovers, named by their keys' digests;
// files that are being written; and two files that are used only for locks. This header spells
// their names. Only Python reads and writes crossovers (core/measured_crossovers.py).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/key.h"

#include <string>

namespace sagebwd::layout {

/// The start of the name of a file that is being written.
inline constexpr const char* kTemporary = ".tmp-";
inline constexpr const char* kLocks = "locks"; ///< has a byte for each key that is being made
inline constexpr const char* kUsers = "users"; ///< has a byte for each key that is in use
/// Marks a folder as that of a prebuild.
inline constexpr const char* kWorkLock = "prebuild.lock";

enum class Kind { kernel, record, crossover, temporary, lock, foreign };

inline std::string file_name(Kind kind, const std::string& digest) {
  return digest + (kind == Kind::kernel   ? ".kernel"
                   : kind == Kind::record ? ".tuning"
                                          : ".crossover");
}
/// The digest in the name of a kernel's or record's file.
inline std::string digest_in(const std::string& name) { return name.substr(0, name.find('.')); }

inline Kind kind_of(const std::string& name) {
  if (name.rfind(kTemporary, 0) == 0)
    return Kind::temporary;
  if (name == kLocks || name == kUsers || name == kWorkLock)
    return Kind::lock;
  for (Kind kind : {Kind::kernel, Kind::record, Kind::crossover})
    if (const std::string digest = digest_in(name);
        is_digest(digest) && name == file_name(kind, digest))
      return kind;
  return Kind::foreign;
}

/// The start of temporary names of a file that is not in a cache directory; the temporary file is
/// in the same folder.
inline std::string temporary_of(const std::string& name) { return "." + name + kTemporary; }
/// The folder in which a prebuild keeps its kernels until the pack is written.
inline std::string work_folder_of(const std::string& pack) { return pack + ".partial"; }

} // namespace sagebwd::layout
