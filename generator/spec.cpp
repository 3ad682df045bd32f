//===- spec.cpp - Parsing and printing specs --------------------------------===//

#include "generator/spec.h"

#include "generator/nearest.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace sagebwd {
namespace {

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
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = T(word);
      return !word.empty();
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
    else if constexpr (std::is_same_v<T, std::string>)
      words.push_back(mark + "EXPRESSION");
    else if (mark == "x") // with the number before it
      words.back() += mark + "N";
    else if (label.name != "numerics")
      words.push_back(mark + "N");
  });
  return joined(words, " ");
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
        else if constexpr (std::is_same_v<T, std::string>)
          wrong_value = lacks(mark + "EXPRESSION, without spaces");
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

/// Says what is wrong with a line that cannot be read.
std::string problem_of_line(std::string_view text) {
  AttentionSpec scratch;
  const size_t version = text.find(" numerics=");
  const std::string problem = parse_words(text.substr(0, version), scratch);
  if (!problem.empty() || version == std::string_view::npos)
    return problem;
  return "a line with numerics= is one that was printed, with all of its words in their order. "
         "Leave numerics= out to name only some";
}

} // namespace

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

} // namespace sagebwd
