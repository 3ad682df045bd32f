//===- records.cpp - The tuning records: which tile won for which key -----===//

#include "runtime/tuner/records.h"

#include "cache/inventory.h"
#include "cache/layout.h"
#include "generator/choice.h"
#include "generator/space.h"
#include "runtime/driver/driver.h"
#include "runtime/generate.h"
#include "runtime/kernel_builder.h"
#include "runtime/kernels.h"
#include "runtime/tuner/trials.h"

#include <algorithm>
#include <set>

namespace sagebwd {
namespace {

/// Replaces bytes that are not printable ASCII. A key's fields are JSON, and a driver may give a
/// GPU any name.
std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~')
      c = '?';
  return text;
}

/// The SHA-256 of a kernel's source, which is remembered: generating a kernel takes a millisecond
/// or more, and operations that differ only, say, in the size of their window have the same
/// kernels.
std::string source_digest(const KernelSpec& kernel) {
  struct Known {
    ForkSafeMutex mutex;
    std::unordered_map<KernelSpec, std::string, KernelSpecHash> digests;
  };
  static constinit Single<Known> known;
  auto& [mutex, digests] = known.get([] { return new Known; });
  {
    const std::lock_guard lock(mutex);
    if (const auto found = digests.find(kernel); found != digests.end())
      return found->second;
  }
  const std::string digest = sha256_hex(generate(kernel).text);
  const std::lock_guard lock(mutex);
  return digests.emplace(kernel, digest).first->second;
}

} // namespace

Gpu gpu_of(int device) {
  const driver::DeviceInfo info = driver::device_info(device);
  return {printable(info.name),
          info.sm_count,
          arch_for_capability(info.major, info.minor),
          driver::version_text(driver::driver_version()),
          info.uuid,
          info.memory_bytes};
}

CacheKey record_key(KernelKind kind, const ResolvedSpec& spec, const Gpu& gpu,
                    const Bucket& bucket) {
  const KernelSpec kernel = tiled_kernel(kind, spec, gpu.arch, default_tile(kind, spec, gpu.arch));
  std::vector<std::pair<std::string, std::string>> fields = {
      {"kind", std::string(to_string(kind))}, {"pass", std::string(to_string(kernel.pass))}};
  visit_fields(kernel.attention, [&](const Label& label, const auto& value) {
    if (label.name != "deterministic" && !untold(label, value))
      fields.emplace_back(label.name, value_text(value));
  });
  // The kernel does not depend on `deterministic`, but the tiles that may win do.
  fields.emplace_back("deterministic", spec->deterministic ? "yes" : "no");
  fields.emplace_back("schema", kTuningSchema);
  fields.emplace_back("arch", gpu.arch.name);
  fields.emplace_back("gpu", gpu.name);
  fields.emplace_back("sm_count", std::to_string(gpu.sm_count));
  fields.emplace_back("driver", gpu.driver);
  fields.emplace_back("bucket", to_string(bucket));
  fields.emplace_back("source", source_digest(kernel));
  return make_key(std::move(fields));
}

TileConfig tile_of(const TuningRecord& record, KernelKind kind, const ResolvedSpec& spec,
                   const Arch& arch) {
  const TileConfig tile = parse_tile(record.tile);
  check_tile(tiled_kernel(kind, spec, arch, tile));
  if (std::string why = objection_to_trying(kind, spec, tile, arch); !why.empty())
    throw SpecError("tile '" + record.tile + "' of a tuning record is not for " + to_string(spec) +
                    ": " + why);
  return tile;
}

std::optional<TuningRecord> Records::find(const CacheKey& key) {
  {
    std::lock_guard lock(mutex_);
    if (auto found = known_.find(key.digest); found != known_.end())
      return found->second;
  }
  return reload(key);
}

std::optional<TuningRecord> Records::reload(const CacheKey& key) {
  std::optional<TuningRecord> record = store_.load_record(key);
  std::lock_guard lock(mutex_);
  if (record) {
    known_.insert_or_assign(key.digest, *record);
    return record;
  }
  auto found = known_.find(key.digest);
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

bool Records::keep(const TuningRecord& record) {
  const bool kept = store_.publish_record(record);
  {
    std::lock_guard lock(mutex_);
    known_.insert_or_assign(record.key.digest, record);
  }
  generation_.fetch_add(1, std::memory_order_release);
  return kept;
}

void Records::give_up(const CacheKey& key) {
  std::lock_guard lock(mutex_);
  given_up_.insert(key.digest);
}

bool Records::is_given_up(const CacheKey& key) {
  std::lock_guard lock(mutex_);
  return given_up_.count(key.digest) > 0;
}

Records::Merged Records::merge(const std::vector<TuningRecord>& records, bool overwrite) {
  for (const TuningRecord& record : records) // all records or none are merged
    parse_tile(record.tile);
  Merged merged;
  size_t lost = 0;
  for (const TuningRecord& record : records) {
    const bool known = find(record.key).has_value();
    if (known && !overwrite) {
      ++merged.kept;
      continue;
    }
    lost += !keep(record);
    ++(known ? merged.replaced : merged.added);
  }
  if (lost > 0)
    throw TuneError(std::to_string(lost) + " tuning records could not be kept: " +
                    (store_.disabled_reason().empty() ? store_.directory() + " cannot be written"
                                                      : store_.disabled_reason()));
  return merged;
}

std::vector<TuningRecord> Records::all(std::vector<std::string>* problems) {
  const auto report = [&](const std::string& problem) {
    if (!problems)
      throw TuneError(problem);
    problems->push_back(problem);
  };
  std::set<std::string> seen;
  std::vector<TuningRecord> records;
  const auto add = [&](const std::string& place, const std::string& bytes) {
    std::string why;
    std::optional<TuningRecord> record = parse_record(bytes, &why);
    if (!record) {
      report(place + ": " + why);
    } else if (seen.insert(record->key.digest).second) {
      records.push_back(std::move(*record));
    }
  };

  if (store_.disabled_reason().empty())
    for (const KeptName& name : kept_names(store_.directory())) {
      if (layout::kind_of(name.file) != layout::Kind::record)
        continue;
      const std::string path = name.place + "/" + name.file;
      std::string bytes;
      const std::optional<KeptItem> item = read_kept(name, &bytes);
      if (item && !item->problem.empty())
        report(path + ": " + item->problem);
      else if (item) // the file may have vanished meanwhile
        add(path, bytes);
    }
  for (const std::shared_ptr<const Pack>& pack : store_.packs())
    for (const std::string& digest : pack->digests())
      if (const auto bytes = pack->read(digest); bytes && bytes->starts_with("{"))
        add(pack->path() + " (" + digest + ")", *bytes);
  {
    std::lock_guard lock(mutex_);
    for (const auto& [digest, record] : known_) // records that no directory keeps
      if (seen.insert(digest).second)
        records.push_back(record);
  }
  std::sort(records.begin(), records.end(), [](const TuningRecord& a, const TuningRecord& b) {
    return a.key.digest < b.key.digest;
  });
  return records;
}

std::string Records::exported(const std::vector<TuningRecord>& records) const {
  if (records.empty())
    throw TuneError("there is no tuning record in " + place() +
                    " to export: run 'sagebwd tune' first, on the GPU in question");
  return serialize_records(records);
}

std::string Records::place() const {
  return store_.disabled_reason().empty() ? store_.directory()
                                          : "no directory (" + store_.disabled_reason() + ")";
}

Records& user_records() {
  static constinit Single<Records> records;
  return records.get([] { return new Records(user_store()); });
}

} // namespace sagebwd
