//===- whole_file.h - Files that appear whole or not at all ----------------===//
//
// Internal to cache/. A file is written under a temporary name, synced and renamed. Its writer
// holds a lock on it meanwhile, so that what dead writers left can be told from what is being
// written.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <string>
#include <sys/stat.h>
#include <sys/types.h>
#include <vector>

namespace sagebwd {

/// Why the file at `path` is not to be trusted (it is none, another user owns it, others may write
/// it, no kernel is as long), or empty.
std::string objection_to(const struct stat& info, const std::string& path);

/// Unique among threads, processes, and hosts that share the file system.
std::string unique_name(const std::string& prefix);

/// Makes or replaces a file of an open folder by these parts, one after the other. `prefix` begins
/// its temporary name. Gives 0, or the errno of what failed; then nothing has changed.
int replace_file(int folder, const std::string& name, const std::string& prefix,
                 const std::vector<const std::string*>& parts, mode_t mode);

/// Whether the writer of an open temporary file is gone. A living one locks it before it writes to
/// it; while it is empty it may be about to, for a minute.
bool is_leftover(int file);
/// Removes the leftovers among a folder's files of this prefix; says how many.
uint64_t sweep_leftovers(int folder, const std::string& path, const std::string& prefix);

} // namespace sagebwd
