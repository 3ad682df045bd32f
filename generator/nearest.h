//===- nearest.h - What a misspelt word most likely means ------------------===//
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// The known word that is nearest to a given one; empty if none is near.
std::string nearest(std::string_view given, const std::vector<std::string>& known);

} // namespace sagebwd
