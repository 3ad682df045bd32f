//===- cache_care.cpp - 'sagebwd cache verify' and 'prune' -----------------===//
#include "cache/directory.h"
#include "cache/eviction.h"
#include "tools/cache.h"

#include <charconv>
#include <map>
#include <unistd.h>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// A whole number and one of the units; the unit "" means that none is required.
uint64_t parse_quantity(const std::string& option, const std::string& text,
                        const std::map<std::string, uint64_t>& units, const std::string& wanted) {
  uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const auto unit = units.find(std::string(stop, end));
  constexpr uint64_t kMost = INT64_MAX; // what JSON and std::chrono hold
  if (error != std::errc() || unit == units.end() || number > kMost / unit->second)
    throw wrong_value(option, text, wanted);
  return number * unit->second;
}

/// Reads "512M".
uint64_t parse_bytes(const std::string& option, const std::string& text) {
  return parse_quantity(option, text, {{"", 1}, {"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}},
                        "a number of bytes, with K, M or G if you like, such as 512M");
}

/// Reads "30d".
std::chrono::seconds parse_duration(const std::string& option, const std::string& text) {
  constexpr uint64_t kDay = 24 * 3600, kCentury = 36525 * kDay; // the clock's nanoseconds overflow
  const uint64_t seconds =
      parse_quantity(option, text, {{"s", 1}, {"m", 60}, {"h", 3600}, {"d", kDay}},
                     "a whole number and s, m, h or d, such as 30d");
  return std::chrono::seconds(std::min(seconds, kCentury));
}

/// ": DIRECTORY cannot be written: ..." if that is the reason why nothing was removed.
std::string why_not_removed(const std::string& directory) {
  const std::string reason = reason_not_writable(directory);
  return reason.empty() ? "" : ": " + reason;
}

class VerifyCache : public CacheCommand {
public:
  VerifyCache()
      : CacheCommand(
            "cache verify", "read everything and list what is bad",
            "Reads every kernel and tuning record of the directory and the packs and checks\n"
            "checksums, keys and owners. The exit code is 1 if anything is bad. The next use\n"
            "of a bad kernel of the directory compiles it again. A bad tuning record stays\n"
            "until --remove removes it. A bad pack must be copied or built again.\n"
            "\n"
            "examples:\n"
            "  sagebwd cache verify\n"
            "  sagebwd cache verify --remove\n"
            "  sagebwd cache verify --pack kernels.pack --json\n") {
    options.list("pack", "FILE,..", packs_,
                 "check only these packs, and nothing that the environment names");
    options.flag("remove", remove_, "remove bad files from the directory");
  }

  ExitCode run() override {
    if (remove_ && !packs_.empty())
      throw UsageError("--remove is for the directory and --pack for packs, which are read-only; "
                       "give one of them");
    if (packs_.empty())
      find_items();
    else
      find_items_in(packs_);
    for (const auto& pack : packs)
      try {
        pack->manifest(); // nothing else reads it
      } catch (const PackError& error) {
        failures.push_back(error.what());
      }
    size_t read = 0, healing = 0, removed = 0;
    uint64_t bytes = 0;
    json::Array bad;
    std::string lines;
    visit_items("verifying", [&](KeptItem item, std::string) {
      ++read;
      bytes += item.bytes;
      if (item.problem.empty())
        return;
      if (remove_ && !item.in_pack) {
        remove_file(item.place, item.file);
        removed += !file_exists(item.place, item.file);
      }
      healing += !item.in_pack;
      lines += "bad  " + where_is(item) + ": " + printable(item.problem) + "\n";
      bad.push_back(json_of(item));
    });
    const size_t count = bad.size();
    if (remove_ && healing > removed)
      failures.push_back(counted(healing - removed, "bad file") + " could not be removed" +
                         why_not_removed(user_store().directory()));
    const ExitCode code = finish(
        {{"read", read}, {"bytes", bytes}, {"bad", std::move(bad)}, {"removed", removed}}, [&] {
          printf("%s%s read, %s: %zu bad%s\n", lines.c_str(), counted(read, "item").c_str(),
                 readable_bytes(bytes).c_str(), count,
                 remove_ ? format(", %zu removed", removed).c_str() : "");
          if (healing > 0 && !remove_)
            puts("The next use of a bad kernel of the directory compiles it again. A bad tuning "
                 "record stays. --remove removes both.");
        });
    return count == 0 ? code : kFailed;
  }

private:
  std::vector<std::string> packs_;
  bool remove_ = false;
};

class Prune : public CacheCommand {
public:
  Prune()
      : CacheCommand(
            "cache prune", "remove old kernels, or as many as the limit requires",
            "Removes what killed processes left behind, then kernels of the directory, the\n"
            "least recently used first, until the rest is within the limit. Kernels that a\n"
            "running process uses stay, and so do tuning records, which take longer to make\n"
            "than kernels.\n"
            "\n"
            "examples:\n"
            "  sagebwd cache prune --unused-for 30d\n"
            "  sagebwd cache prune --limit 512M --dry-run\n"
            "  sagebwd cache prune --all --yes\n") {
    options.text("limit", "BYTES", limit_,
                 "the limit, such as 512M; by default SAGEBWD_CACHE_LIMIT, or else 1G");
    options.text(
        "unused-for", "TIME", unused_for_,
        "also remove kernels that were not used for this time, such as 30d (s, m, h or d)");
    options.flag("all", all_, "remove every kernel that is not in use");
    options.flag("yes", yes_, "confirm --all, which is required on a terminal");
    options.flag("dry-run", dry_run_, "say what would be removed, and remove nothing");
  }

  ExitCode run() override {
    const CacheStore& store = user_store();
    const std::string& directory = store.directory();
    decide_limits(store.options().byte_limit);
    if (!store.disabled_reason().empty())
      return give_up({store.disabled_reason()});
    if (all_ && !yes_ && !dry_run_ && isatty(STDIN_FILENO))
      throw UsageError("--all removes every kernel of " + directory +
                       ": give --yes with it, or --dry-run to see which");
    const uint64_t found = leftovers(directory, /*remove=*/false);
    const PruneResult pruned = prune(directory, limit_bytes_, age_, dry_run_);
    const std::string reason = why_not_removed(directory);
    if (pruned.stuck > 0)
      failures.push_back(counted(pruned.stuck, "kernel") + " could not be removed" + reason);
    else if (!reason.empty() && found > pruned.swept)
      failures.push_back("leftovers could not be swept" + reason);
    return finish({{"directory", directory},
                   {"dry_run", dry_run_},
                   {"evicted", pruned.evicted},
                   {"evicted_bytes", pruned.evicted_bytes},
                   {"in_use", pruned.in_use},
                   {"swept", pruned.swept},
                   {"kept", pruned.kept},
                   {"kept_bytes", pruned.kept_bytes}},
                  [&] { print(pruned); });
  }

private:
  void decide_limits(uint64_t environments) {
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
    if (!all_ && limit_bytes_ == 0u) // SAGEBWD_CACHE_LIMIT=0 means no limit
      throw UsageError("--limit is 0; to remove every kernel give --all");
  }

  void print(const PruneResult& pruned) const {
    const char* would = dry_run_ ? "would be " : "";
    printf("%s, %s, %sremoved\n", counted(pruned.evicted, "kernel").c_str(),
           readable_bytes(pruned.evicted_bytes).c_str(), would);
    if (pruned.in_use)
      printf("%s skipped: a running process uses %s\n", counted(pruned.in_use, "kernel").c_str(),
             pruned.in_use == 1 ? "it" : "them");
    if (pruned.swept)
      printf("%s of killed writers %sswept\n", counted(pruned.swept, "leftover").c_str(), would);
    printf("%s, %s, %s in %s\n", counted(pruned.kept, "kernel").c_str(),
           readable_bytes(pruned.kept_bytes).c_str(), pruned.kept == 1 ? "stays" : "stay",
           user_store().directory().c_str());
  }

  std::string limit_, unused_for_;
  bool all_ = false, yes_ = false, dry_run_ = false;
  std::optional<uint64_t> limit_bytes_;
  std::optional<std::chrono::seconds> age_;
};

} // namespace

std::unique_ptr<Command> make_cache_verify() { return std::make_unique<VerifyCache>(); }
std::unique_ptr<Command> make_cache_prune() { return std::make_unique<Prune>(); }

} // namespace sagebwd::tools
