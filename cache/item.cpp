//===- item.cpp - A kernel or a tuning record -----------------------------===//

#include "cache/item.h"
#include "cache/entry.h"
#include "cache/record.h"

namespace sagebwd {

std::string inspect_item(const std::string& bytes, Item& item) {
  std::string problem;
  if (item.kernel) {
    if (std::optional<StoredEntry> stored = inspect_entry(bytes, &problem)) {
      item.key = std::move(stored->key);
      item.name = std::move(stored->entry.kernel_name);
      item.arch = std::move(stored->entry.arch);
      item.compiler = std::move(stored->entry.compiler);
      item.lowest_driver = stored->entry.lowest_driver;
    }
    return problem;
  }
  item.newer = is_newer_record(bytes);
  if (std::optional<TuningRecord> record = parse_record(bytes, &problem)) {
    item.key = std::move(record->key);
    const CacheKey& key = item.key;
    item.name = key["kind"] + " d" + key["head_dim"] + " " + key["dtype"] +
                " causal=" + key["causal"] + " " + key["bucket"] + " on " + key["gpu"] + ": " +
                record->tile;
    item.arch = key["arch"];
    item.compiler = std::move(record->compiler);
    item.tile = std::move(record->tile);
  }
  return problem;
}

} // namespace sagebwd
