//===- whole_file.h - Read and write whole files --------------------------===//
//
// These functions are the only reader and the only writer of files, for caches, packs and the files
// of commands. A file appears whole or not at all: it is written under a temporary name, synced and
// renamed. The writer holds a lock on the temporary file, so that files of killed writers can be
// distinguished from files that are being written.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

namespace sagebwd {

//===--- Reading ----------------------------------------------------------===//

/// Reads `size` bytes. Returns false on an error, with its errno, or if the file is shorter, with
/// errno 0.
bool read_at(int file, uint64_t offset, uint64_t size, std::string& bytes);

/// Reads a file that a user named. Raises std::runtime_error if it cannot be read, is not a regular
/// file (opening a FIFO would wait) or is longer than 64 MiB, which no input needs.
std::string read_input(const std::string& path);

/// The names in a folder, as far as it can be read.
std::vector<std::string> names_of(const std::string& folder);

//===--- Writing ----------------------------------------------------------===//

/// A name that is unique among threads, processes, and hosts that share the file system.
std::string unique_name(const std::string& prefix);
/// Whether unique_name() with this prefix may have made a name.
bool is_unique_name(const std::string& name, const std::string& prefix);

/// Makes or replaces a file in an open folder; the contents are the parts, one after the other.
/// `prefix` is the start of the temporary name. Returns 0, or an errno (also beyond RLIMIT_FSIZE,
/// for any handling of SIGXFSZ in the process); on an error nothing has changed.
int replace_file(int folder, const std::string& name, const std::string& prefix,
                 const std::vector<const std::string*>& parts, mode_t mode);

/// Why a file that a user named cannot be made or replaced, as a sentence; or empty. Call it before
/// minutes are spent on the contents.
std::string reason_not_to_write(const std::string& path);
/// Makes or replaces a file that a user named, and removes temporary files of its killed writers.
/// Returns why this failed, or empty.
std::string write_output(const std::string& path, const std::vector<const std::string*>& parts);

//===--- What killed writers leave ----------------------------------------===//

/// Counts the files in a folder whose names start with `prefix` and whose writers have ended; if
/// `remove`, removes them and counts the removed files. A living writer locks its file before it
/// writes, so an empty file without a lock counts only after a minute.
uint64_t leftovers(int folder, const std::string& path, const std::string& prefix, bool remove);

} // namespace sagebwd
