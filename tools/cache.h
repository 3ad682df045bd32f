//===- cache.h - What the commands of 'sagebwd cache' share ----------------===//
#pragma once

#include "cache/inventory.h"
#include "runtime/kernels.h"
#include "tools/command.h"
#include "tools/console.h"

#include <functional>
#include <initializer_list>

namespace sagebwd::tools {

MakeCommand make_cache_ls, make_cache_stat, make_cache_verify, make_cache_prune, make_cache_explain,
    make_cache_export, make_cache_import;

/// The layers on disk as far as they can be read: a pack that cannot costs only itself.
struct Layers {
  std::vector<KeptName> names; ///< the directory's, then each pack's
  std::vector<std::shared_ptr<const Pack>> packs;
  std::vector<std::string> failures; ///< why the directory or a pack is not among them
};
/// Of the environment's directory and packs.
Layers user_layers();
/// Of packs alone.
Layers layers_of(const std::vector<std::string>& packs);

/// Calls `visit` with each item that is still there, and its bytes if it is sound. What cannot be
/// read at all, a pack truncated meanwhile say, is added to the layers' failures.
void visit_items(Layers&, const char* what,
                 const std::function<void(const KeptName&, KeptItem, std::string bytes)>& visit);

/// --arch and --kernel of listings.
class ItemFilter {
public:
  void declare(OptionTable&);
  void check() const; ///< raises SpecError for an unknown architecture
  bool matches(const KeptItem&) const;
  bool empty() const { return archs_.empty() && kernel_.empty(); }

private:
  std::vector<std::string> archs_;
  std::string kernel_;
};

/// A command about what is kept.
class CacheCommand : public Command {
protected:
  using Command::Command;
  /// With the layers' failures, which are facts too.
  ExitCode finish(std::initializer_list<llvm::json::Object::KV> facts,
                  const std::function<void()>& print_text);

  Layers layers;
};

/// "512M" (K, M or G) and "30d" (s, m, h or d). Raise UsageError, which names the option.
uint64_t parse_bytes(const std::string& option, const std::string& text);
std::chrono::seconds parse_duration(const std::string& option, const std::string& text);

/// "3.4 MiB"
std::string readable_bytes(uint64_t);
/// "2026-01-31T08:15:00Z"
std::string utc_time(std::chrono::system_clock::time_point);
/// "5 min ago"
std::string readable_age(std::chrono::system_clock::time_point);

llvm::json::Object json_of(const KeptItem&);

} // namespace sagebwd::tools
