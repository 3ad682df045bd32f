//===- directory.h - Whole files in a private directory -------------------===//
//
// Every call opens and checks the directory again, because the directory may be removed, replaced
// or made writable for others at any time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace sagebwd {

/// Why a directory must not be used (it is not a directory, another user owns it, or others may
/// write to it), or empty. A directory that does not exist yet may be used.
std::string reason_to_refuse(const std::string& directory);

/// Why files cannot be removed from a directory, or empty.
std::string reason_not_writable(const std::string& directory);

/// The names in a directory; empty if the directory does not exist or must not be used.
std::vector<std::string> names_in(const std::string& directory);

struct FileRead {
  enum Status {
    ok,
    absent,     ///< there is no such file, or the directory must not be used
    unreadable, ///< it cannot be read now, for example because too many files are open
    /// The name is that of a link, a directory, a file that others own or may write, or similar.
    refused,
  } status = absent;
  std::string bytes;
  std::string why;   ///< why it is unreadable or refused
  uint64_t size = 0; ///< of the file, in bytes
  /// The stamp of the last use, not the file system's atime.
  std::chrono::system_clock::time_point last_use;
};
/// Reads a file, and removes nothing. If `use`, the time of the last use is renewed.
FileRead read_file(const std::string& directory, const std::string& name, bool use);

/// The time of a file's last use, limited to the range of the clock.
std::chrono::system_clock::time_point last_use_of(const struct stat& info);

/// Whether a name exists, for a file of any kind.
bool file_exists(const std::string& directory, const std::string& name);

/// Removes a file; returns whether this call removed it. A directory that is not empty is moved
/// aside instead.
bool remove_file(const std::string& directory, const std::string& name);

/// Creates the directory (with mode 0700) and its parents if needed. Returns why it cannot be used,
/// or empty.
std::string make_private_directory(const std::string& directory);

/// Creates the directory if needed and publishes a whole file in it. Returns why this failed, or
/// empty.
std::string publish_file(const std::string& directory, const std::string& name,
                         const std::string& bytes);

/// Counts the files of writers that were killed; if `remove`, removes them and counts the removed
/// files.
uint64_t leftovers(const std::string& directory, bool remove);

} // namespace sagebwd
