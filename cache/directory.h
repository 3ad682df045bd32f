//===- directory.h - Whole files in a private directory -------------------===//
//
// Every call opens and checks the directory again: it may be removed, replaced or opened to others
// at any time.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace sagebwd {

/// Why a directory must not be used (it is none, another user owns it, others may write it), or
/// empty. A directory that does not exist yet is fine.
std::string reason_to_refuse(const std::string& directory);

/// Why nothing can be removed from a directory, or empty.
std::string reason_not_writable(const std::string& directory);

/// What is in a directory; nothing where it is not there or refused.
std::vector<std::string> names_in(const std::string& directory);

struct FileRead {
  enum Status {
    ok,
    absent,     ///< nothing there, or the directory is refused
    unreadable, ///< now: too many files are open, say
    refused,    ///< a link, a directory, a file that others own or may write, or the like is there
  } status = absent;
  std::string bytes;
  std::string why;                                ///< of what is unreadable or refused
  uint64_t size = 0;                              ///< of whatever is there
  std::chrono::system_clock::time_point last_use; ///< our own stamp, not the file system's atime
};
/// Removes nothing. A `use` stamps the file; looking at it does not.
FileRead read_file(const std::string& directory, const std::string& name, bool use);

/// A file's last use by its stat, where the clock can tell it.
std::chrono::system_clock::time_point last_use_of(const struct stat& info);

/// Whether a name is there, whatever it is.
bool file_exists(const std::string& directory, const std::string& name);

/// Says whether this call removed it. A directory that holds something is moved aside instead.
bool remove_file(const std::string& directory, const std::string& name);

/// Creates the directory (0700, and its parents) if needed. Returns why it cannot be used, or
/// empty.
std::string make_private_directory(const std::string& directory);

/// Makes the directory if needed and publishes a whole file in it. Returns why it failed, or empty.
std::string publish_file(const std::string& directory, const std::string& name,
                         const std::string& bytes);

/// What writers that were killed left behind: how many files, or, with `remove`, were removed.
uint64_t leftovers(const std::string& directory, bool remove);

} // namespace sagebwd
