//===- pack_contents.cpp - What a pack is about to hold --------------------===//

#include "cache/pack_contents.h"
#include "cache/bounded_json.h"
#include "cache/entry.h"
#include "cache/record.h"

#include "llvm/Support/FormatVariadic.h"

#include <algorithm>
#include <set>

namespace sagebwd {

namespace {

using llvm::json::Array;
using llvm::json::Object;

/// sm_90a before sm_100.
struct ByNumber {
  bool operator()(const std::string& a, const std::string& b) const {
    return llvm::StringRef(a).compare_numeric(b) < 0;
  }
};

struct Item {
  std::string digest, arch;
  int lowest_driver = 0;
  Object description;
};

std::optional<Item> describe(const std::string& bytes, std::string& why) {
  if (!bytes.empty() && bytes.front() == '{') {
    std::optional<TuningRecord> record = parse_record(bytes, &why);
    if (!record)
      return std::nullopt;
    return Item{record->key.digest, record->key["arch"], 0,
                Object{{"kind", "tuning"},
                       {"digest", record->key.digest},
                       {"bytes", static_cast<int64_t>(bytes.size())},
                       {"tile", record->tile},
                       {"compiler", record->compiler},
                       {"fields", json_of_fields(record->key.fields)}}};
  }
  std::optional<StoredEntry> stored = inspect_entry(bytes, &why);
  if (!stored)
    return std::nullopt;
  const CacheEntry& entry = stored->entry;
  return Item{stored->key.digest, entry.arch, entry.lowest_driver,
              Object{{"kind", "kernel"},
                     {"digest", stored->key.digest},
                     {"bytes", static_cast<int64_t>(bytes.size())},
                     {"kernel", entry.kernel_name},
                     {"compiler", entry.compiler},
                     {"lowest_driver", entry.lowest_driver},
                     {"fields", json_of_fields(stored->key.fields)}}};
}

} // namespace

std::optional<PackContents> pack_contents(const std::vector<std::string>& items, uint32_t format,
                                          std::string* why) {
  PackContents contents;
  std::map<std::string, Object> descriptions;
  std::set<std::string, ByNumber> archs;
  int lowest_driver = 0;
  for (const std::string& bytes : items) {
    std::string problem;
    std::optional<Item> item = describe(bytes, problem);
    if (!item) {
      *why = "item " + std::to_string(&bytes - items.data() + 1) +
             " is neither a compiled kernel nor a tuning record: " + problem;
      return std::nullopt;
    }
    auto [place, first] = contents.items.try_emplace(item->digest, &bytes);
    if (!first && *place->second != bytes) {
      *why = "two different items have one key, " + item->digest +
             ": two compilers made them, or two tunings; keep one of them";
      return std::nullopt;
    }
    if (!first)
      continue;
    archs.insert(item->arch);
    lowest_driver = std::max(lowest_driver, item->lowest_driver);
    descriptions.emplace(item->digest, std::move(item->description));
  }

  Array array;
  for (auto& [digest, description] : descriptions)
    array.push_back(std::move(description));
  contents.manifest =
      llvm::formatv("{0}", llvm::json::Value(Object{{"format", static_cast<int64_t>(format)},
                                                    {"archs", Array(archs)},
                                                    {"lowest_driver", lowest_driver},
                                                    {"items", std::move(array)}}))
          .str();
  return contents;
}

} // namespace sagebwd
