//===- cache.h - What the commands of 'sagebwd cache' share ----------------===//
#pragma once

#include "cache/inventory.h"
#include "runtime/kernels.h"
#include "tools/command.h"

#include <functional>
#include <initializer_list>

namespace sagebwd::tools {

MakeCommand make_cache_ls, make_cache_stat, make_cache_verify, make_cache_prune, make_cache_explain,
    make_cache_export, make_cache_import;

/// The options --arch and --kernel of listings.
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

/// A command about what is kept. An unreadable item is reported, and the others are still handled.
class CacheCommand : public Command {
protected:
  using Command::Command;
  /// Finds the items of the directory, then those of the packs, that the environment names.
  void find_items();
  void find_items_in(const std::vector<std::string>& packs);
  /// Calls `visit` with each item that still exists, and with its bytes if it is undamaged.
  void visit_items(const char* what, const std::function<void(KeptItem, std::string bytes)>& visit);
  /// Prints the facts and the failures.
  ExitCode finish(std::initializer_list<llvm::json::Object::KV> facts,
                  const std::function<void()>& print_text);

  std::vector<std::shared_ptr<const Pack>> packs;

private:
  std::vector<KeptName> names_;
};

/// "3.4 MiB"
std::string readable_bytes(uint64_t);
/// "DIRECTORY/FILE", or "PACK, item DIGEST".
std::string where_is(const KeptItem&);
llvm::json::Object json_of(const KeptItem&);

} // namespace sagebwd::tools
