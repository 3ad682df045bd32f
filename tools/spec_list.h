//===- spec_list.h - A file that lists operations --------------------------===//
//
// YAML, or JSON, which is YAML too: a list of mappings (or one alone), as the help of 'prebuild'
// shows. Each value is a word or a list of words; lists combine as those of the command line do.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/prebuild.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

/// More than any sensible list has.
inline constexpr size_t kLongestSpecList = 256 << 10;

/// Keys that are left out have the command line's defaults; only `arch` has none. Raises UsageError
/// that names the file and the line if the text is not YAML, a key or word is unknown or given
/// twice, or no architecture can build an operation, whose options exclude each other.
std::vector<WantedOperation> parse_spec_list(const std::string& text, const std::string& file_name);

} // namespace sagebwd::tools
