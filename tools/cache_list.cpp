//===- cache_list.cpp - 'sagebwd cache ls' and 'stat' ----------------------===//
#include "cache/directory.h"
#include "cache/eviction.h"
#include "cache/layout.h"
#include "runtime/driver/driver.h"
#include "runtime/settings.h"
#include "tools/cache.h"

#include <algorithm>
#include <filesystem>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// "5 min ago"
std::string readable_age(std::chrono::system_clock::time_point time) {
  using namespace std::chrono;
  const int64_t age = duration_cast<seconds>(system_clock::now() - time).count();
  if (age < 60)
    return "now";
  if (age < 2 * 3600)
    return std::to_string(age / 60) + " min ago";
  if (age < 48 * 3600)
    return std::to_string(age / 3600) + " h ago";
  return std::to_string(age / (24 * 3600)) + " d ago";
}

class List : public CacheCommand {
public:
  List()
      : CacheCommand(
            "cache ls", "list kernels and tuning records",
            "Lists every compiled kernel and tuning record of the directory and the packs,\n"
            "with the compiler that made it. Bad ones are marked, and the exit code is 0 all\n"
            "the same ('cache verify' exits with 1). The next use of a bad kernel of the\n"
            "directory replaces it. Listing kernels does not count as using them.\n"
            "\n"
            "examples:\n"
            "  sagebwd cache ls\n"
            "  sagebwd cache ls --arch sm_90a --kernel forward --json\n") {
    filter_.declare(options);
  }

  ExitCode run() override {
    filter_.check();
    find_items();
    std::vector<KeptItem> items;
    visit_items("reading", [&](KeptItem item, std::string) {
      if (filter_.matches(item))
        items.push_back(std::move(item));
    });
    std::stable_sort(items.begin(), items.end(), [](const KeptItem& a, const KeptItem& b) {
      return std::tie(b.kernel, a.name, a.arch) < std::tie(a.kernel, b.name, b.arch);
    });
    json::Array rows;
    Table table;
    size_t kernels = 0, records = 0, bad = 0;
    uint64_t bytes = 0;
    for (const KeptItem& item : items) {
      rows.push_back(json_of(item));
      table.add({{"", "kernel or tuning", shown_name(item)},
                 {"", "arch", item.arch},
                 {"", "bytes", item.bytes},
                 {"", "compiler", item.compiler},
                 {"", "last use", item.last_use ? readable_age(*item.last_use) : ""},
                 {"", "where", item.in_pack ? item.place : "directory"}});
      bytes += item.bytes;
      ++(!item.problem.empty() ? bad : item.kernel ? kernels : records);
    }
    const CacheStore& store = user_store();
    return finish({{"directory", store.directory()}, {"items", std::move(rows)}}, [&] {
      table.print();
      printf("%s, %s, %zu bad, %s in all; directory %s\n", counted(kernels, "kernel").c_str(),
             counted(records, "tuning record").c_str(), bad, readable_bytes(bytes).c_str(),
             store.disabled_reason().empty() ? store.directory().c_str() : "not used");
    });
  }

private:
  static std::string shown_name(const KeptItem& item) {
    const std::string digest = item.digest.substr(0, 12);
    if (!item.problem.empty())
      return "bad: " +
             layout::file_name(item.kernel ? layout::Kind::kernel : layout::Kind::record, digest) +
             ", " + item.problem;
    return item.newer ? "tuning by a newer version: " + digest : item.name;
  }

  ItemFilter filter_;
};

/// A bar that shows how much of the limit is used.
std::string fill_bar(uint64_t bytes, uint64_t limit) {
  if (limit == 0)
    return readable_bytes(bytes) + ", no limit";
  const double share = static_cast<double>(bytes) / static_cast<double>(limit);
  return bar(share) + format(" %.1f %% of ", 100 * share) + readable_bytes(limit);
}

class Stat : public CacheCommand {
public:
  Stat()
      : CacheCommand(
            "cache stat", "show how much is kept, and where",
            "Shows the directory with its limit and its size, and each pack with the oldest\n"
            "driver that loads all of its kernels. If a directory or a pack cannot be used,\n"
            "the reason is shown.\n"
            "\n"
            "examples:\n"
            "  sagebwd cache stat\n"
            "  sagebwd cache stat --json\n") {}

  ExitCode run() override {
    const CacheStore& store = user_store();
    const std::string& directory = store.directory();
    uint64_t kernels = 0, bytes = 0, records = 0;
    for (const KeptFile& file : kept_files(directory))
      ++kernels, bytes += file.bytes;
    for (const KeptName& name : kept_names(directory))
      records += layout::kind_of(name.file) == layout::Kind::record;
    const uint64_t left = leftovers(directory, /*remove=*/false),
                   limit = store.options().byte_limit;
    std::string lines;
    if (!store.disabled_reason().empty())
      lines = "directory  not used: " + store.disabled_reason() + "\n";
    else
      lines = "directory  " + directory + "\nkernels    " + std::to_string(kernels) + ", " +
              readable_bytes(bytes) + "\nfull       " + fill_bar(bytes, limit) + "\nrecords    " +
              std::to_string(records) + " of tuning\nleftovers  " + std::to_string(left) +
              " of killed writers" + (left ? "; 'sagebwd cache prune' sweeps them\n" : "\n");
    json::Array packs;
    for (const std::string& path : store.options().packs)
      examine_all(path, lines, packs);
    if (packs.empty())
      lines += "packs      none (SAGEBWD_CACHE_PACKS)\n";
    return finish({{"directory", directory},
                   {"disabled_reason", store.disabled_reason()},
                   {"kernels", kernels},
                   {"bytes", bytes},
                   {"byte_limit", limit},
                   {"records", records},
                   {"leftovers", left},
                   {"packs", std::move(packs)}},
                  [&] { fputs(lines.c_str(), stdout); });
  }

private:
  /// Describes the packs of a file or a folder, and appends their lines to the text.
  static void examine_all(const std::string& path, std::string& lines, json::Array& packs) {
    const std::vector<uint32_t>& trusted = settings().trusted_owners;
    std::vector<std::string> files;
    try {
      files = packs_at(path, trusted);
    } catch (const PackError& error) {
      packs.push_back(unusable(path, error, lines));
    }
    for (const std::string& file : files)
      try {
        packs.push_back(described(file, summarize(*Pack::open(file, trusted)), lines));
      } catch (const PackError& error) {
        packs.push_back(unusable(file, error, lines));
      }
  }
  static json::Object unusable(const std::string& path, const PackError& error,
                               std::string& lines) {
    lines += std::string("pack       not usable: ") + error.what() + "\n";
    return json::Object{{"path", path}, {"usable", false}, {"error", std::string(error.what())}};
  }
  static json::Object described(const std::string& path, const PackSummary& pack,
                                std::string& lines) {
    std::error_code gone;
    const uintmax_t size = std::filesystem::file_size(path, gone), bytes = gone ? 0 : size;
    lines += "pack       " + path + ": " + counted(pack.kernels, "kernel") + ", " +
             counted(pack.records, "record") + ", " + readable_bytes(bytes) +
             ", drivers from CUDA " + driver::version_text(pack.lowest_driver) + " on,";
    for (const std::string& arch : pack.archs)
      lines += " " + arch;
    lines += "\n";
    return json::Object{{"path", path},
                        {"usable", true},
                        {"kernels", pack.kernels},
                        {"records", pack.records},
                        {"bytes", bytes},
                        {"archs", json::Array(pack.archs)},
                        {"lowest_driver", pack.lowest_driver}};
  }
};

} // namespace

std::unique_ptr<Command> make_cache_ls() { return std::make_unique<List>(); }
std::unique_ptr<Command> make_cache_stat() { return std::make_unique<Stat>(); }

} // namespace sagebwd::tools
