//===- inventory.cpp - All that is kept, read and checked ------------------===//

#include "cache/inventory.h"
#include "cache/bounded_json.h"
#include "cache/directory.h"
#include "cache/entry.h"
#include "cache/posix.h"
#include "cache/record.h"
#include "cache/whole_file.h"

#include <algorithm>
#include <filesystem>
#include <set>

namespace sagebwd {

namespace {

constexpr std::string_view kKernel = ".kernel", kTuning = ".tuning";

/// The names in a directory; empty where it is not there or refused.
std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  if (!reason_to_refuse(directory).empty())
    return names;
  std::error_code error;
  for (std::filesystem::directory_iterator item(directory, error), end; !error && item != end;
       item.increment(error))
    names.push_back(item->path().filename());
  return names;
}

/// False where the file is gone. What cannot be read is a problem of the item.
bool read_file(const KeptName& name, KeptItem& item, std::string& bytes) {
  const std::string path = name.place + "/" + name.file;
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  if (!file || ::fstat(file.get(), &info) != 0) {
    const int error = errno;
    item.problem =
        error == ELOOP ? "it is a symbolic link" : "it cannot be read: " + error_text(error);
    return error != ENOENT;
  }
  item.bytes = static_cast<uint64_t>(info.st_size);
  item.last_use = std::chrono::system_clock::from_time_t(info.st_mtim.tv_sec);
  item.problem = objection_to(info, path);
  if (!item.problem.empty())
    return true;
  bytes.resize(item.bytes);
  for (size_t done = 0; done < bytes.size();) {
    ssize_t count = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR)
      continue;
    if (count <= 0) {
      item.problem = count < 0 ? "it cannot be read: " + error_text(errno) : "it is truncated";
      return true;
    }
    done += static_cast<size_t>(count);
  }
  return true;
}

void inspect_kernel(const std::string& bytes, KeptItem& item) {
  std::optional<StoredEntry> stored = inspect_entry(bytes, &item.problem);
  if (!stored)
    return;
  item.key = std::move(stored->key);
  item.name = std::move(stored->entry.kernel_name);
  item.arch = std::move(stored->entry.arch);
  item.compiler = std::move(stored->entry.compiler);
  item.lowest_driver = stored->entry.lowest_driver;
}

void inspect_record(const std::string& bytes, KeptItem& item) {
  item.newer = is_newer_record(bytes);
  if (item.newer)
    return;
  std::optional<TuningRecord> record = parse_record(bytes, &item.problem);
  if (!record)
    return;
  item.key = std::move(record->key);
  const CacheKey& key = item.key;
  item.name = key["kind"] + " d" + key["head_dim"] + " " + key["dtype"] +
              " causal=" + key["causal"] + " " + key["bucket"] + " on " + key["gpu"] + ": " +
              record->tile;
  item.arch = key["arch"];
  item.compiler = std::move(record->compiler);
}

} // namespace

std::vector<KeptName> kept_names(const std::string& directory) {
  std::vector<KeptName> kept;
  for (std::string& file : names_in(directory)) {
    const std::string_view suffix = file.ends_with(kKernel) ? kKernel : kTuning;
    if (!file.ends_with(suffix))
      continue;
    std::string digest = file.substr(0, file.size() - suffix.size());
    if (is_digest(digest))
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
  item.place = name.place;
  item.digest = name.digest;
  item.in_pack = name.pack != nullptr;
  std::string content;
  if (name.pack) {
    std::optional<std::string> found = name.pack->read(name.digest);
    if (!found)
      return std::nullopt;
    content = std::move(*found);
    item.bytes = content.size();
    item.kernel = content.empty() || content.front() != '{';
  } else {
    item.kernel = name.file.ends_with(kKernel);
    if (!read_file(name, item, content))
      return std::nullopt;
  }
  if (!item.problem.empty())
    return item;
  item.kernel ? inspect_kernel(content, item) : inspect_record(content, item);
  if (item.problem.empty() && !item.newer && item.key.digest != item.digest)
    item.problem = "it is the entry of another key";
  if (bytes && item.problem.empty())
    *bytes = std::move(content);
  return item;
}

PackSummary summarize(const Pack& pack, DriverNeeds* needs) {
  PackSummary summary;
  const std::optional<llvm::json::Value> parsed = parse_bounded_json(pack.manifest());
  const llvm::json::Object* manifest = parsed ? parsed->getAsObject() : nullptr;
  const llvm::json::Array* items = manifest ? manifest->getArray("items") : nullptr;
  if (!items)
    throw PackError(pack.path() + ": its manifest lists no items; build the pack again");
  std::set<std::string> archs;
  for (const llvm::json::Value& value : *items) {
    const llvm::json::Object* item = value.getAsObject();
    const llvm::json::Object* fields = item ? item->getObject("fields") : nullptr;
    if (!fields)
      throw PackError(pack.path() + ": its manifest has an item without fields; build it again");
    const std::string arch = text_of(*fields, "arch").value_or("");
    archs.insert(arch);
    if (text_of(*item, "kind") != "kernel") {
      ++summary.records;
      continue;
    }
    ++summary.kernels;
    const auto driver = llvm_compat::to_optional<int64_t>(item->getInteger("lowest_driver"));
    const int lowest = static_cast<int>(driver.value_or(0));
    summary.lowest_driver = std::max(summary.lowest_driver, lowest);
    if (needs)
      ++(*needs)[{arch, lowest}];
  }
  summary.archs.assign(archs.begin(), archs.end());
  return summary;
}

DriverNeeds driver_needs(const std::string& directory) {
  DriverNeeds needs;
  for (const KeptName& name : kept_names(directory))
    if (std::optional<KeptItem> item = read_kept(name);
        item && item->kernel && item->problem.empty())
      ++needs[{item->arch, item->lowest_driver}];
  return needs;
}

std::string driver_warning(const DriverNeeds& needs, const std::string& place,
                           const std::vector<std::string>& archs, int driver_version) {
  auto cuda = [](int version) {
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  size_t count = 0;
  int lowest = 0;
  for (const auto& [need, kernels] : needs) {
    const auto& [arch, driver] = need;
    if (driver <= driver_version || std::find(archs.begin(), archs.end(), arch) == archs.end())
      continue;
    count += kernels;
    lowest = std::max(lowest, driver);
  }
  if (count == 0)
    return "";
  return std::to_string(count) + (count == 1 ? " kernel in " : " kernels in ") + place +
         (count == 1 ? " needs" : " need") + " a driver for " + cuda(lowest) +
         " or newer; this one is for " + cuda(driver_version);
}

uint64_t count_leftovers(const std::string& directory) {
  uint64_t count = 0;
  for (const std::string& name : names_in(directory)) {
    if (name.rfind(".tmp-", 0) != 0)
      continue;
    Descriptor file(
        ::open((directory + "/" + name).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    count += file && is_leftover(file.get());
  }
  return count;
}

} // namespace sagebwd
