//===- cache_exchange.cpp - 'sagebwd cache export' and 'import' ------------===//
#include "cache/layout.h"
#include "tools/cache.h"

#include <set>

namespace sagebwd::tools {

namespace {

class Export : public CacheCommand {
public:
  Export()
      : CacheCommand(
            "cache export", "write everything that is kept into one pack",
            "Writes the kernels and tuning records of the directory and the packs into one\n"
            "pack. Use it on another machine with SAGEBWD_CACHE_PACKS or 'cache import'. The\n"
            "same contents give the same bytes. Bad items are left out and listed, and the\n"
            "exit code is then 1.\n"
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
    find_items();
    std::vector<std::string> items;
    std::set<std::string> taken; // the directory comes first, as at run time
    size_t kernels = 0;
    visit_items("reading", [&](KeptItem item, std::string bytes) {
      if (!item.problem.empty())
        failures.push_back("left out, bad: " + where_is(item) + ": " + item.problem);
      else if (!item.newer && filter_.matches(item) && taken.insert(item.digest).second) {
        kernels += item.kernel;
        items.push_back(std::move(bytes));
      }
    });
    if (items.empty()) {
      failures.push_back(out_ + " is not written: nothing is kept" +
                         (filter_.empty() ? "" : " that --arch and --kernel let through"));
      return give_up(failures);
    }
    write_pack(out_, items);
    const size_t records = items.size() - kernels;
    return finish({{"pack", out_}, {"kernels", kernels}, {"records", records}}, [&] {
      printf("%s and %s written to %s\n", counted(kernels, "kernel").c_str(),
             counted(records, "tuning record").c_str(), out_.c_str());
    });
  }

private:
  std::string out_;
  ItemFilter filter_;
};

/// Whether the directory has the item, undamaged.
bool is_here(const KeptItem& item) {
  const layout::Kind kind = item.kernel ? layout::Kind::kernel : layout::Kind::record;
  const std::optional<KeptItem> here = read_kept(
      {user_store().directory(), layout::file_name(kind, item.digest), item.digest, nullptr});
  return here && here->problem.empty();
}

bool keep(const KeptItem& item, const std::string& bytes) {
  CacheStore& store = user_store();
  if (!item.kernel) {
    const std::optional<TuningRecord> record = parse_record(bytes);
    return record && store.publish_record(*record);
  }
  const std::optional<StoredEntry> stored = inspect_entry(bytes);
  return stored && store.publish(stored->key, stored->entry);
}

class Import : public CacheCommand {
public:
  Import()
      : CacheCommand(
            "cache import", "copy the contents of a pack into the directory",
            "Checks each kernel and tuning record of a pack and keeps it in the directory.\n"
            "Those that are already there stay as they are. If some are bad, they are listed,\n"
            "the others are imported, and the exit code is 1. (SAGEBWD_CACHE_PACKS uses a\n"
            "pack without importing it.)\n"
            "\n"
            "examples:\n"
            "  sagebwd cache import kernels.pack\n"
            "  sagebwd cache import kernels.pack --json\n") {
    options.positional("FILE", pack_, "the pack to read");
  }

  ExitCode run() override {
    if (pack_.empty())
      throw UsageError("import needs a FILE, the pack to read");
    const CacheStore& store = user_store();
    const std::string& directory = store.directory();
    if (!store.disabled_reason().empty())
      return give_up({store.disabled_reason()});
    find_items_in({pack_});
    if (!failures.empty())
      return give_up(failures);
    check_limit();
    size_t imported = 0, present = 0, lost = 0;
    visit_items("importing", [&](KeptItem item, std::string bytes) {
      if (!item.problem.empty())
        failures.push_back(where_is(item) + " is bad: " + item.problem);
      else if (item.newer)
        failures.push_back(where_is(item) + " was written by a newer version");
      else if (is_here(item))
        ++present;
      else
        ++(keep(item, bytes) ? imported : lost);
    });
    if (lost > 0)
      failures.push_back(counted(lost, "item") + " could not be kept in " + directory);
    return finish({{"pack", pack_},
                   {"directory", directory},
                   {"imported", imported},
                   {"present", present},
                   {"evicted", store.counters().evictions.load()}},
                  [&] {
                    printf("%zu imported into %s, %zu %s there already\n", imported,
                           directory.c_str(), present, present == 1 ? "was" : "were");
                  });
  }

private:
  /// Raises std::runtime_error if the directory would have to evict the kernels again.
  void check_limit() {
    const uint64_t limit = user_store().options().byte_limit;
    uint64_t bytes = 0;
    if (limit > 0)
      visit_items("weighing", [&](const KeptItem& item, std::string) {
        bytes += item.kernel && item.problem.empty() ? item.bytes : 0;
      });
    if (bytes > limit)
      throw std::runtime_error(pack_ + " holds " + readable_bytes(bytes) +
                               " of kernels and the directory may keep " + readable_bytes(limit) +
                               ", so nothing is imported: raise SAGEBWD_CACHE_LIMIT, or name the "
                               "pack in SAGEBWD_CACHE_PACKS, which uses it without importing it");
  }

  std::string pack_;
};

} // namespace

std::unique_ptr<Command> make_cache_export() { return std::make_unique<Export>(); }
std::unique_ptr<Command> make_cache_import() { return std::make_unique<Import>(); }

} // namespace sagebwd::tools
