//===- spec_options.h - Options that choose specs and problems -------------===//
#pragma once

#include "generator/plan.h"
#include "tools/options.h"

#include "llvm/Support/JSON.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace sagebwd::tools {

/// Words for the fields of a spec, by the field's name; what is missing has its default.
using SpecWords = std::map<std::string, std::vector<std::string>, std::less<>>;
/// `prebuild` builds these by default: a cluster is likely to need them.
const SpecWords& usual_words();
/// Every combination of the words, not resolved. Raises SpecError for an unknown word.
std::vector<AttentionSpec> combinations(const SpecWords&);

/// The options that name an AttentionSpec: one for each of its fields, and --spec for all at once.
class SpecOptions {
public:
  /// The option of one field takes these words besides the field's own.
  struct MoreWords {
    std::string field, help;
    std::function<bool(const std::string& word)> read; ///< whether the word was one of them
  };

  explicit SpecOptions(SpecWords defaults = {}, MoreWords more = {})
      : words_(std::move(defaults)), more_(std::move(more)) {}

  /// `lists`: options take lists of words. `but`: names of fields that have no option, and "spec"
  /// for --spec; with "linear" specs of linear attention are refused. `no_blocks`: what it means
  /// that --block-size is left out.
  void declare(OptionTable&, bool lists, const std::set<std::string>& but = {},
               const std::string& no_blocks = "none");
  /// Every combination; each can be resolved. Raises SpecError, or UsageError.
  std::vector<AttentionSpec> all(const OptionTable&) const;
  /// Returns all() without those that have no lists of such blocks, unless none has.
  std::vector<AttentionSpec> all_with_lists(const OptionTable&) const;
  /// The only one.
  AttentionSpec one(const OptionTable& table) const { return all(table).front(); }

private:
  void declare_block_size(OptionTable&, const std::string& no_blocks);
  /// Every combination, whether it can be resolved or not.
  std::vector<AttentionSpec> named(const OptionTable&) const;

  SpecWords words_;
  MoreWords more_;
  std::map<std::string, bool> switched_; ///< booleans that differ from their default
  std::optional<AttentionSpec> whole_;
  bool exact_only_ = false;
};

/// The option for lists of blocks that a command draws: --density.
class DensityOption {
public:
  /// `otherwise`: what is listed without it.
  void declare(OptionTable&, const std::string& otherwise);
  /// 0 if not given.
  double given() const { return density_; }

private:
  double density_ = 0;
};

/// One option per size of a Problem: --batch, --heads, --heads-kv, --seq-len, --seq-kv.
class ProblemOptions {
public:
  /// `usual`: the default sizes.
  explicit ProblemOptions(const Problem& usual) : given_(usual) {}
  void declare(OptionTable&);
  Problem problem() const;

private:
  Problem given_;
};

/// As many members as a Problem has sizes.
llvm::json::Object json_of(const Problem&);

/// Every architecture's name, and the words for several.
std::vector<std::string> arch_names();
std::vector<std::string> arch_words();
/// Whether "native" names an architecture.
bool has_gpu();
/// Names and words to architectures, without repeats: "native" means those of the GPUs here, "all"
/// every one, "major" the first of each major version. Raises SpecError for an unknown name, and
/// LibraryError for "native" where there is no GPU.
std::vector<Arch> parse_archs(const std::vector<std::string>& names);

} // namespace sagebwd::tools
