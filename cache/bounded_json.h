//===- bounded_json.h - Read JSON from untrusted files --------------------===//
//
// Only .cpp files include this header.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/key.h"

#include "llvm/Support/JSON.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sagebwd {

/// The deepest nesting of arrays and objects in a text, which a recursive parser would follow.
/// Brackets in strings are ignored: otherwise a closing bracket in a string could hide the depth.
inline int json_depth(llvm::StringRef text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"')
      in_string = !in_string;
    else if (in_string)
      i += c == '\\'; // skip an escaped character
    else if (c == '[' || c == '{')
      deepest = std::max(deepest, ++depth);
    else
      depth -= c == ']' || c == '}';
  }
  return deepest;
}

/// Parses a text. Returns nothing if it is not JSON or is nested deeper than `deepest`: LLVM's
/// parser is recursive.
inline std::optional<llvm::json::Value> parse_bounded_json(llvm::StringRef text, int deepest = 64) {
  if (json_depth(text) > deepest)
    return std::nullopt;
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(text);
  if (parsed)
    return std::move(*parsed);
  llvm::consumeError(parsed.takeError());
  return std::nullopt;
}

/// Replaces bytes that are not UTF-8, which JSON requires; a driver may give a GPU any name.
inline std::string utf8(const std::string& text) {
  return llvm::json::isUTF8(text) ? text : llvm::json::fixUTF8(text);
}

//===--- Structs, in both directions --------------------------------------===//
//
// A struct that is stored or sent lists its members once, in a function
//   template <Either<Struct> Self, typename Visit> void visit_members(Self&, Visit&& visit)
// which calls visit(name, member) for each member. Writing and reading both use this list.

/// Matches T and const T.
template <typename Self, typename T>
concept Either = std::is_same_v<std::remove_const_t<Self>, T>;

/// The fields of a key. In JSON they are an object of strings.
using Fields = decltype(CacheKey::fields);
template <typename T> inline constexpr bool kIsList = false;
template <typename T> inline constexpr bool kIsList<std::vector<T>> = true;

template <typename T> llvm::json::Object object_of(const T&);
template <typename T> bool read_object(const llvm::json::Object*, T&, size_t others);
/// As `others`: an object may have any number of further members.
inline constexpr size_t kAnyNumber = SIZE_MAX;

/// Converts a value to JSON. JSON has no infinities, which become the largest number, and no NaN,
/// which becomes 0.
template <typename T> llvm::json::Value as_json(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return utf8(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    constexpr T kLargest = std::numeric_limits<T>::max();
    // + 0 removes -0.
    return std::isnan(value) ? T(0) : std::clamp(value, -kLargest, kLargest) + T(0);
  } else if constexpr (std::is_same_v<T, Fields>) {
    llvm::json::Object object;
    for (const auto& [label, text] : value)
      object[utf8(label)] = utf8(text);
    return object;
  } else if constexpr (kIsList<T>) {
    llvm::json::Array array;
    for (const auto& item : value)
      array.push_back(as_json(item));
    return array;
  } else {
    return object_of(value);
  }
}

/// Reads a value. Returns false if there is no value, its kind is wrong, or a number does not fit.
template <typename T> bool read_json(const llvm::json::Value* json, T& value) {
  if (!json)
    return false;
  const auto take = [&](const auto& found) {
    if (found)
      value = static_cast<T>(*found);
    return static_cast<bool>(found);
  };
  if constexpr (std::is_same_v<T, std::string>) {
    return take(json->getAsString());
  } else if constexpr (std::is_same_v<T, bool>) {
    return take(json->getAsBoolean());
  } else if constexpr (std::is_integral_v<T>) {
    const auto number = json->getAsInteger();
    return number && std::in_range<T>(*number) && take(number);
  } else if constexpr (std::is_floating_point_v<T>) {
    return take(json->getAsNumber());
  } else if constexpr (std::is_same_v<T, Fields>) {
    const llvm::json::Object* object = json->getAsObject();
    if (!object)
      return false;
    for (const auto& [label, text] : *object)
      if (!read_json(&text, value.emplace_back(label.str(), "").second))
        return false;
    return true;
  } else if constexpr (kIsList<T>) {
    const llvm::json::Array* array = json->getAsArray();
    for (size_t i = 0; array && i < array->size(); ++i)
      if (!read_json(&(*array)[i], value.emplace_back()))
        return false;
    return array != nullptr;
  } else {
    return read_object(json->getAsObject(), value, /*others=*/0);
  }
}

template <typename T> llvm::json::Object object_of(const T& members) {
  llvm::json::Object object;
  visit_members(members,
                [&](const char* name, const auto& value) { object[name] = as_json(value); });
  return object;
}

/// Reads an object. Returns false also if there is no object.
template <typename T>
bool read_object(const llvm::json::Object* object, T& members, size_t others) {
  bool sound = object != nullptr;
  size_t count = 0;
  visit_members(members, [&](const char* name, auto& value) {
    sound = sound && read_json(object->get(name), value);
    ++count;
  });
  return sound && (others == kAnyNumber || object->size() == count + others);
}

} // namespace sagebwd
