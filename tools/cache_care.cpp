//===- cache_care.cpp - 'sagebwd cache verify' and 'prune' -----------------===//
#include "cache/directory.h"
#include "cache/eviction.h"
#include "cache/lock.h"
#include "tools/cache.h"

#include <unistd.h>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

class VerifyCache : public Command {
public:
  VerifyCache()
      : Command("cache verify", "read everything and list what is bad",
                "Reads every kernel and tuning record of the directory and the packs and checks\n"
                "checksums, keys and owners. The exit code is 1 if anything is bad. In\n"
                "the directory, bad kernels heal by themselves, as their next use compiles them "
                "again;\n"
                "tuning records stay until --remove. A bad pack does not heal: copy or build it\n"
                "again.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache verify\n"
                "  sagebwd cache verify --remove\n"
                "  sagebwd cache verify --pack kernels.pack --json\n") {
    options.list("pack", "FILE,..", packs_, "only these packs, whatever the environment names");
    options.flag("remove", remove_, "remove what is bad from the directory");
  }

  ExitCode run() override {
    if (remove_ && !packs_.empty())
      throw UsageError("--remove is for the directory and --pack for packs, which are read-only; "
                       "give one of them");
    Layers layers = packs_.empty() ? user_layers() : layers_of(packs_);
    for (const auto& pack : layers.packs)
      try {
        pack->manifest(); // what nothing else would read
      } catch (const PackError& error) {
        layers.failures.push_back(error.what());
      }
    visit_items(layers, "verifying", [&](const KeptName& name, KeptItem item, std::string) {
      ++read_;
      bytes_ += item.bytes;
      if (item.problem.empty())
        return;
      if (remove_ && !item.in_pack) {
        remove_file(name.place, name.file);
        removed_ += !file_exists(name.place, name.file);
      }
      bad_in_directory_ += !item.in_pack;
      bad_.push_back({name.file, std::move(item)});
    });
    if (remove_ && bad_in_directory_ > removed_) {
      const std::string reason = reason_not_writable(user_store().directory());
      layers.failures.push_back(std::to_string(bad_in_directory_ - removed_) +
                                " bad files could not be removed" +
                                (reason.empty() ? "" : ": " + reason));
    }
    json ? print_as_json(layers.failures) : print_as_text();
    const ExitCode code = report_failures("cache verify", layers.failures);
    return bad_.empty() ? code : kFailed;
  }

private:
  struct Bad {
    std::string file;
    KeptItem item;
  };
  void print_as_json(const std::vector<std::string>& failures) const;
  void print_as_text() const;

  std::vector<std::string> packs_;
  bool remove_ = false;
  size_t read_ = 0, bad_in_directory_ = 0, removed_ = 0;
  uint64_t bytes_ = 0;
  std::vector<Bad> bad_;
};

void VerifyCache::print_as_json(const std::vector<std::string>& failures) const {
  json::Array array;
  for (const Bad& bad : bad_)
    array.push_back(json_of(bad.item));
  print_json(json::Object{{"read", static_cast<int64_t>(read_)},
                          {"bytes", static_cast<int64_t>(bytes_)},
                          {"bad", std::move(array)},
                          {"removed", static_cast<int64_t>(removed_)},
                          {"failures", json::Array(failures)}});
}

void VerifyCache::print_as_text() const {
  for (const Bad& bad : bad_)
    printf("bad  %s: %s\n",
           bad.item.in_pack ? (bad.item.place + ", item " + bad.item.digest).c_str()
                            : (bad.item.place + "/" + bad.file).c_str(),
           printable(bad.item.problem).c_str());
  printf("%zu items read, %s: %zu bad%s\n", read_, readable_bytes(bytes_).c_str(), bad_.size(),
         remove_ ? format(", %zu removed", removed_).c_str() : "");
  if (bad_in_directory_ > 0 && !remove_)
    puts("Bad kernels of the directory heal by themselves at their next use, bad tuning records "
         "stay; --remove removes both now.");
}

class Prune : public Command {
public:
  Prune()
      : Command("cache prune", "remove what is old or too much",
                "Sweeps what killed writers left behind, then removes kernels of the directory,\n"
                "the least recently used first, until those that stay are within the limit.\n"
                "Kernels that a running process uses stay, and so do tuning records, which take\n"
                "longer to make than kernels.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache prune --unused-for 30d\n"
                "  sagebwd cache prune --limit 512M --dry-run\n"
                "  sagebwd cache prune --all --yes\n") {
    options.text("limit", "BYTES", limit_, "512M, say; by default SAGEBWD_CACHE_LIMIT, else 1G");
    options.text("unused-for", "TIME", unused_for_, "also kernels not used for 30d, say: s m h d");
    options.flag("all", all_, "every kernel that is not in use");
    options.flag("yes", yes_, "what --all wants to be given on a terminal");
    options.flag("dry-run", dry_run_, "only say what would be removed");
  }

  ExitCode run() override {
    const CacheStore& store = user_store();
    decide_limits(store.options().byte_limit);
    if (!store.disabled_reason().empty())
      return report_failures("cache prune", {store.disabled_reason()});
    if (all_ && !yes_ && !dry_run_ && isatty(STDIN_FILENO))
      throw UsageError("--all removes every kernel of " + store.directory() +
                       ": give --yes with it, or --dry-run to see which");
    const Plan plan = planned(store.directory());
    PruneResult result = plan.result;
    if (!dry_run_)
      result = prune(store.directory(), limit_bytes_, age_);
    json ? print_as_json(result, plan.in_use) : print_as_text(result, plan.in_use);
    const std::string reason = reason_not_writable(store.directory());
    std::vector<std::string> failures;
    if (result.stuck > 0)
      failures.push_back(std::to_string(result.stuck) + " kernels could not be removed" +
                         (reason.empty() ? "" : ": " + reason));
    else if (!reason.empty() && plan.result.swept > result.swept)
      failures.push_back("leftovers could not be swept: " + reason);
    return report_failures("cache prune", failures);
  }

private:
  struct Plan {
    PruneResult result;
    uint64_t in_use = 0; ///< would be removed otherwise
  };
  void decide_limits(uint64_t environments);
  /// What prune() would do, and which it would skip.
  Plan planned(const std::string& directory) const;
  void print_as_json(const PruneResult&, uint64_t in_use) const;
  void print_as_text(const PruneResult&, uint64_t in_use) const;

  std::string limit_, unused_for_;
  bool all_ = false, yes_ = false, dry_run_ = false;
  std::optional<uint64_t> limit_bytes_;
  std::optional<std::chrono::seconds> age_;
};

void Prune::decide_limits(uint64_t environments) {
  if (all_ && (!limit_.empty() || !unused_for_.empty()))
    throw UsageError("--all removes everything; it goes with neither --limit nor --unused-for");
  if (!unused_for_.empty())
    age_ = parse_duration("unused-for", unused_for_);
  if (all_)
    limit_bytes_ = 0;
  else if (!limit_.empty())
    limit_bytes_ = parse_bytes("limit", limit_);
  else if (environments > 0)
    limit_bytes_ = environments;
  if (!all_ && limit_bytes_ == 0u) // in SAGEBWD_CACHE_LIMIT, 0 is no limit at all
    throw UsageError("--limit is 0; to remove every kernel give --all");
}

Prune::Plan Prune::planned(const std::string& directory) const {
  Plan plan;
  PruneResult& result = plan.result;
  result.swept = count_leftovers(directory);
  const std::vector<KeptFile> files = kept_files(directory);
  result.kept = files.size();
  for (const KeptFile& file : files)
    result.kept_bytes += file.bytes;
  const auto now = std::chrono::system_clock::now();
  for (const KeptFile& file : files) {
    const bool stale = age_ && now - file.last_use > *age_;
    if (!stale && (!limit_bytes_ || result.kept_bytes <= *limit_bytes_))
      continue;
    if (UseMarks::used(directory, file.digest)) {
      ++plan.in_use;
      continue;
    }
    ++result.evicted;
    result.evicted_bytes += file.bytes;
    --result.kept;
    result.kept_bytes -= file.bytes;
  }
  return plan;
}

void Prune::print_as_json(const PruneResult& result, uint64_t in_use) const {
  print_json(json::Object{{"directory", user_store().directory()},
                          {"dry_run", dry_run_},
                          {"evicted", static_cast<int64_t>(result.evicted)},
                          {"evicted_bytes", static_cast<int64_t>(result.evicted_bytes)},
                          {"in_use", static_cast<int64_t>(in_use)},
                          {"swept", static_cast<int64_t>(result.swept)},
                          {"kept", static_cast<int64_t>(result.kept)},
                          {"kept_bytes", static_cast<int64_t>(result.kept_bytes)}});
}

void Prune::print_as_text(const PruneResult& result, uint64_t in_use) const {
  auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  const char* would = dry_run_ ? "would be " : "";
  printf("%llu kernels, %s, %sremoved\n", number(result.evicted),
         readable_bytes(result.evicted_bytes).c_str(), would);
  if (in_use)
    printf("%llu kernels skipped: a running process uses them\n", number(in_use));
  if (result.swept)
    printf("%llu leftovers of killed writers %sswept\n", number(result.swept), would);
  printf("%llu kernels, %s, stay in %s\n", number(result.kept),
         readable_bytes(result.kept_bytes).c_str(), user_store().directory().c_str());
}

} // namespace

std::unique_ptr<Command> make_cache_verify() { return std::make_unique<VerifyCache>(); }
std::unique_ptr<Command> make_cache_prune() { return std::make_unique<Prune>(); }

} // namespace sagebwd::tools
