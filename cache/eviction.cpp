//===- eviction.cpp - Keeping a directory within its limit -----------------===//

#include "cache/eviction.h"
#include "cache/directory.h"
#include "cache/key.h"
#include "cache/lock.h"
#include "cache/posix.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>

namespace sagebwd {

namespace {

using Clock = std::chrono::system_clock;

constexpr std::string_view kSuffix = ".kernel";

/// As it is, before a stamp in the future is taken for now; but some file systems know stamps
/// beyond the year 2262, where the clock's 64 bits of nanoseconds end.
Clock::time_point stamp_of(const struct stat& info) {
  constexpr time_t kLastSecond = INT64_MAX / std::nano::den - 1;
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(
      std::chrono::seconds(std::clamp(info.st_mtim.tv_sec, -kLastSecond, kLastSecond)) +
      std::chrono::nanoseconds(info.st_mtim.tv_nsec)));
}

std::string name_of(const KeptFile& file) { return file.digest + std::string(kSuffix); }

} // namespace

std::vector<KeptFile> kept_files(const std::string& path) {
  std::vector<KeptFile> files;
  Descriptor directory = open_directory(path);
  if (!directory || !reason_to_refuse(path).empty())
    return files;
  std::error_code error;
  for (std::filesystem::directory_iterator item(path, error), end; !error && item != end;
       item.increment(error)) {
    std::string name = item->path().filename();
    struct stat info;
    if (name.size() <= kSuffix.size() || !name.ends_with(kSuffix) ||
        !is_digest(name.substr(0, name.size() - kSuffix.size())) ||
        ::fstatat(directory.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode))
      continue;
    files.push_back({name.substr(0, name.size() - kSuffix.size()),
                     static_cast<uint64_t>(info.st_size), stamp_of(info)});
  }
  // By the stamps as they are, so that those in the future keep their order among themselves.
  std::sort(files.begin(), files.end(), [](const KeptFile& a, const KeptFile& b) {
    return std::tie(a.last_use, a.digest) < std::tie(b.last_use, b.digest);
  });
  const Clock::time_point now = Clock::now();
  for (KeptFile& file : files)
    if (file.last_use > now) {
      file.last_use = now;
      // Else what was used before the clock was set back would outlive all that is used after.
      ::utimensat(directory.get(), name_of(file).c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
    }
  return files;
}

PruneResult prune(const std::string& directory, std::optional<uint64_t> byte_limit,
                  std::optional<std::chrono::seconds> unused_for) {
  PruneResult result;
  result.swept = sweep_leftovers(directory);
  const std::vector<KeptFile> files = kept_files(directory);
  for (const KeptFile& file : files)
    result.kept_bytes += file.bytes;
  result.kept = files.size();
  const Clock::time_point now = Clock::now();
  for (const KeptFile& file : files) {
    const auto unused = std::chrono::duration_cast<std::chrono::seconds>(now - file.last_use);
    const bool stale = unused_for && unused > *unused_for;
    const bool too_much = byte_limit && result.kept_bytes > *byte_limit;
    if ((!stale && !too_much) || UseMarks::used(directory, file.digest))
      continue;
    if (remove_file(directory, name_of(file))) {
      ++result.evicted;
      result.evicted_bytes += file.bytes;
    } else if (file_exists(directory, name_of(file))) {
      ++result.stuck; // on a read-only file system, say
      continue;
    } // else another process was faster
    --result.kept;
    result.kept_bytes -= file.bytes;
  }
  return result;
}

} // namespace sagebwd
