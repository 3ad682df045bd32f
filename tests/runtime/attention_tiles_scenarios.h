//===- attention_tiles_scenarios.h - What runs on a GPU that is not there --===//
#pragma once

#include "runtime/attention.h"

#include <functional>
#include <map>
#include <string>

namespace sagebwd::test {

inline AttentionSpec tiles_spec() {
  AttentionSpec s;
  s.head_dim = 64;
  return s;
}

/// By name. Each prints what it finds.
const std::map<std::string, std::function<void()>>& tiles_scenarios();

} // namespace sagebwd::test
