//===- bounded_json.h - JSON from files that anybody may have written ------===//
//
// Included by .cpp files only.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/llvm_compat.h"

#include "llvm/Support/JSON.h"

#include <optional>
#include <string>

namespace sagebwd {

/// Nothing where the text is no JSON, or nested deeper than LLVM's recursive parser may follow.
inline std::optional<llvm::json::Value> parse_bounded_json(llvm::StringRef text) {
  constexpr int kDeepest = 64;
  int depth = 0;
  bool in_string = false; // where brackets mean nothing
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"')
      in_string = !in_string;
    else if (in_string)
      i += c == '\\'; // and what it escapes
    else
      depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    if (depth > kDeepest)
      return std::nullopt;
  }
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(text);
  if (parsed)
    return std::move(*parsed);
  llvm::consumeError(parsed.takeError());
  return std::nullopt;
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

inline llvm::json::Object
json_of_fields(const std::vector<std::pair<std::string, std::string>>& fields) {
  llvm::json::Object object;
  for (const auto& [label, value] : fields)
    object[llvm::json::isUTF8(label) ? label : llvm::json::fixUTF8(label)] =
        llvm::json::isUTF8(value) ? value : llvm::json::fixUTF8(value);
  return object;
}

} // namespace sagebwd
