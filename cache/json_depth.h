//===- json_depth.h - How deep a JSON text nests ---------------------------===//
#pragma once

#include <algorithm>
#include <string_view>

namespace sagebwd {

/// The deepest nesting of arrays and objects that a recursive parser would follow. Brackets within
/// strings do not count: one that closed there would hide another that opens.
inline int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\')
      ++i;
    else if (c == '"')
      in_string = !in_string;
    else if (!in_string && (c == '[' || c == '{'))
      deepest = std::max(deepest, ++depth);
    else if (!in_string && (c == ']' || c == '}'))
      --depth;
  }
  return deepest;
}

} // namespace sagebwd
