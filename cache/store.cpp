//===- store.cpp - The user's cubin directory ------------------------------===//

#include "cache/store.h"
#include "cache/directory.h"

#include <cstdio>

namespace sagebwd {

CacheStore::CacheStore(std::string directory)
    : directory_(directory.empty() ? default_cache_directory() : std::move(directory)) {
  if (directory_.empty())
    disabled_reason_ = "none of SAGEBWD_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory";
  else
    disabled_reason_ = reason_to_refuse(directory_);
}

std::optional<CacheEntry> CacheStore::load(const CacheKey& key) {
  auto miss = [&]() -> std::optional<CacheEntry> {
    ++counters_.misses;
    return std::nullopt;
  };
  if (!disabled_reason_.empty()) {
    warn_once(disabled_reason_);
    return miss();
  }

  std::string name = file_name(key), bytes;
  ReadStatus status = read_file(directory_, name, bytes);
  if (status == ReadStatus::absent)
    return miss();
  if (status == ReadStatus::ok) {
    if (std::optional<CacheEntry> entry = deserialize(bytes, key)) {
      ++counters_.hits;
      return entry;
    }
    remove_file(directory_, name);
  }
  ++counters_.heals; // what was there is gone: the next publish takes its place
  return miss();
}

bool CacheStore::publish(const CacheKey& key, const CacheEntry& entry) {
  std::string problem = disabled_reason_;
  if (problem.empty())
    problem = publish_file(directory_, file_name(key), serialize(key, entry));
  if (problem.empty())
    return true;
  ++counters_.publish_failures;
  warn_once(problem);
  return false;
}

std::string CacheStore::file_name(const CacheKey& key) { return key.digest + ".kernel"; }

void CacheStore::warn_once(const std::string& what) {
  if (!warned_.exchange(true))
    std::fprintf(stderr,
                 "sagebwd: warning: kernels are not kept on disk: %s. Every process compiles them "
                 "again; set SAGEBWD_CACHE_DIR to a directory of your own to keep them.\n",
                 what.c_str());
}

} // namespace sagebwd
