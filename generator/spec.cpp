//===- spec.cpp - Parsing, printing and checking specs ---------------------===//

#include "generator/spec.h"

#include "generator/nearest.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace sagebwd {
namespace {

/// The numbers as text, with `between` before the last, e.g. "64, 128 and 256".
std::string listed(const auto& numbers, const char* between) {
  std::string text;
  for (const int& number : numbers)
    text += (text.empty()                                             ? ""
             : &number == std::data(numbers) + std::size(numbers) - 1 ? between
                                                                      : ", ") +
            std::to_string(number);
  return text;
}

/// The text before a field's value in a word of a line.
std::string_view mark_of(const Label& label) {
  return label.mark.substr(label.mark.starts_with(' ') ? 1 : 0);
}

/// Whether a word of a line is a value of this field. If so, `value` becomes that value.
template <typename T> bool says(std::string_view word, const Label& label, T& value) {
  const std::string_view mark = mark_of(label);
  if constexpr (std::is_same_v<T, bool>) {
    const bool no = word.starts_with("no-");
    std::string name(word.substr(no ? 3 : 0));
    std::replace(name.begin(), name.end(), '-', '_'); // as the command line spells it
    const bool found = name == mark;
    value = found ? !no : value;
    return found;
  } else {
    if (!word.starts_with(mark))
      return false;
    word.remove_prefix(mark.size());
    if constexpr (Worded<T>) {
      for (const auto& [candidate, text] : Words<T>::all)
        if (text == word) {
          value = candidate;
          return true;
        }
      return false;
    } else {
      const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      return !word.empty() && error == std::errc() && stop == word.data() + word.size();
    }
  }
}

/// The words of specs, with N for a number. A switch also has a word with "no-" before it.
std::string all_words() {
  std::vector<std::string> words;
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T&) {
    const std::string mark(mark_of(label));
    if constexpr (std::is_same_v<T, bool>)
      words.push_back("[no-]" + mark);
    else if constexpr (Worded<T>)
      words.push_back(mark + known_words<T>("|"));
    else if (mark == "x") // with the number before it
      words.back() += mark + "N";
    else if (label.name != "numerics")
      words.push_back(mark + "N");
  });
  return joined(words, " ", [](const std::string& word) { return word; });
}

/// The error for a word that is no value of any field, with the word that was most likely meant.
std::string problem_of_word(std::string_view word) {
  const size_t equals = std::min(word.find('='), word.size());
  const std::string name(word.substr(0, equals));
  const std::string value(word.substr(std::min(word.size(), equals + 1)));
  std::vector<std::string> known;
  std::string meant, wrong_value;
  const auto lacks = [&](const std::string& values) {
    return "'" + std::string(word) + "' lacks its value: " + values;
  };
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T&) {
    const std::string mark(mark_of(label));
    const bool named = equals < word.size() && label.name == name; // as in Python
    if constexpr (std::is_same_v<T, bool>) {
      known.insert(known.end(), {mark, "no-" + mark});
      if (named)
        meant = (value == "no" || value == "false" || value == "False" ? "no-" : "") + mark;
    } else {
      if constexpr (Worded<T>)
        for (const auto& [candidate, text] : Words<T>::all)
          known.push_back(mark + std::string(text));
      if (mark.ends_with('='))
        known.push_back(mark);
      if (mark == std::string(word) + "=") {
        if constexpr (Worded<T>)
          wrong_value = lacks(mark + known_words<T>(", " + mark));
        else
          wrong_value = lacks(mark + "N, where N is a number");
      }
      if (named && !mark.ends_with('='))
        meant = mark + value;
      else if (named)
        try {
          parse_value<T>(label.name, value);
        } catch (const SpecError& error) {
          wrong_value = error.what();
        }
    }
  });
  if (!wrong_value.empty())
    return wrong_value;
  if (meant.empty())
    meant = nearest(word, known);
  if (meant.empty() && equals < word.size())
    meant = nearest(name + "=", known);
  meant += meant.ends_with('=') ? value : "";
  return "'" + std::string(word) + "' is no word of a spec" +
         (meant.empty() ? ": the words are " + all_words() : " (did you mean '" + meant + "'?)");
}

/// Reads the words of a line in any order, each at most once. Fields that the line leaves out keep
/// their values. Returns what is wrong, or an empty text. The version of the numerics is no such
/// word, because only a whole line has it, at its end.
std::string parse_words(std::string_view text, AttentionSpec& spec) {
  if (text.empty())
    return "it is empty";
  std::set<std::string_view> said;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    size_t fields = 0;
    bool twice = false;
    const auto read = [&](std::string_view part) {
      visit_fields(spec, [&]<typename T>(const Label& label, T& value) {
        if (T given = value; label.name != "numerics" && says(part, label, given)) {
          twice = twice || !said.insert(label.name).second;
          value = given;
          ++fields;
        }
      });
    };
    const size_t cross = word.find('x'); // "64x128" is two fields
    const bool two = cross != std::string_view::npos && !word.starts_with("x") &&
                     word.find_first_not_of("0123456789x") == std::string_view::npos;
    // A number without a mark could be meant for several fields.
    const bool number = word.find_first_not_of("0123456789") == std::string_view::npos;
    if (two)
      read(word.substr(0, cross));
    if (!number)
      read(two ? word.substr(cross) : word);
    if (twice)
      return "'" + std::string(word) + "' sets what another word sets as well";
    if (word.empty())
      return "a single space separates two words, and there is none at the ends";
    if (fields != (two ? 2 : 1))
      return problem_of_word(word);
  }
  return "";
}

/// What is wrong with a line that cannot be read.
std::string problem_of_line(std::string_view text) {
  AttentionSpec scratch;
  const size_t version = text.find(" numerics=");
  const std::string problem = parse_words(text.substr(0, version), scratch);
  if (!problem.empty() || version == std::string_view::npos)
    return problem;
  return "a line with numerics= is one that was printed, with all of its words in their order. "
         "Leave numerics= out to name only some";
}

/// Raises SpecError unless the spec, with its group of queries, can have lists of such blocks.
void check_sparse(const AttentionSpec& spec) {
  const std::string sizes = "lists of blocks of " + std::to_string(spec.sparse_q) +
                            " queries and " + std::to_string(spec.sparse_kv) +
                            " keys are not supported";
  for (int size : {spec.sparse_q, spec.sparse_kv})
    if (!includes(kSparseBlocks, size))
      throw SpecError(sizes + ": a block has " + listed(kSparseBlocks, " or ") + " of each");
  if (spec.sparse_q % spec.group_q != 0)
    throw SpecError(sizes + " under '" + value_text(spec.granularity) + "', whose groups have " +
                    std::to_string(spec.group_q) + " queries: take 128 queries, or 'row'");
  if (spec.packed || spec.smooth_q || bounded_before(spec) || spec.window_right != kNoWindow)
    throw SpecError(sizes + " with " +
                    (spec.packed     ? "packed sequences: make a call for each sequence"
                     : spec.smooth_q ? "smooth_q: leave one of the two out"
                                     : "a window: leave one of the two out"));
}

} // namespace

std::string_view help_of_head_dim() {
  static const std::string help = "head dimension: a multiple of " + std::to_string(kHeadDimStep) +
                                  ", " + std::to_string(kLeastHeadDim) + " to " +
                                  std::to_string(kMostHeadDim);
  return help;
}

AttentionSpec parse_spec(std::string_view text) {
  const auto control =
      std::find_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; });
  if (control != text.end())
    throw SpecError("cannot read spec '" + std::string(text.begin(), control) +
                    "...': a line break, a tab or another control character follows. A spec is "
                    "one line of words with single spaces");
  AttentionSpec spec;
  if (parse_line(text, spec))
    return spec;
  const std::string version = "numerics=" + std::to_string(kNumerics);
  if (parse_line(std::string(text) + " " + version, spec))
    throw SpecError("spec '" + std::string(text) +
                    "' does not say the version of its numerics: this version's ends with '" +
                    version + "'. Add that, and what the line does not name is off");
  if (spec = {}; parse_words(text, spec).empty())
    return spec;
  throw SpecError("cannot read spec '" + std::string(text) + "': " + problem_of_line(text) +
                  ". A spec is a line as it is printed, such as '" +
                  to_string(*resolved(AttentionSpec())) +
                  "', or some of its words, such as 'd64 causal=top-left no-rotate', whose others "
                  "have their defaults");
}

namespace {

void check_words(const AttentionSpec& spec) {
  visit_fields(spec, []<typename T>(const Label& label, const T& value) {
    if constexpr (Worded<T>)
      if (std::none_of(std::begin(Words<T>::all), std::end(Words<T>::all),
                       [&](const auto& known) { return known.first == value; }))
        throw SpecError(std::string(label.name) + " = " + std::to_string(static_cast<int>(value)) +
                        " is not supported: its values are " + known_words<T>(", "));
  });
}

void check_head_dim(const AttentionSpec& spec) {
  if (spec.head_dim < kLeastHeadDim || spec.head_dim > kMostHeadDim ||
      spec.head_dim % kHeadDimStep != 0)
    throw SpecError(
        "head dimension " + std::to_string(spec.head_dim) +
        " is not built: supported are multiples of " + std::to_string(kHeadDimStep) + " from " +
        std::to_string(kLeastHeadDim) + " to " + std::to_string(kMostHeadDim) +
        (spec.head_dim <= 0 ? ""
         : spec.head_dim < kMostHeadDim
             ? "; pad q, k and v with zero channels to " +
                   std::to_string(
                       std::max(kLeastHeadDim, (spec.head_dim / kHeadDimStep + 1) * kHeadDimStep)) +
                   " (and keep softmax_scale at that of the unpadded dimension)"
             : ". The registers of a GPU do not hold the sums of more channels: use another "
               "attention for such heads"));
}

/// What scales are shared by, and how many keys are computed separately.
void resolve_groups(AttentionSpec& spec) {
  const Grouping& grouping = grouping_of(spec.granularity);
  if (spec.group_q == 0)
    spec.group_q = grouping.queries;
  const bool sparse = spec.sparse_q != 0 || spec.sparse_kv != 0;
  if (sparse)
    check_sparse(spec);
  if (spec.group_kv == 0) // no group straddles two blocks of a list
    spec.group_kv = sparse ? std::min(grouping.keys.back(), spec.sparse_kv) : grouping.keys.back();
  // With a window only few queries see the first key, so that it is not worth a computation of its
  // own. With lists those that do not list its block must not see it.
  const bool few_see_it = bounded_before(spec) || sparse;
  const int most_sink_keys = few_see_it ? 0 : grouping.most_sink_keys;
  if (spec.sink_keys == -1)
    spec.sink_keys = most_sink_keys;
  if (spec.group_q != grouping.queries)
    throw SpecError("group_q = " + std::to_string(spec.group_q) + " is not supported under '" +
                    value_text(spec.granularity) + "': it is " + std::to_string(grouping.queries) +
                    " there; leave it out for that default");
  if (!includes(grouping.keys, spec.group_kv))
    throw SpecError("group_kv = " + std::to_string(spec.group_kv) + " is not supported under '" +
                    value_text(spec.granularity) + "': it is " + listed(grouping.keys, " or ") +
                    " there; leave it out for the default");
  if (spec.sink_keys < 0 || spec.sink_keys > most_sink_keys)
    throw SpecError("sink_keys = " + std::to_string(spec.sink_keys) + " is not supported under '" +
                    value_text(spec.granularity) + "'" +
                    (bounded_before(spec) ? " with a window: "
                     : sparse             ? " with lists of blocks: "
                                          : ": ") +
                    (most_sink_keys ? "1 computes the first key separately, 0 does not"
                                    : "no key is computed separately there, pass 0") +
                    "; leave it out for the default");
}

void resolve_window(AttentionSpec& spec) {
  for (const auto& [name, side] :
       {std::pair("window_left", spec.window_left), std::pair("window_right", spec.window_right)})
    if (side < kNoWindow)
      throw SpecError(std::string(name) + " = " + std::to_string(side) +
                      " is not supported: it is how many keys a query sees on that side of its "
                      "own, 0 or more; leave it out, or pass -1, for all of them");
  if (spec.causal != Causal::none) // a causal mask hides all keys on the right
    spec.window_right = kNoWindow;
}

void check_sums(const AttentionSpec& spec) {
  if (sums_dq_in_fp16(spec) && (spec.deterministic || width(spec) > kWidestFused ||
                                spec.precision != Precision::gradients16)) {
    const bool wide = width(spec) > kWidestFused;
    throw SpecError("dq_sums = " + value_text(spec.dq_sums) + " is not supported " +
                    (spec.deterministic ? "under 'deterministic', which adds up dQ in one order"
                     : wide             ? "for head dimension " + std::to_string(spec.head_dim)
                                        : "under precision '" + value_text(spec.precision) + "'") +
                    ": it needs a spec without 'deterministic' (deterministic=False in Python), "
                    "with precision '" +
                    value_text(Precision::gradients16) + "' and a head dimension of at most " +
                    std::to_string(kWidestFused) + "; leave dq_sums out for fp32");
  }
  if (sums_dp_in_fp16(spec) && sums_dq_in_fp16(spec))
    throw SpecError("dp_sums = " + value_text(spec.dp_sums) +
                    " is not supported with dq_sums = " + value_text(spec.dq_sums) +
                    ", which only the family 'ws' of sm_90a has, while dp_sums has the family "
                    "'mma': leave one of the two out for fp32");
  if (sums_dq_in_fp16(spec) && (spec.gradient_kernels == Backward::split || is_sparse(spec)))
    throw SpecError("dq_sums = " + value_text(spec.dq_sums) + " is not supported with " +
                    (is_sparse(spec) ? "lists of blocks"
                                     : "gradient_kernels = " + value_text(spec.gradient_kernels)) +
                    ", whose kernel of dQ keeps its sums in registers; leave one of the two out");
}

void check_gradient_kernels(const AttentionSpec& spec) {
  if (is_fused(spec) && !may_fuse_backward(spec))
    throw SpecError(
        "gradient_kernels = " + value_text(spec.gradient_kernels) + " is not supported " +
        (width(spec) > kWidestFused
             ? "for head dimension " + std::to_string(spec.head_dim) +
                   ": the registers suffice for " + std::to_string(kWidestFused) + " at most"
         : is_sparse(spec) ? "with lists of blocks: only the split kernels walk over them"
         : grouping_of(spec.granularity).one_scale && which_int8(spec.precision).dq
             ? "under '" + value_text(spec.granularity) + "' and precision '" +
                   value_text(spec.precision) +
                   "', where the kernel of dQ finds the scales that dK needs"
             : "under 'deterministic' and precision '" + value_text(spec.precision) +
                   "': it adds dQ up in a fixed order only if dQ and dV are INT8") +
        "; leave it out for the kernels that the GPU has");
}

void check_combinations(const AttentionSpec& spec) {
  if (spec.smooth_q && (spec.packed || !which_int8(spec.precision).s))
    throw SpecError("smooth_q is not supported " +
                    (spec.packed ? "for packed sequences: make a call for each sequence"
                                 : "under precision '" + value_text(spec.precision) +
                                       "', where queries are not quantised: take '" +
                                       value_text(Precision::six_of_seven) + "'") +
                    ", or leave it out");
  if (is_sparse(spec) && spec.group_kv > spec.sparse_kv)
    throw SpecError("group_kv = " + std::to_string(spec.group_kv) +
                    " is not supported with blocks of " + std::to_string(spec.sparse_kv) +
                    " keys: a quantisation group must lie in one block; leave it out");
  const Grouping& grouping = grouping_of(spec.granularity);
  if (spec.packed && grouping.one_scale)
    throw SpecError("packed sequences are not supported under '" + value_text(spec.granularity) +
                    "', which keeps maxima for each pair of a sequence's tiles: take '" +
                    value_text(Granularity::row) + "', or a call for each sequence");
  if (spec.numerics != kNumerics)
    throw SpecError("numerics = " + std::to_string(spec.numerics) +
                    " is not what this version computes, which is " + std::to_string(kNumerics) +
                    ": build with the version that wrote the spec, or ask for that");
}

} // namespace

ResolvedSpec resolved(AttentionSpec spec) {
  check_words(spec);
  check_head_dim(spec);
  resolve_groups(spec);
  resolve_window(spec);
  check_sums(spec);
  check_gradient_kernels(spec);
  check_combinations(spec);
  return ResolvedSpec(spec);
}

MaskEdges mask_edges(const AttentionSpec& s, int64_t queries, int64_t keys) {
  // A window without a causal mask has its diagonal as in flash-attention: at the last query the
  // diagonal is the last key.
  const int64_t diagonal = s.causal == Causal::top_left ? 0 : keys - queries;
  const bool right = s.window_right != kNoWindow;
  return {s.window_left != kNoWindow ? std::max(diagonal - s.window_left, -queries) : -queries,
          s.causal != Causal::none ? diagonal
          : right                  ? std::min(diagonal + s.window_right, keys)
                                   : keys};
}

} // namespace sagebwd
