//===- cache_exchange.cpp - 'sagebwd cache export' and 'import' ------------===//
#include "cache/directory.h"
#include "tools/cache.h"

#include <set>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

class Export : public Command {
public:
  Export()
      : Command("cache export", "everything kept, as one pack",
                "Writes the kernels and tuning records of the directory and the packs into one\n"
                "pack, which SAGEBWD_CACHE_PACKS or 'cache import' take elsewhere. The same\n"
                "contents give the same bytes. What is bad is left out and listed; the exit code\n"
                "is then 1.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache export --out kernels.pack\n"
                "  sagebwd cache export --out hopper.pack --arch sm_90a --kernel d128\n") {
    options.text("out", "FILE", out_, "the pack to write");
    filter_.declare(options);
  }

  ExitCode run() override {
    if (out_.empty())
      throw UsageError("export needs --out FILE, the pack to write");
    filter_.check();
    Layers layers = user_layers();
    std::vector<std::string> items;
    std::set<std::string> taken; // the directory's come first, as at run time
    size_t kernels = 0;
    visit_items(layers, "reading", [&](const KeptName& name, KeptItem item, std::string bytes) {
      if (!item.problem.empty())
        layers.failures.push_back("left out, bad: " + name.place + ", " + name.digest + ": " +
                                  item.problem);
      else if (!item.newer && filter_.matches(item) && taken.insert(item.digest).second) {
        kernels += item.kernel;
        items.push_back(std::move(bytes));
      }
    });
    if (items.empty()) {
      layers.failures.push_back(out_ + " is not written: nothing is kept" +
                                (filter_.empty() ? "" : " that --arch and --kernel let through"));
      return report_failures("cache export", layers.failures);
    }
    write_pack(out_, items);
    if (json)
      print_json(json::Object{{"pack", out_},
                              {"kernels", static_cast<int64_t>(kernels)},
                              {"records", static_cast<int64_t>(items.size() - kernels)},
                              {"failures", json::Array(layers.failures)}});
    else
      printf("%zu kernels and %zu tuning records written to %s\n", kernels, items.size() - kernels,
             out_.c_str());
    return report_failures("cache export", layers.failures);
  }

private:
  std::string out_;
  ItemFilter filter_;
};

class Import : public Command {
public:
  Import()
      : Command("cache import", "a pack's contents into the directory",
                "Checks each kernel and tuning record of a pack and keeps it in the directory.\n"
                "Those that are there already stay as they are. Bad ones are listed, the others\n"
                "imported, and the exit code is 1. (SAGEBWD_CACHE_PACKS uses a pack without\n"
                "importing it.)\n"
                "\n"
                "examples:\n"
                "  sagebwd cache import kernels.pack\n"
                "  sagebwd cache import kernels.pack --json\n") {
    options.positional("FILE", pack_, "the pack");
  }

  ExitCode run() override {
    if (pack_.empty())
      throw UsageError("import needs a FILE, the pack to read");
    const CacheStore& store = user_store();
    if (!store.disabled_reason().empty())
      return report_failures("cache import", {store.disabled_reason()});
    Layers layers;
    layers.packs.push_back(Pack::open(pack_));
    layers.names = kept_names(layers.packs.front());
    check_limit(layers);
    visit_items(layers, "importing", [&](const KeptName&, KeptItem item, std::string bytes) {
      if (!item.problem.empty())
        layers.failures.push_back("item " + item.digest + " is bad: " + item.problem);
      else if (item.newer)
        layers.failures.push_back("item " + item.digest + " was written by a newer version");
      else
        take(item, bytes);
    });
    if (lost_ > 0)
      layers.failures.push_back(std::to_string(lost_) + " items could not be kept in " +
                                store.directory());
    if (json)
      print_json(json::Object{{"pack", pack_},
                              {"directory", store.directory()},
                              {"imported", static_cast<int64_t>(imported_)},
                              {"present", static_cast<int64_t>(present_)},
                              {"evicted", static_cast<int64_t>(store.counters().evictions)},
                              {"failures", json::Array(layers.failures)}});
    else
      printf("%zu imported into %s, %zu were there already\n", imported_, store.directory().c_str(),
             present_);
    return report_failures("cache import", layers.failures);
  }

private:
  /// Raises std::runtime_error for kernels that the directory would have to evict again.
  void check_limit(Layers layers) const;
  void take(const KeptItem&, const std::string& bytes);

  std::string pack_;
  size_t imported_ = 0, present_ = 0, lost_ = 0;
};

void Import::check_limit(Layers layers) const {
  const uint64_t limit = user_store().options().byte_limit;
  uint64_t bytes = 0;
  if (limit > 0)
    visit_items(layers, "weighing", [&](const KeptName&, const KeptItem& item, std::string) {
      bytes += item.kernel && item.problem.empty() ? item.bytes : 0;
    });
  if (bytes > limit)
    throw std::runtime_error(pack_ + " holds " + readable_bytes(bytes) +
                             " of kernels and the directory may keep " + readable_bytes(limit) +
                             ", so nothing is imported: raise SAGEBWD_CACHE_LIMIT, or name the "
                             "pack in SAGEBWD_CACHE_PACKS, which uses it without importing it");
}

void Import::take(const KeptItem& item, const std::string& bytes) {
  CacheStore& store = user_store();
  const std::string file = item.digest + (item.kernel ? ".kernel" : ".tuning");
  const std::optional<KeptItem> here = read_kept({store.directory(), file, item.digest, nullptr});
  if (here && here->problem.empty()) {
    ++present_;
    return;
  }
  bool kept = false;
  if (item.kernel) {
    const std::optional<StoredEntry> stored = inspect_entry(bytes);
    kept = stored && store.publish(stored->key, stored->entry);
  } else {
    const std::optional<TuningRecord> record = parse_record(bytes);
    kept = record && store.publish_record(*record);
  }
  ++(kept ? imported_ : lost_);
}

} // namespace

std::unique_ptr<Command> make_cache_export() { return std::make_unique<Export>(); }
std::unique_ptr<Command> make_cache_import() { return std::make_unique<Import>(); }

} // namespace sagebwd::tools
