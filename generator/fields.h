//===- fields.h - One list of a struct's fields, and loops over the list ---===//
//
// A struct of settings lists its fields once, in a function
//   template <typename Self, typename Visitor> void visit_fields(Self&, Visitor&&)
// that calls the visitor with each field's Label and the member. The struct's printer and parser,
// cache keys, hashes, options of the command line and attributes in Python loop over that list.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/nearest.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace sagebwd {

/// The names of a field.
struct Label {
  std::string_view name; ///< in cache keys, JSON and Python; with hyphens, an option
  std::string_view mark; ///< text before the field's value in the struct's line (line_of())
  std::string_view help; ///< what the field decides, for lists of options
  /// If `quiet`, texts and cache keys leave the field out while it has its default, so that texts
  /// and keys from before the field existed stay valid. The default is `unset` for a number, false
  /// for a bool, and the first word for an enumeration.
  bool quiet = false;
  int unset = 0;
};

/// The words of an enumeration. Every enumeration that is a field specialises this template: `what`
/// names the enumeration in errors, `all` lists its values and their words.
template <typename T> struct Words;
template <typename T> using Word = std::pair<T, std::string_view>;

template <typename T>
concept Worded = requires {
  Words<T>::all;
};

template <Worded T> std::string_view to_string(T value) {
  for (const auto& [candidate, word] : Words<T>::all)
    if (candidate == value)
      return word;
  return "?";
}

/// Whether a range has a value.
constexpr bool includes(const auto& range, const auto& value) {
  return std::ranges::find(range, value) != std::ranges::end(range);
}
/// A field's value as text: a number, "yes" or "no", a word, or a text as it is.
template <typename T> std::string value_text(const T& value) {
  if constexpr (std::is_same_v<T, bool>)
    return value ? "yes" : "no";
  else if constexpr (std::is_constructible_v<std::string, const T&>)
    return std::string(value);
  else if constexpr (Worded<T>)
    return std::string(to_string(value));
  else
    return std::to_string(value);
}

/// The parts as one text. A part is a text or a field's value.
std::string text_of(const auto&... parts) { return (std::string() + ... + value_text(parts)); }

/// A spec, tile or architecture that cannot be built. The message says what was given, what is
/// supported and what to do. It is given in parts, of which text_of() makes the message.
class SpecError : public std::invalid_argument {
public:
  explicit SpecError(const auto&... parts) : std::invalid_argument(text_of(parts...)) {}
};

/// The texts that `text` gives for a range's items, with `between` between two.
std::string joined(const auto& items, std::string_view between, const auto& text) {
  std::string all;
  for (const auto& item : items)
    all += (all.empty() ? "" : std::string(between)) + std::string(text(item));
  return all;
}
/// The items as texts, with `between` between two.
std::string joined(const auto& items, std::string_view between) {
  return joined(items, between, [](const auto& item) { return value_text(item); });
}

/// All words of an enumeration.
template <Worded T> std::vector<std::string> words_of() {
  std::vector<std::string> words;
  for (const auto& [value, word] : Words<T>::all)
    words.emplace_back(word);
  return words;
}
/// The same as text, e.g. "bf16, fp16".
template <Worded T> std::string known_words(std::string_view between = ", ") {
  return joined(Words<T>::all, between, [](const auto& known) { return known.second; });
}

template <Worded T> T parse_word(std::string_view text) {
  for (const auto& [value, word] : Words<T>::all)
    if (word == text)
      return value;
  throw SpecError("unknown " + std::string(Words<T>::what) + " '" + std::string(text) +
                  "': supported are " + known_words<T>() + suggestion(text, words_of<T>()));
}

/// The inverse of value_text(). `name` is the field's name in errors. Raises SpecError.
template <typename T> T parse_value(std::string_view name, std::string_view text) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool yes = text == "yes" || text == "true";
    if (!yes && text != "no" && text != "false")
      throw SpecError(std::string(name) + " is '" + std::string(text) + "': it takes yes or no");
    return yes;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return T(text);
  } else if constexpr (Worded<T>) {
    return parse_word<T>(text);
  } else {
    T value{};
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || stop != text.data() + text.size())
      throw SpecError(std::string(name) + " is '" + std::string(text) +
                      "': it takes a whole number" +
                      (error == std::errc::result_out_of_range ? " below 2^31" : ""));
    return value;
  }
}

/// The struct's defaults, for callers that visit fields only for their labels.
template <typename Struct> const Struct& usual() {
  static const Struct defaults{};
  return defaults;
}

/// The value of a quiet field that a text or key leaves out.
template <typename T> T untold_value(const Label& label) {
  if constexpr (std::is_same_v<T, int>)
    return label.unset;
  else
    return T{};
}
/// Whether texts and keys leave the field out.
template <typename T> bool untold(const Label& label, const T& value) {
  return label.quiet && value == untold_value<T>(label);
}

/// A field's value by its text in a key, which is empty if the key leaves the field out. Raises
/// SpecError.
template <typename T> T read_value(const Label& label, const std::string& text) {
  return label.quiet && text.empty() ? untold_value<T>(label) : parse_value<T>(label.name, text);
}

/// Parses `text` into the field of that name. Raises SpecError if the text is no value of the
/// field. Returns false if the struct has no such field.
template <typename Struct>
bool set_field(Struct& fields, std::string_view name, std::string_view text) {
  bool found = false;
  visit_fields(fields, [&]<typename T>(const Label& label, T& value) {
    if (label.name == name) {
      value = parse_value<T>(name, text);
      found = true;
    }
  });
  return found;
}

/// Calls the visitor with each field of `given` whose value differs from that of `usual`.
template <typename Struct, typename Visitor>
void visit_differences(const Struct& given, const Struct& usual, Visitor&& visit) {
  visit_fields(given, [&]<typename T>(const Label& label, const T& value) {
    bool same = false;
    visit_fields(usual, [&]<typename Other>(const Label& other, const Other& its) {
      if constexpr (std::is_same_v<T, Other>)
        same = same || (label.name == other.name && value == its);
    });
    if (!same)
      visit(label, value);
  });
}

/// The struct as one line of text: each field's mark and value, in order. A bool adds its mark if
/// true and nothing if false. A field that is untold() adds nothing. Texts have no spaces there.
template <typename Struct> std::string line_of(const Struct& fields) {
  std::string line;
  visit_fields(fields, [&](const Label& label, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>)
      line += value ? label.mark : "";
    else if (!untold(label, value))
      line += std::string(label.mark) + value_text(value);
  });
  return line;
}

/// Parses a line that line_of() wrote. Returns false for every other text.
template <typename Struct> bool parse_line(std::string_view text, Struct& fields) {
  bool sound = true;
  const auto skip = [&](std::string_view part) {
    const bool there = text.substr(0, part.size()) == part;
    text.remove_prefix(there ? part.size() : 0);
    return there;
  };
  visit_fields(fields, [&]<typename T>(const Label& label, T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      const std::string_view behind = text.substr(std::min(text.size(), label.mark.size()));
      value = (behind.empty() || behind.front() == ' ') && skip(label.mark);
    } else if (label.quiet && text.substr(0, label.mark.size()) != label.mark) {
      value = untold_value<T>(label);
    } else if (sound = sound && skip(label.mark); sound) {
      if constexpr (Worded<T>) {
        std::string_view best; // one word may begin with another
        for (const auto& [candidate, word] : Words<T>::all)
          if (text.substr(0, word.size()) == word && word.size() > best.size())
            best = word, value = candidate;
        sound = !best.empty() && skip(best);
      } else if constexpr (std::is_same_v<T, std::string>) {
        value = T(text.substr(0, text.find(' ')));
        sound = !value.empty() && skip(value);
      } else {
        const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        sound = error == std::errc();
        text.remove_prefix(static_cast<size_t>(stop - text.data()));
      }
    }
  });
  return sound && text.empty();
}

} // namespace sagebwd
