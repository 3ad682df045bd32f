//===- visible.h - The keys that a query sees -----------------------------===//
//
// Everything that the reference knows about the mask is in this file, as templates/tile/visible.cuh
// is for the kernels.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/spec.h"

#include <algorithm>
#include <cstdint>

namespace sagebwd::reference {

/// A range of keys that a query sees, from the first on. Loops over keys use it, and know nothing
/// else about the mask.
class VisibleKeys {
public:
  VisibleKeys(int64_t first, int64_t end) : first_(first), end_(std::max(first, end)) {}

  struct Iterator {
    int64_t key;
    int64_t operator*() const { return key; }
    Iterator& operator++() { return ++key, *this; }
    bool operator==(const Iterator&) const = default;
  };
  Iterator begin() const { return {first_}; }
  Iterator end() const { return {end_}; }
  bool empty() const { return first_ == end_; }
  /// The keys of this range among the keys first .. first + count - 1.
  VisibleKeys within(int64_t first, int64_t count) const {
    return {std::max(first_, first), std::min(end_, first + count)};
  }

private:
  int64_t first_, end_;
};

/// The options of a spec that hide keys from queries.
struct Mask {
  AttentionSpec spec;

  Mask(Causal of) : spec{.causal = of} {}
  Mask(const AttentionSpec& of) : spec(of) {}
};

/// The keys that at least one of `count` queries from `first` on sees.
inline VisibleKeys keys_of(const Mask& mask, int64_t queries, int64_t keys, int64_t first,
                           int64_t count = 1) {
  const MaskEdges edges = mask_edges(mask.spec, queries, keys);
  return {std::clamp<int64_t>(first + edges.first, 0, keys),
          std::clamp<int64_t>(first + count + edges.last, 0, keys)};
}

} // namespace sagebwd::reference
