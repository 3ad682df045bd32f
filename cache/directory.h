//===- directory.h - Whole files in a private directory --------------------===//
//
// A file is read whole or not at all, and appears whole or not at all. Every call opens and checks
// the directory again: it may be removed, replaced or opened to others at any time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <string>

namespace sagebwd {

/// Why a directory must not be used (it is none, another user owns it, others may write it), or
/// empty. A directory that does not exist yet is fine.
std::string reason_to_refuse(const std::string& directory);

/// Why nothing can be removed from a directory, or empty.
std::string reason_not_writable(const std::string& directory);

enum class ReadStatus {
  ok,
  absent,  ///< nothing there, or it cannot be read now
  refused, ///< a link, a directory, a file that others own or may write, or the like is there
};
/// Stamps the file's last use. Removes nothing; `why`, if given, gets the reason of a refusal.
ReadStatus read_file(const std::string& directory, const std::string& name, std::string& bytes,
                     std::string* why = nullptr);

/// Whether a name is there, whatever it is.
bool file_exists(const std::string& directory, const std::string& name);

/// Says whether this call removed it. A directory that holds something is moved aside instead.
bool remove_file(const std::string& directory, const std::string& name);

/// Creates the directory (0700, and its parents) if needed. Returns why it cannot be used, or
/// empty.
std::string make_private_directory(const std::string& directory);

/// Makes the directory if needed; writes a unique file beside the name, syncs it and renames it.
/// The writer holds a lock on the unique file, so that leftovers of dead writers can be told from
/// files that are being written. Returns why it failed, or empty.
std::string publish_file(const std::string& directory, const std::string& name,
                         const std::string& bytes);

/// Removes what writers that were killed left behind; says how many files.
uint64_t sweep_leftovers(const std::string& directory);

} // namespace sagebwd
