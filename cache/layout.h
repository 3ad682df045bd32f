//===- layout.h - Which file is what --------------------------------------===//
//
// A cache directory holds kernels and tuning records under their keys' digests, files that are
// being written, and two that carry nothing but locks. No other place spells their names.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/key.h"

#include <string>

namespace sagebwd::layout {

inline constexpr const char* kTemporary = ".tmp-"; ///< begins the name of a file being written
inline constexpr const char* kLocks = "locks";     ///< a byte for each key that is being made
inline constexpr const char* kUsers = "users";     ///< likewise, for each that is in use
inline constexpr const char* kWorkLock = "prebuild.lock"; ///< makes a folder a prebuild's

enum class Kind { kernel, record, temporary, lock, foreign };

inline std::string file_name(Kind kind, const std::string& digest) {
  return digest + (kind == Kind::kernel ? ".kernel" : ".tuning");
}
/// Of a kernel's or a record's file.
inline std::string digest_in(const std::string& name) { return name.substr(0, name.find('.')); }

inline Kind kind_of(const std::string& name) {
  if (name.rfind(kTemporary, 0) == 0)
    return Kind::temporary;
  if (name == kLocks || name == kUsers || name == kWorkLock)
    return Kind::lock;
  for (Kind kind : {Kind::kernel, Kind::record})
    if (const std::string digest = digest_in(name);
        is_digest(digest) && name == file_name(kind, digest))
      return kind;
  return Kind::foreign;
}

/// What begins the temporary names of a file that lies in no cache directory, beside it.
inline std::string temporary_of(const std::string& name) { return "." + name + kTemporary; }
/// Where a prebuild keeps its kernels until the pack is written.
inline std::string work_folder_of(const std::string& pack) { return pack + ".partial"; }

} // namespace sagebwd::layout
