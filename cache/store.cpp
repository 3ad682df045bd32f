//===- store.cpp - The layers of the cache on disk ------------------------===//

#include "cache/store.h"
#include "cache/directory.h"
#include "cache/eviction.h"
#include "cache/layout.h"

#include <algorithm>
#include <cstdio>

namespace sagebwd {

namespace {

std::string kernel_file(const CacheKey& key) {
  return layout::file_name(layout::Kind::kernel, key.digest);
}
std::string record_file(const CacheKey& key) {
  return layout::file_name(layout::Kind::record, key.digest);
}

[[noreturn]] void raise_bad_item(const Pack& pack, const std::string& item,
                                 const std::string& why) {
  throw PackError(pack.path() + ": the " + item + " in it is bad: " + why +
                  "; 'sagebwd cache verify --pack' lists what else is; copy or build it again");
}

} // namespace

std::vector<std::pair<const char*, uint64_t>> listed(const CacheCounters& c) {
  return {{"memory_hits", c.memory_hits},
          {"hits", c.hits},
          {"pack_hits", c.pack_hits},
          {"misses", c.misses},
          {"waits", c.waits},
          {"timeouts", c.timeouts},
          {"heals", c.heals},
          {"evictions", c.evictions},
          {"publish_failures", c.publish_failures},
          {"compiles", c.compiles},
          {"compile_us", c.compile_us}};
}

std::string to_string(const CacheCounters& counters) {
  std::string text;
  for (const auto& [name, value] : listed(counters))
    text += (text.empty() ? "" : " ") + std::string(name) + "=" + std::to_string(value);
  return text;
}

CacheStore::CacheStore(StoreOptions options) : options_(std::move(options)) {
  disabled_reason_ = options_.directory.empty()
                         ? "none of SAGEBWD_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory "
                           "(the last two by a path that begins with /)"
                         : reason_to_refuse(options_.directory);
}

std::optional<CacheEntry> CacheStore::load(const CacheKey& key, const Accept& accept,
                                           std::string* place) {
  std::optional<CacheEntry> entry = find_in_directory(key, accept);
  const bool in_directory = entry.has_value();
  if (in_directory && place)
    *place = directory();
  if (!entry)
    entry = find_in_packs(key, accept, place);
  ++(in_directory ? counters_.hits : entry ? counters_.pack_hits : counters_.misses);
  return entry;
}

std::optional<CacheEntry> CacheStore::load_again(const CacheKey& key, const Accept& accept) {
  std::optional<CacheEntry> entry = find_in_directory(key, accept);
  counters_.hits += entry.has_value();
  return entry;
}

std::optional<CacheEntry> CacheStore::find_in_directory(const CacheKey& key, const Accept& accept) {
  if (!disabled_reason_.empty())
    return std::nullopt;
  const FileRead file = read_file(directory(), kernel_file(key), /*use=*/true);
  if (file.status == FileRead::absent || file.status == FileRead::unreadable)
    return std::nullopt;
  if (file.status == FileRead::ok) {
    if (std::optional<CacheEntry> entry = deserialize(file.bytes, key)) {
      if (accept && !accept(*entry))
        return std::nullopt;
      used_.mark(directory(), key.digest);
      return entry;
    }
  }
  if (options_.heal) // the next publish replaces it
    counters_.heals += remove_file(directory(), kernel_file(key));
  return std::nullopt;
}

std::string CacheStore::objection(const CacheKey& key) const {
  if (!disabled_reason_.empty())
    return "";
  FileRead file = read_file(directory(), kernel_file(key), /*use=*/false);
  if (file.status == FileRead::ok)
    deserialize(file.bytes, key, &file.why);
  return file.why;
}

std::optional<CacheEntry> CacheStore::find_in_packs(const CacheKey& key, const Accept& accept,
                                                    std::string* place) {
  for (const std::shared_ptr<const Pack>& pack : packs()) {
    std::optional<std::string> bytes = pack->read(key.digest);
    if (!bytes)
      continue;
    std::string why;
    std::optional<CacheEntry> entry = deserialize(*bytes, key, &why);
    if (!entry)
      raise_bad_item(*pack, "kernel " + key.digest, why);
    if (!accept || accept(*entry)) {
      if (place)
        *place = pack->path();
      return entry;
    }
  }
  return std::nullopt;
}

bool CacheStore::publish(const CacheKey& key, const CacheEntry& entry) {
  const std::string bytes = serialize(key, entry);
  if (!keep(kernel_file(key), bytes))
    return false;
  used_.mark(directory(), key.digest);
  stay_within_limit(bytes.size());
  return true;
}

bool CacheStore::publish_record(const TuningRecord& record) {
  return keep(record_file(record.key), serialize(record));
}

bool CacheStore::keep(const std::string& file, const std::string& bytes) {
  std::string problem = disabled_reason_;
  if (problem.empty())
    problem = publish_file(directory(), file, bytes);
  if (problem.empty())
    return true;
  ++counters_.publish_failures;
  if (!warned_.exchange(true))
    std::fprintf(stderr, "sagebwd: warning: kernels are not kept on disk: %s. %s\n",
                 problem.c_str(), options_.if_not_kept.c_str());
  return false;
}

void CacheStore::stay_within_limit(uint64_t published_bytes) {
  std::lock_guard lock(mutex_);
  if (published_bytes <= unwatched_bytes_) {
    unwatched_bytes_ -= published_bytes;
    return;
  }
  const uint64_t limit = options_.byte_limit;
  PruneResult result = prune(directory(), std::nullopt);
  // Free a tenth of the limit, so that not every publish has to prune.
  if (limit > 0 && result.kept_bytes > limit)
    result = prune(directory(), limit - limit / 10);
  counters_.evictions += result.evicted;
  // Other processes publish, too, and this process does not see it. The remaining room is enough
  // for this many processes together.
  constexpr uint64_t kPublishers = 64;
  unwatched_bytes_ =
      limit == 0 ? UINT64_MAX : (limit - std::min(limit, result.kept_bytes)) / kPublishers;
}

KeyLock CacheStore::lock(const CacheKey& key, const KeyLock::OnWait& on_wait) {
  if (!disabled_reason_.empty())
    return KeyLock("", key.digest, options_.lock_limit, [] { return true; });
  const auto exists = [&] { return file_exists(directory(), kernel_file(key)); };
  // If an entry was there before, the caller could not use it (for example, it is of another
  // compiler).
  const auto enough = [&, before = exists()] {
    if (options_.check_interrupt)
      options_.check_interrupt();
    return !before && exists();
  };
  return KeyLock(directory(), key.digest, options_.lock_limit, enough, on_wait);
}

std::optional<TuningRecord> CacheStore::load_record(const CacheKey& key) {
  std::string why;
  auto record_in = [&](const std::string& text) {
    std::optional<TuningRecord> record = parse_record(text, &why);
    if (record && record->key.digest != key.digest) {
      why = "it is the record of another key";
      record.reset();
    }
    return record;
  };
  if (disabled_reason_.empty()) {
    const FileRead file = read_file(directory(), record_file(key), /*use=*/true);
    const bool there = file.status == FileRead::ok;
    why = file.why;
    if (std::optional<TuningRecord> record = there ? record_in(file.bytes) : std::nullopt)
      return record;
    const bool bad = file.status == FileRead::refused || (there && !is_newer_record(file.bytes));
    if (bad && !record_warned_.exchange(true))
      std::fprintf(stderr, "sagebwd: warning: a tuning record is not used: %s/%s: %s\n",
                   directory().c_str(), record_file(key).c_str(), why.c_str());
  }
  for (const std::shared_ptr<const Pack>& pack : packs())
    if (std::optional<std::string> found = pack->read(key.digest)) {
      if (std::optional<TuningRecord> record = record_in(*found))
        return record;
      raise_bad_item(*pack, "tuning record " + key.digest, why);
    }
  return std::nullopt;
}

const std::vector<std::shared_ptr<const Pack>>& CacheStore::packs() {
  std::lock_guard lock(mutex_);
  if (!packs_open_) {
    std::vector<std::shared_ptr<const Pack>> opened;
    for (const std::string& path : options_.packs)
      for (const std::string& file : packs_at(path, options_.trusted_owners))
        opened.push_back(Pack::open(file, options_.trusted_owners));
    packs_ = std::move(opened);
    packs_open_ = true;
  }
  return packs_;
}

} // namespace sagebwd
