//===- whole_file.h - Files that are read and appear whole or not at all --===//
//
// One reader and one writer, for caches, packs and what the commands read and write. A file is
// written under a temporary name, synced and renamed. Its writer holds a lock on it meanwhile, so
// that what dead writers left can be told from what is being written.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

namespace sagebwd {

//===--- Reading ----------------------------------------------------------===//

/// False on an error, where errno says which, and where the file ends earlier: errno is 0.
bool read_at(int file, uint64_t offset, uint64_t size, std::string& bytes);

/// A file that somebody named. Raises std::runtime_error where it cannot be read, is no regular
/// file (a FIFO would be waited for) or is longer than anything that we take, 64 MiB.
std::string read_input(const std::string& path);

/// What is in a folder, as far as it can be read.
std::vector<std::string> names_of(const std::string& folder);

//===--- Writing ----------------------------------------------------------===//

/// Unique among threads, processes, and hosts that share the file system.
std::string unique_name(const std::string& prefix);
/// Whether a name is one that it gave.
bool is_unique_name(const std::string& name, const std::string& prefix);

/// Makes or replaces a file of an open folder by these parts, one after the other. `prefix` begins
/// its temporary name. Gives 0, or the errno of what failed (beyond RLIMIT_FSIZE too, whatever the
/// process does with SIGXFSZ); then nothing has changed.
int replace_file(int folder, const std::string& name, const std::string& prefix,
                 const std::vector<const std::string*>& parts, mode_t mode);

/// Why no file can be made or replaced where somebody named one, or empty: for those who are about
/// to spend minutes on it. Whole sentences, as of write_output().
std::string reason_not_to_write(const std::string& path);
/// Makes or replaces it and sweeps what writers of it that were killed left. Why it failed, or
/// empty.
std::string write_output(const std::string& path, const std::vector<const std::string*>& parts);

//===--- What killed writers leave ----------------------------------------===//

/// The files of a folder that begin like this and whose writers are gone: how many there are, or,
/// with `remove`, were removed. A living writer locks its file before it writes to it; while it is
/// empty it may be about to, for a minute.
uint64_t leftovers(int folder, const std::string& path, const std::string& prefix, bool remove);

} // namespace sagebwd
