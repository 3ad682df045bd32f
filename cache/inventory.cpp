//===- inventory.cpp - Read and check everything that is kept -------------===//

#include "cache/inventory.h"
#include "cache/bounded_json.h"
#include "cache/directory.h"
#include "cache/layout.h"

#include <algorithm>

namespace sagebwd {

std::vector<KeptName> kept_names(const std::string& directory) {
  std::vector<KeptName> kept;
  for (std::string& file : names_in(directory)) {
    const layout::Kind kind = layout::kind_of(file);
    if (kind != layout::Kind::kernel && kind != layout::Kind::record)
      continue;
    std::string digest = layout::digest_in(file);
    kept.push_back({directory, std::move(file), std::move(digest), nullptr});
  }
  std::sort(kept.begin(), kept.end(),
            [](const KeptName& a, const KeptName& b) { return a.file < b.file; });
  return kept;
}

std::vector<KeptName> kept_names(const std::shared_ptr<const Pack>& pack) {
  std::vector<KeptName> kept;
  for (const std::string& digest : pack->digests())
    kept.push_back({pack->path(), "", digest, pack});
  return kept;
}

std::optional<KeptItem> read_kept(const KeptName& name, std::string* bytes) {
  KeptItem item;
  static_cast<KeptName&>(item) = name;
  item.in_pack = name.pack != nullptr;
  std::string content;
  if (name.pack) {
    std::optional<std::string> found = name.pack->read(name.digest);
    if (!found)
      return std::nullopt;
    content = std::move(*found);
    item.bytes = content.size();
    item.kernel = is_kernel(content);
  } else {
    FileRead read = read_file(name.place, name.file, /*use=*/false);
    if (read.status == FileRead::absent)
      return std::nullopt;
    item.kernel = layout::kind_of(name.file) == layout::Kind::kernel;
    item.bytes = read.size;
    item.last_use = read.last_use;
    item.problem = std::move(read.why);
    content = std::move(read.bytes);
  }
  if (!item.problem.empty())
    return item;
  item.problem = inspect_item(content, item);
  if (item.newer)
    item.problem.clear();
  else if (item.problem.empty() && item.key.digest != item.digest)
    item.problem = "it is the entry of another key";
  if (bytes && item.problem.empty())
    *bytes = std::move(content);
  return item;
}

PackSummary summarize(const Pack& pack) {
  PackSummary summary;
  const std::optional<llvm::json::Value> parsed = parse_bounded_json(pack.manifest());
  const llvm::json::Object* manifest = parsed ? parsed->getAsObject() : nullptr;
  const llvm::json::Array* items = manifest ? manifest->getArray("items") : nullptr;
  if (!items || !read_json(manifest->get("archs"), summary.archs))
    throw PackError(pack.path() + ": its manifest lists no items; build the pack again");
  for (const llvm::json::Value& value : *items) {
    const llvm::json::Object* item = value.getAsObject();
    const llvm::json::Object* fields = item ? item->getObject("fields") : nullptr;
    if (!fields)
      throw PackError(pack.path() + ": its manifest has an item without fields; build it again");
    std::string kind, arch;
    read_json(item->get("kind"), kind);
    if (kind != "kernel") {
      ++summary.records;
      continue;
    }
    int lowest_driver = 0;
    read_json(item->get("lowest_driver"), lowest_driver);
    read_json(fields->get("arch"), arch);
    summary.lowest_driver = std::max(summary.lowest_driver, lowest_driver);
    ++summary.kernels;
    CacheKey& key = summary.keys.emplace_back();
    read_json(item->get("digest"), key.digest);
    read_json(item->get("fields"), key.fields);
    std::sort(key.fields.begin(), key.fields.end());
  }
  return summary;
}

} // namespace sagebwd
