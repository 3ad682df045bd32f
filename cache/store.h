//===- store.h - The user's cubin directory --------------------------------===//
//
// One file an entry. A write publishes a whole file by rename or nothing; a bad read is unlinked,
// counted and treated as a miss; a directory that cannot be used costs one warning, never a call.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/entry.h"

#include <atomic>
#include <string>

namespace sagebwd {

struct CacheCounters {
  std::atomic<uint64_t> hits{0}, misses{0}, heals{0}, publish_failures{0};
};

class CacheStore {
public:
  /// An empty path means SAGEBWD_CACHE_DIR, else $XDG_CACHE_HOME/sagebwd, else ~/.cache/sagebwd,
  /// else no directory at all. Nothing is created before the first publish. A directory that
  /// another user owns or that others may write is refused: a cubin is code.
  explicit CacheStore(std::string directory = "");

  std::optional<CacheEntry> load(const CacheKey&);
  /// False where it could not be kept; the caller goes on with the bytes it has.
  bool publish(const CacheKey&, const CacheEntry&);

  const std::string& directory() const { return directory_; }
  /// Why the directory is not used, or empty.
  const std::string& disabled_reason() const { return disabled_reason_; }
  const CacheCounters& counters() const { return counters_; }

private:
  static std::string file_name(const CacheKey&);
  void warn_once(const std::string& what);

  std::string directory_;
  std::string disabled_reason_;
  CacheCounters counters_;
  std::atomic<bool> warned_{false};
};

} // namespace sagebwd
