//===- bounded_json.h - JSON from files that anybody may have written ------===//
//
// Included by .cpp files only.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/llvm_compat.h"

#include "llvm/Support/JSON.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

namespace sagebwd {

/// The deepest nesting of arrays and objects that a recursive parser would follow. Brackets within
/// strings do not count: one that closed there would hide another that opens.
inline int json_depth(llvm::StringRef text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"')
      in_string = !in_string;
    else if (in_string)
      i += c == '\\'; // and what it escapes
    else if (c == '[' || c == '{')
      deepest = std::max(deepest, ++depth);
    else
      depth -= c == ']' || c == '}';
  }
  return deepest;
}

/// Nothing where the text is no JSON, or nested deeper than LLVM's recursive parser may follow.
inline std::optional<llvm::json::Value> parse_bounded_json(llvm::StringRef text, int deepest = 64) {
  if (json_depth(text) > deepest)
    return std::nullopt;
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(text);
  if (parsed)
    return std::move(*parsed);
  llvm::consumeError(parsed.takeError());
  return std::nullopt;
}

/// JSON strings must be UTF-8, and a driver may name a GPU in any bytes.
inline std::string utf8(const std::string& text) {
  return llvm::json::isUTF8(text) ? text : llvm::json::fixUTF8(text);
}

inline std::optional<std::string> text_of(const llvm::json::Object& object, llvm::StringRef name) {
  auto text = llvm_compat::to_optional<llvm::StringRef>(object.getString(name));
  return text ? std::optional(text->str()) : std::nullopt;
}

/// The fields of a key: an object of strings. Nothing for anything else.
inline std::optional<std::vector<std::pair<std::string, std::string>>>
fields_of_json(const llvm::json::Object* object) {
  if (!object)
    return std::nullopt;
  std::vector<std::pair<std::string, std::string>> fields;
  for (const auto& [label, value] : *object) {
    auto text = llvm_compat::to_optional<llvm::StringRef>(value.getAsString());
    if (!text)
      return std::nullopt;
    fields.emplace_back(label.str(), text->str());
  }
  return fields;
}

/// A member into a variable of its kind: false where it is missing, or of another.
inline bool read_member(const llvm::json::Object& object, llvm::StringRef name, std::string& out) {
  auto text = text_of(object, name);
  if (text)
    out = std::move(*text);
  return text.has_value();
}
inline bool read_member(const llvm::json::Object& object, llvm::StringRef name, double& out) {
  auto number = llvm_compat::to_optional<double>(object.getNumber(name));
  out = number.value_or(out);
  return number.has_value();
}
/// Counts and sizes: never negative.
inline bool read_member(const llvm::json::Object& object, llvm::StringRef name, int& out) {
  auto number = llvm_compat::to_optional<int64_t>(object.getInteger(name));
  if (!number || *number < 0 || *number > std::numeric_limits<int>::max())
    return false;
  out = static_cast<int>(*number);
  return true;
}

inline llvm::json::Object
json_of_fields(const std::vector<std::pair<std::string, std::string>>& fields) {
  llvm::json::Object object;
  for (const auto& [label, value] : fields)
    object[utf8(label)] = utf8(value);
  return object;
}

} // namespace sagebwd
