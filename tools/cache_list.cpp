//===- cache_list.cpp - 'sagebwd cache ls' and 'stat' ----------------------===//
#include "cache/eviction.h"
#include "tools/cache.h"

#include <algorithm>
#include <filesystem>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

class List : public Command {
public:
  List()
      : Command("cache ls", "list kernels and tuning records",
                "Every compiled kernel and tuning record of the directory and the packs, with\n"
                "the compiler that made it. Bad files are listed as such; the next use of one\n"
                "replaces it. Looking at them counts as no use.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache ls\n"
                "  sagebwd cache ls --arch sm_90a --kernel forward --json\n") {
    filter_.declare(options);
  }

  ExitCode run() override {
    filter_.check();
    Layers layers = user_layers();
    std::vector<KeptItem> items;
    visit_items(layers, "reading", [&](const KeptName&, KeptItem item, std::string) {
      if (filter_.matches(item))
        items.push_back(std::move(item));
    });
    std::stable_sort(items.begin(), items.end(), [](const KeptItem& a, const KeptItem& b) {
      return std::tie(b.kernel, a.name, a.arch) < std::tie(a.kernel, b.name, b.arch);
    });
    json ? print_as_json(items, layers.failures) : print_as_table(items);
    return report_failures("cache ls", layers.failures);
  }

private:
  void print_as_json(const std::vector<KeptItem>&, const std::vector<std::string>& failures) const;
  void print_as_table(const std::vector<KeptItem>&) const;

  ItemFilter filter_;
};

void List::print_as_json(const std::vector<KeptItem>& items,
                         const std::vector<std::string>& failures) const {
  json::Array array;
  for (const KeptItem& item : items)
    array.push_back(json_of(item));
  print_json(json::Object{{"directory", user_store().directory()},
                          {"items", std::move(array)},
                          {"failures", json::Array(failures)}});
}

void List::print_as_table(const std::vector<KeptItem>& items) const {
  Table table({"kernel or tuning", "arch", "bytes", "compiler", "last use", "where"});
  size_t kernels = 0, records = 0, bad = 0;
  uint64_t bytes = 0;
  for (const KeptItem& item : items) {
    std::string name = item.name;
    if (!item.problem.empty())
      name = "bad: " + item.digest.substr(0, 12) + (item.kernel ? ".kernel" : ".tuning") + ", " +
             item.problem;
    else if (item.newer)
      name = "tuning by a newer version: " + item.digest.substr(0, 12);
    table.add({name, item.arch, std::to_string(item.bytes), item.compiler,
               item.last_use ? readable_age(*item.last_use) : "",
               item.in_pack ? item.place : "directory"});
    bytes += item.bytes;
    if (!item.problem.empty())
      ++bad;
    else
      ++(item.kernel ? kernels : records);
  }
  if (!items.empty())
    table.print();
  const CacheStore& store = user_store();
  printf("%zu kernels, %zu tuning records, %zu bad, %s in all; directory %s\n", kernels, records,
         bad, readable_bytes(bytes).c_str(),
         store.disabled_reason().empty() ? store.directory().c_str() : "not used");
}

class Stat : public Command {
public:
  Stat()
      : Command("cache stat", "how much is kept, and where",
                "The directory with its limit and how full it is, and each pack with the oldest\n"
                "driver that loads all of it. A directory or pack that cannot be used is shown\n"
                "with the reason.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache stat\n"
                "  sagebwd cache stat --json\n") {}

  ExitCode run() override {
    const CacheStore& store = user_store();
    for (const KeptFile& file : kept_files(store.directory()))
      ++kernels_, kernel_bytes_ += file.bytes;
    for (const KeptName& name : kept_names(store.directory()))
      records_ += name.file.ends_with(".tuning");
    leftovers_ = count_leftovers(store.directory());
    for (const std::string& path : store.options().packs)
      packs_.push_back(examine(path));
    json ? print_as_json() : print_as_text();
    return kDone;
  }

private:
  struct PackFacts {
    std::string path, problem;
    uint64_t bytes = 0;
    PackSummary summary;
  };
  static PackFacts examine(const std::string& path);
  void print_as_json() const;
  void print_as_text() const;

  size_t kernels_ = 0, records_ = 0;
  uint64_t kernel_bytes_ = 0, leftovers_ = 0;
  std::vector<PackFacts> packs_;
};

Stat::PackFacts Stat::examine(const std::string& path) {
  PackFacts facts;
  facts.path = path;
  try {
    facts.summary = summarize(*Pack::open(path));
    std::error_code gone; // leaves the size 0
    if (const uintmax_t size = std::filesystem::file_size(path, gone); !gone)
      facts.bytes = size;
  } catch (const PackError& error) {
    facts.problem = error.what();
  }
  return facts;
}

void Stat::print_as_json() const {
  const CacheStore& store = user_store();
  json::Array packs;
  for (const PackFacts& pack : packs_) {
    json::Object object{{"path", pack.path}, {"usable", pack.problem.empty()}};
    if (pack.problem.empty()) {
      object["kernels"] = static_cast<int64_t>(pack.summary.kernels);
      object["records"] = static_cast<int64_t>(pack.summary.records);
      object["bytes"] = static_cast<int64_t>(pack.bytes);
      object["archs"] = json::Array(pack.summary.archs);
      object["lowest_driver"] = pack.summary.lowest_driver;
    } else {
      object["error"] = pack.problem;
    }
    packs.push_back(std::move(object));
  }
  print_json(json::Object{{"directory", store.directory()},
                          {"disabled_reason", store.disabled_reason()},
                          {"kernels", static_cast<int64_t>(kernels_)},
                          {"bytes", static_cast<int64_t>(kernel_bytes_)},
                          {"byte_limit", static_cast<int64_t>(store.options().byte_limit)},
                          {"records", static_cast<int64_t>(records_)},
                          {"leftovers", static_cast<int64_t>(leftovers_)},
                          {"packs", std::move(packs)}});
}

/// How much of the limit is taken, as a bar.
std::string fill_bar(uint64_t bytes, uint64_t limit) {
  if (limit == 0)
    return readable_bytes(bytes) + ", no limit";
  constexpr size_t kWidth = 30;
  const double share = static_cast<double>(bytes) / static_cast<double>(limit);
  const size_t filled = std::min<size_t>(kWidth, static_cast<size_t>(share * kWidth + 0.5));
  return "[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "] " +
         format("%.1f %% of ", 100 * share) + readable_bytes(limit);
}

void Stat::print_as_text() const {
  const CacheStore& store = user_store();
  if (!store.disabled_reason().empty()) {
    printf("directory  not used: %s\n", store.disabled_reason().c_str());
  } else {
    printf("directory  %s\n", store.directory().c_str());
    printf("kernels    %zu, %s\n", kernels_, readable_bytes(kernel_bytes_).c_str());
    printf("full       %s\n", fill_bar(kernel_bytes_, store.options().byte_limit).c_str());
    printf("records    %zu of tuning\n", records_);
    printf("leftovers  %llu of killed writers%s\n", static_cast<unsigned long long>(leftovers_),
           leftovers_ ? "; 'sagebwd cache prune' sweeps them" : "");
  }
  if (packs_.empty())
    puts("packs      none (SAGEBWD_CACHE_PACKS)");
  for (const PackFacts& pack : packs_) {
    if (!pack.problem.empty()) {
      printf("pack       not usable: %s\n", pack.problem.c_str());
      continue;
    }
    std::string archs;
    for (const std::string& arch : pack.summary.archs)
      archs += " " + arch;
    printf("pack       %s: %zu kernels, %zu records, %s, drivers from %s on,%s\n",
           pack.path.c_str(), pack.summary.kernels, pack.summary.records,
           readable_bytes(pack.bytes).c_str(), readable_cuda(pack.summary.lowest_driver).c_str(),
           archs.c_str());
  }
}

} // namespace

std::unique_ptr<Command> make_cache_ls() { return std::make_unique<List>(); }
std::unique_ptr<Command> make_cache_stat() { return std::make_unique<Stat>(); }

} // namespace sagebwd::tools
