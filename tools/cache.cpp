//===- cache.cpp - 'sagebwd cache' and what its commands share -------------===//
#include "tools/cache.h"
#include "cache/bounded_json.h"
#include "runtime/settings.h"
#include "tools/spec_options.h"

#include <algorithm>
#include <ctime>

namespace sagebwd::tools {

namespace {

/// "2026-01-31T08:15:00Z"
std::string utc_time(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

} // namespace

std::unique_ptr<Command> make_cache() {
  auto cache = std::make_unique<Command>(
      "cache", "list, check, prune and copy compiled kernels and tuning records",
      "Compiled kernels and tuning records are kept in the directory SAGEBWD_CACHE_DIR\n"
      "(by default ~/.cache/sagebwd). Its kernels take at most SAGEBWD_CACHE_LIMIT\n"
      "bytes. They are also read from the packs, or folders of packs, that\n"
      "SAGEBWD_CACHE_PACKS names (a:b), which are never written.\n"
      "Every command takes --json.\n"
      "\n"
      "examples:\n"
      "  sagebwd cache stat\n"
      "  sagebwd cache explain --arch sm_90a --head-dim 64\n"
      "  sagebwd cache prune --unused-for 30d\n"
      "  sagebwd cache export --out kernels.pack\n");
  cache->subcommands =
      make_all({make_cache_ls, make_cache_stat, make_cache_verify, make_cache_prune,
                make_cache_explain, make_cache_export, make_cache_import});
  return cache;
}

void CacheCommand::find_items() {
  const CacheStore& store = user_store();
  if (store.disabled_reason().empty())
    names_ = kept_names(store.directory());
  else
    failures.push_back("the directory is not used: " + store.disabled_reason());
  find_items_in(store.options().packs);
}

void CacheCommand::find_items_in(const std::vector<std::string>& paths) {
  for (const std::string& path : paths)
    try {
      for (const std::string& file : packs_at(path, settings().trusted_owners)) {
        packs.push_back(Pack::open(file, settings().trusted_owners));
        for (KeptName& name : kept_names(packs.back()))
          names_.push_back(std::move(name));
      }
    } catch (const PackError& error) {
      failures.push_back(error.what());
    }
}

void CacheCommand::visit_items(const char* what,
                               const std::function<void(KeptItem, std::string bytes)>& visit) {
  Progress progress(what, names_.size());
  for (const KeptName& name : names_) {
    try {
      std::string bytes;
      if (std::optional<KeptItem> item = read_kept(name, &bytes))
        visit(std::move(*item), std::move(bytes));
    } catch (const PackError& error) { // for example, truncated meanwhile
      if (std::find(failures.begin(), failures.end(), error.what()) == failures.end())
        failures.push_back(error.what());
    }
    progress.advance(name.digest.substr(0, 12));
  }
}

ExitCode CacheCommand::finish(std::initializer_list<llvm::json::Object::KV> facts,
                              const std::function<void()>& print_text) {
  llvm::json::Object object(facts);
  object["failures"] = llvm::json::Array(failures);
  return Command::finish(std::move(object), print_text);
}

void ItemFilter::declare(OptionTable& options) {
  options.list("arch", "ARCH,..", archs_, "only kernels of these architectures");
  options.offer(arch_names());
  options.text("kernel", "TEXT", kernel_, "only kernels with this in their name");
}

void ItemFilter::check() const {
  for (const std::string& name : archs_)
    find_arch(name);
}

bool ItemFilter::matches(const KeptItem& item) const {
  return (archs_.empty() || std::find(archs_.begin(), archs_.end(), item.arch) != archs_.end()) &&
         item.name.find(kernel_) != std::string::npos;
}

std::string readable_bytes(uint64_t bytes) {
  if (bytes < 1 << 10)
    return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / (1 << 10);
  const char* const units[] = {"KiB", "MiB", "GiB"};
  size_t unit = 0;
  for (; value >= 1 << 10 && unit + 1 < std::size(units); ++unit)
    value /= 1 << 10;
  return format("%.1f %s", value, units[unit]);
}

std::string where_is(const KeptItem& item) {
  return item.place + (item.in_pack ? ", item " + item.digest : "/" + item.file);
}

llvm::json::Object json_of(const KeptItem& item) {
  llvm::json::Object object{{"kind", item.kernel ? "kernel" : "tuning"},
                            {"digest", item.digest},
                            {"layer", item.in_pack ? "pack" : "directory"},
                            {"place", item.place},
                            {"bytes", item.bytes},
                            {"last_use", nullptr}};
  if (item.last_use)
    object["last_use"] = utc_time(*item.last_use);
  if (item.newer)
    object["newer"] = true;
  if (!item.problem.empty()) {
    object["bad"] = item.problem;
    return object;
  }
  object["name"] = item.name;
  object["arch"] = item.arch;
  object["compiler"] = item.compiler;
  if (item.kernel)
    object["lowest_driver"] = item.lowest_driver;
  object["fields"] = as_json(item.key.fields);
  return object;
}

} // namespace sagebwd::tools
