//===- eviction.cpp - Keep a directory within its limit -------------------===//

#include "cache/eviction.h"
#include "cache/directory.h"
#include "cache/layout.h"
#include "cache/lock.h"

#include <algorithm>
#include <fcntl.h>
#include <tuple>

namespace sagebwd {

using Clock = std::chrono::system_clock;

std::vector<KeptFile> kept_files(const std::string& directory) {
  std::vector<KeptFile> files;
  for (const std::string& name : names_in(directory)) {
    struct stat info;
    if (layout::kind_of(name) == layout::Kind::kernel &&
        ::lstat((directory + "/" + name).c_str(), &info) == 0 && S_ISREG(info.st_mode))
      files.push_back(
          {layout::digest_in(name), static_cast<uint64_t>(info.st_size), last_use_of(info)});
  }
  // Sort by the unchanged stamps, so that stamps in the future keep their order.
  std::sort(files.begin(), files.end(), [](const KeptFile& a, const KeptFile& b) {
    return std::tie(a.last_use, a.digest) < std::tie(b.last_use, b.digest);
  });
  const Clock::time_point now = Clock::now();
  for (KeptFile& file : files) {
    file.in_future = file.last_use > now;
    file.last_use = std::min(file.last_use, now);
  }
  return files;
}

PruneResult prune(const std::string& directory, std::optional<uint64_t> byte_limit,
                  std::optional<std::chrono::seconds> unused_for, bool dry_run) {
  PruneResult result;
  result.swept = leftovers(directory, /*remove=*/!dry_run);
  const std::vector<KeptFile> files = kept_files(directory);
  for (const KeptFile& file : files)
    result.kept_bytes += file.bytes;
  result.kept = files.size();
  const Clock::time_point now = Clock::now();
  for (const KeptFile& file : files) {
    const std::string name = layout::file_name(layout::Kind::kernel, file.digest);
    // Otherwise files that were used before the clock was set back would outlive all files that are
    // used afterwards.
    if (file.in_future && !dry_run)
      ::utimensat(AT_FDCWD, (directory + "/" + name).c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
    const auto unused = std::chrono::duration_cast<std::chrono::seconds>(now - file.last_use);
    const bool stale = unused_for && unused > *unused_for;
    const bool too_much = byte_limit && result.kept_bytes > *byte_limit;
    if (!stale && !too_much)
      continue;
    if (UseMarks::used(directory, file.digest)) {
      ++result.in_use;
      continue;
    }
    if (dry_run || remove_file(directory, name)) {
      ++result.evicted;
      result.evicted_bytes += file.bytes;
    } else if (file_exists(directory, name)) {
      ++result.stuck; // for example on a read-only file system
      continue;
    } // else another process has removed it
    --result.kept;
    result.kept_bytes -= file.bytes;
  }
  return result;
}

} // namespace sagebwd
