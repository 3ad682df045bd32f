//===- spec_options.cpp - Options that choose specs and problems -----------===//
#include "tools/spec_options.h"

#include "runtime/driver/driver.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <functional>
#include <set>

namespace sagebwd::tools {

namespace {

std::string option_name(std::string_view field) {
  std::string name(field);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// The name that a spec has for a value, for Python's names of it.
std::string usual_name(std::string_view field, const std::string& word) {
  struct Name {
    std::string_view field, other, usual;
  };
  constexpr Name kNames[] = {{"dtype", "bfloat16", "bf16"},  {"dtype", "float16", "fp16"},
                             {"causal", "true", "top-left"}, {"causal", "True", "top-left"},
                             {"causal", "false", "none"},    {"causal", "False", "none"}};
  if (field == "precision" && word == "fastest")
    throw UsageError("--precision fastest stands for other words on each GPU, and only calls from "
                     "Python take it: pass what 'sagebwd doctor' says of the GPU, such as "
                     "--precision gradients16");
  for (const Name& name : kNames)
    if (field == name.field && word == name.other)
      return std::string(name.usual);
  return word;
}

/// A boolean has one option, for the value that is not the default.
template <typename T> std::string option_name(const Label& label, const T& usual) {
  if constexpr (std::is_same_v<T, bool>)
    return (usual ? "no-" : "") + option_name(label.name);
  return option_name(label.name);
}

std::vector<Arch> archs_of_gpus() {
  if (const std::string& why = driver::unavailable(); !why.empty())
    throw LibraryError("--arch native means the GPUs of this machine: " + why +
                       " Name an architecture, such as --arch sm_80");
  std::vector<Arch> archs;
  for (int gpu = 0; gpu < driver::device_count(); ++gpu) {
    const driver::DeviceInfo info = driver::device_info(gpu);
    archs.push_back(arch_for_capability(info.major, info.minor));
  }
  return archs;
}

std::vector<Arch> archs_meant_by(const std::string& name) {
  if (name == "native")
    return archs_of_gpus();
  if (name != "all" && name != "major")
    return {find_arch(name)};
  std::vector<Arch> archs = all_archs();
  if (name == "major")
    std::erase_if(archs, [](const Arch& arch) { return arch.minor != 0; });
  return archs;
}

} // namespace

const SpecWords& usual_words() {
  static const SpecWords words = [] {
    SpecWords words = {{"dtype", {"bf16", "fp16"}}, {"causal", {"none", "top-left"}}};
    for (int head_dim : kUsualHeadDims)
      words["head_dim"].push_back(std::to_string(head_dim));
    return words;
  }();
  return words;
}

std::vector<AttentionSpec> combinations(const SpecWords& words) {
  std::vector<AttentionSpec> specs = {AttentionSpec()};
  visit_fields(usual<AttentionSpec>(), [&](const Label& label, const auto&) {
    const auto found = words.find(label.name);
    if (found == words.end())
      return;
    std::vector<AttentionSpec> product;
    for (const AttentionSpec& spec : specs) {
      const size_t first = product.size(); // compare only with those of this spec
      for (const std::string& word : found->second) {
        AttentionSpec more = spec;
        set_field(more, label.name, word);
        if (std::find(product.begin() + first, product.end(), more) == product.end())
          product.push_back(more);
      }
    }
    specs = std::move(product);
  });
  return specs;
}

void SpecOptions::declare(OptionTable& table, bool lists, const std::set<std::string>& but,
                          const std::string& no_blocks) {
  exact_only_ = but.contains("linear");
  if (!but.contains("spec"))
    table.word(
        "spec", "TEXT", [this](const std::string& text) { whole_ = parse_spec(text); },
        "the spec in one line, instead of the options below. What a line such as 'd64 no-rotate' "
        "leaves out has its default. Only lines that were printed have numerics=: they have all "
        "words, and a switch that they do not name, such as rotate, is off");
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T& usual) {
    const std::string name = option_name(label, usual), field(label.name);
    if (but.contains(field))
      return;
    if (field == "sparse_q")
      return declare_block_size(table, no_blocks);
    if (field == "sparse_kv") // --block-size has both
      return;
    std::string help(label.help);
    if constexpr (std::is_same_v<T, bool>)
      return table.flag(name, switched_[field], (usual ? "without " : "with ") + help);
    std::vector<std::string>& words = words_.try_emplace(field, 1, value_text(usual)).first->second;
    constexpr bool is_text = std::is_same_v<T, std::string>; // may have commas
    const std::string placeholder = Worded<T> ? "KIND" : is_text ? "TEXT" : "N";
    if constexpr (Worded<T>)
      help += ": " + known_words<T>();
    const bool takes_more = more_.read && more_.field == field;
    if (takes_more)
      help += more_.help;
    if (lists && !is_text)
      table.list(name, placeholder + ",..", words, help);
    else
      table.word(
          name, placeholder,
          [this, &words, field, takes_more](const std::string& given) {
            if (takes_more && more_.read(given))
              return;
            if (is_text && given.empty())
              throw UsageError("--" + field + " is empty: leave it out, or pass an expression");
            const std::string word = usual_name(field, given);
            AttentionSpec checked;
            set_field(checked, field, word);
            words = {word};
          },
          is_text ? help : help + " (default " + words.front() + ")");
    if constexpr (Worded<T>)
      table.offer(words_of<T>());
  });
}

void SpecOptions::declare_block_size(OptionTable& table, const std::string& no_blocks) {
  table.word(
      "block-size", "MxN",
      [this](const std::string& given) {
        const size_t cross = std::min(given.find('x'), given.size());
        AttentionSpec read;
        try {
          read.sparse_q = parse_value<int>("block-size", given.substr(0, cross));
          read.sparse_kv =
              parse_value<int>("block-size", given.substr(std::min(cross + 1, given.size())));
        } catch (const SpecError&) {
          throw UsageError(
              "--block-size is '" + given +
              "'; it is queries and keys of a block, such as 128x64, or 0x0 for no lists");
        }
        words_["sparse_q"] = {std::to_string(read.sparse_q)};
        words_["sparse_kv"] = {std::to_string(read.sparse_kv)};
      },
      "block-sparse attention: so many queries share a list of blocks of so many keys, 64 or 128 "
      "each (default " +
          no_blocks + ")");
}

void DensityOption::declare(OptionTable& table, const std::string& otherwise) {
  const auto parse = [this](const std::string& given) {
    double density = 0;
    if (given.empty() || !llvm::to_float(given, density) || !(density > 0 && density <= 1))
      throw UsageError("--density is '" + given + "'; it is a number above 0, up to 1");
    density_ = density;
  };
  table.word("density", "X", parse,
             "with lists of blocks: the part of all blocks that is listed, drawn at random "
             "(default " +
                 otherwise + ")");
}

std::vector<AttentionSpec> SpecOptions::all(const OptionTable& table) const {
  const std::vector<AttentionSpec> specs = named(table);
  for (const AttentionSpec& spec : specs)
    resolved(spec); // raises SpecError
  return specs;
}

std::vector<AttentionSpec> SpecOptions::all_with_lists(const OptionTable& table) const {
  std::vector<AttentionSpec> specs = named(table);
  // Where several granularities are meant unless one is named, those that take none are not.
  if (std::any_of(specs.begin(), specs.end(), has_score) && !table.given("granularity"))
    std::erase_if(specs, blockwise);
  // So are those that very wide heads lack.
  if (!table.given("granularity"))
    std::erase_if(specs, [](const AttentionSpec& s) { return very_wide(s) && blockwise(s); });
  if (!table.given("precision"))
    std::erase_if(specs, [](const AttentionSpec& s) {
      return very_wide(s) && s.precision != Precision::six_of_seven &&
             s.precision != Precision::gradients16;
    });
  const auto is_possible = [](const AttentionSpec& spec) {
    AttentionSpec without = spec;
    if (is_sparse(spec)) // linear attention needs lists
      without.linear = LinearKeys::none;
    without.sparse_q = without.sparse_kv = 0;
    resolved(without); // raises SpecError for what lists have no part in
    try {
      resolved(spec);
      return true;
    } catch (const SpecError&) {
      return false;
    }
  };
  if (std::any_of(specs.begin(), specs.end(), is_possible))
    std::erase_if(specs, std::not_fn(is_possible));
  for (const AttentionSpec& spec : specs)
    resolved(spec);
  return specs;
}

std::vector<AttentionSpec> SpecOptions::named(const OptionTable& table) const {
  SpecWords words = words_;
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T& usual) {
    const std::string field(label.name);
    const bool of_blocks = field == "sparse_q" || field == "sparse_kv";
    const std::string option = of_blocks ? "block-size" : option_name(label, usual);
    if (whole_ && table.given(option))
      throw UsageError("--spec is a whole spec: leave out --" + option + ", or --spec");
    if constexpr (std::is_same_v<T, bool>)
      if (const auto found = switched_.find(field); found != switched_.end() && found->second)
        words[field] = {value_text(!usual)};
  });
  for (auto& [field, given] : words)
    for (std::string& word : given)
      word = usual_name(field, word);
  if (whole_ && exact_only_ && is_mixed(*whole_))
    throw UsageError("--spec has linear=" + value_text(whole_->linear) +
                     ": this command computes exact attention to listed blocks; leave that out");
  return whole_ ? std::vector<AttentionSpec>{*whole_} : combinations(words);
}

void ProblemOptions::declare(OptionTable& table) {
  visit_fields(given_, [&](const Label& label, int64_t& size) {
    const bool length = label.name.starts_with("seq");
    table.integer(label.name == "seq_q" ? "seq-len" : option_name(label.name), size, size > 0,
                  length ? int64_t{1} << 24 : 65535, std::string(label.help));
    if (label.name == "seq_q")
      table.also("seq-q", "seq-len"); // as C and C++ call it
  });
}

Problem ProblemOptions::problem() const {
  Problem problem = given_;
  if (problem.heads_kv == 0)
    problem.heads_kv = problem.heads;
  if (problem.seq_kv == 0)
    problem.seq_kv = problem.seq_q;
  return problem;
}

llvm::json::Object json_of(const Problem& problem) {
  llvm::json::Object sizes;
  visit_fields(problem, [&](const Label& label, int64_t size) {
    sizes[llvm::StringRef(label.name)] = size;
  });
  return sizes;
}

std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const Arch& arch : all_archs())
    names.emplace_back(arch.name);
  return names;
}

std::vector<std::string> arch_words() {
  std::vector<std::string> words = arch_names();
  words.insert(words.end(), {"native", "all", "major"});
  return words;
}

bool has_gpu() { return driver::unavailable().empty() && driver::device_count() > 0; }

std::vector<Arch> parse_archs(const std::vector<std::string>& names) {
  std::vector<Arch> archs;
  for (const std::string& name : names)
    for (const Arch& arch : archs_meant_by(name))
      if (std::find(archs.begin(), archs.end(), arch) == archs.end())
        archs.push_back(arch);
  return archs;
}

} // namespace sagebwd::tools
