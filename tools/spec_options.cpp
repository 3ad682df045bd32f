//===- spec_options.cpp - Options that choose specs and problems -----------===//
#include "tools/spec_options.h"

#include <algorithm>
#include <charconv>

namespace sagebwd::tools {

namespace {

/// A list, or the same with one value only.
void declare_words(OptionTable& table, bool lists, std::string name, std::string words,
                   std::vector<std::string>& values, std::string help) {
  if (lists)
    return table.list(name, words + ",..", values, help);
  help += " (default " + values.front() + ")";
  table.word(
      name, words, [&values](const std::string& given) { values = {given}; }, help);
}

int parse_head_dim(const std::string& text) {
  int value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end)
    throw UsageError("--head-dim is '" + text + "'; it takes a whole number, such as 64 or 128");
  return value;
}

} // namespace

void SpecOptions::declare(OptionTable& table, bool lists) {
  declare_words(table, lists, "head-dim", "D", head_dims_, "head dimension: 64, 128");
  declare_words(table, lists, "dtype", "TYPE", dtypes_, "bf16, fp16");
  declare_words(table, lists, "causal", "KIND", causals_, "none, top-left, bottom-right");
  declare_words(table, lists, "granularity", "KIND", granularities_,
                "what shares a quantisation scale: row, block");
  declare_words(table, lists, "precision", "PLAN", precisions_,
                "which products are INT8: six-of-seven, qk16");
  table.integer("group-q", group_q_, 0, 1 << 16,
                "queries in a quantisation group, 0: the granularity's own");
  table.integer("group-kv", group_kv_, 0, 1 << 16,
                "keys in a quantisation group, 0: the granularity's own");
  table.flag("no-smooth-k", no_smooth_k_, "leave the mean of K in");
  table.flag("no-rotate", no_rotate_, "quantise Q and K for S without the Hadamard rotation");
}

std::vector<AttentionSpec> SpecOptions::all() const {
  std::vector<AttentionSpec> specs;
  for (const std::string& head_dim : head_dims_)
    for (const std::string& dtype : dtypes_)
      for (const std::string& causal : causals_)
        for (const std::string& granularity : granularities_)
          for (const std::string& precision : precisions_) {
            AttentionSpec spec;
            spec.head_dim = parse_head_dim(head_dim);
            spec.dtype = parse_dtype(dtype);
            spec.causal = parse_causal(causal);
            spec.granularity = parse_granularity(granularity);
            spec.precision = parse_precision(precision);
            spec.smooth_k = !no_smooth_k_;
            spec.rotate = !no_rotate_;
            spec.group_q = group_q_;
            spec.group_kv = group_kv_;
            resolved(spec); // raises what is wrong with it; defaults depend on the architecture
            if (std::find(specs.begin(), specs.end(), spec) == specs.end())
              specs.push_back(spec);
          }
  return specs;
}

void ProblemOptions::declare(OptionTable& table) {
  table.integer("batch", given_.batch, 1, 65535, "batch size");
  table.integer("heads", given_.heads, 1, 65535, "query heads");
  table.integer("heads-kv", given_.heads_kv, 0, 65535,
                "key/value heads, 0: as many as query heads");
  table.integer("seq-len", given_.seq_q, 1, int64_t{1} << 24, "queries");
  table.integer("seq-kv", given_.seq_kv, 0, int64_t{1} << 24, "keys, 0: as many as queries");
}

Problem ProblemOptions::problem() const {
  Problem problem = given_;
  if (problem.heads_kv == 0)
    problem.heads_kv = problem.heads;
  if (problem.seq_kv == 0)
    problem.seq_kv = problem.seq_q;
  return problem;
}

std::vector<Arch> parse_archs(const std::vector<std::string>& names) {
  std::vector<Arch> archs;
  for (const std::string& name : names) {
    const Arch& arch = find_arch(name);
    if (std::find(archs.begin(), archs.end(), arch) == archs.end())
      archs.push_back(arch);
  }
  return archs;
}

} // namespace sagebwd::tools
