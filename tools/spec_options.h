//===- spec_options.h - Options that choose specs and problems -------------===//
#pragma once

#include "generator/plan.h"
#include "tools/options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

/// The options that name an AttentionSpec. Values are parsed when asked for, so that defaults and
/// lists share one path.
class SpecOptions {
public:
  using Words = std::vector<std::string>;

  SpecOptions() = default;
  SpecOptions(Words head_dims, Words dtypes, Words causals, Words granularities, Words precisions)
      : head_dims_(std::move(head_dims)), dtypes_(std::move(dtypes)), causals_(std::move(causals)),
        granularities_(std::move(granularities)), precisions_(std::move(precisions)) {}

  /// `lists`: head dims, dtypes, causal kinds, granularities and precisions may be several.
  void declare(OptionTable&, bool lists);
  /// Every combination, resolved. Raises SpecError.
  std::vector<AttentionSpec> all() const;
  /// The only one.
  AttentionSpec one() const { return all().front(); }

private:
  Words head_dims_{"128"}, dtypes_{"bf16"}, causals_{"none"}, granularities_{"row"},
      precisions_{"six-of-seven"};
  int group_q_ = 0, group_kv_ = 0;
  bool no_smooth_k_ = false, no_rotate_ = false;
};

/// --batch, --heads, --heads-kv, --seq-len, --seq-kv.
class ProblemOptions {
public:
  void declare(OptionTable&);
  Problem problem() const;

private:
  Problem given_{1, 8, 0, 1024, 0};
};

/// Architecture names to Archs, without repeats. Raises SpecError for an unknown one.
std::vector<Arch> parse_archs(const std::vector<std::string>& names);

} // namespace sagebwd::tools
