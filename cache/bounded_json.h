//===- bounded_json.h - JSON from files that anybody may have written -----===//
//
// Included by .cpp files only.
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

//===--- Structs, in both directions --------------------------------------===//
//
// A struct that is kept or sent lists its members once, in a function
//   template <Either<Struct> Self, typename Visit> void visit_members(Self&, Visit&& visit)
// that calls visit(name, member) for each: it is written and read by that list.

/// T or const T.
template <typename Self, typename T>
concept Either = std::is_same_v<std::remove_const_t<Self>, T>;

/// The fields of a key: an object of strings.
using Fields = decltype(CacheKey::fields);
template <typename T> inline constexpr bool kIsList = false;
template <typename T> inline constexpr bool kIsList<std::vector<T>> = true;

template <typename T> llvm::json::Object object_of(const T&);
template <typename T> bool read_object(const llvm::json::Object*, T&, size_t others);
/// How many more members an object may have.
inline constexpr size_t kAnyNumber = SIZE_MAX;

/// JSON has no infinities, for which the largest number stands, and no NaN, for which 0 does.
template <typename T> llvm::json::Value as_json(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return utf8(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    constexpr T kLargest = std::numeric_limits<T>::max();
    return std::isnan(value) ? T(0) : std::clamp(value, -kLargest, kLargest) + T(0); // no -0
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

/// False where there is no value, or one of another kind, or a number that does not fit.
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

/// False, too, where there is no object.
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
