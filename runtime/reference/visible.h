//===- visible.h - Which keys a query sees ----------------------------------===//
//
// All that the reference knows of the mask, as templates/tile/visible.cuh is for the kernels.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/spec.h"

#include <algorithm>
#include <cstdint>

namespace sagebwd::reference {

/// Keys begin .. end - 1.
struct KeyRange {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
  /// What of it lies among keys first .. first + count - 1.
  KeyRange within(int64_t first, int64_t count) const {
    return {std::max(begin, first), std::min(end, first + count)};
  }
};

/// What of a spec hides keys from queries.
struct Mask {
  Causal causal = Causal::none;

  Mask(Causal of) : causal(of) {}
  Mask(const AttentionSpec& spec) : causal(spec.causal) {}
};

/// The keys that any of `count` queries from `first` on sees.
inline KeyRange keys_of(const Mask& mask, int64_t queries, int64_t keys, int64_t first,
                        int64_t count = 1) {
  const bool all = mask.causal == Causal::none;
  const int64_t offset = mask.causal == Causal::bottom_right ? keys - queries : 0;
  return {0, all ? keys : std::clamp<int64_t>(first + count + offset, 0, keys)};
}

} // namespace sagebwd::reference
