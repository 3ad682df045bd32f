//===- nearest.h - The known word that is nearest to a misspelt one --------===//
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// The known word that is nearest to the given word. Empty if no known word is near.
std::string nearest(std::string_view given, const std::vector<std::string>& known);

/// "; did you mean 'build'?", or nothing if no known word is near.
std::string suggestion(std::string_view given, const std::vector<std::string>& known);

} // namespace sagebwd
