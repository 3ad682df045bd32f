//===- visible.h - The keys that a query sees -----------------------------===//
//
// Everything that the reference knows about the mask is in this file, as
// templates/tile/walk/mask.cuh is for the kernels.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/spec.h"

#include <algorithm>
#include <cstdint>

namespace sagebwd::reference {

/// A list of blocks of keys: which are listed, a byte for each, or null for all.
struct ListedBlocks {
  const uint8_t* listed = nullptr;
  int64_t keys = 1; ///< of a block

  bool has(int64_t key) const { return !listed || listed[key / keys] != 0; }
};

/// Numbers of a head's keys that say which queries do not see them (runtime/attention.h), and some
/// queries that ask; or null for none.
struct KeyIntervals {
  const int32_t* numbers = nullptr;
  int columns = 0; ///< numbers of a key
  bool causal = false;
  int64_t first = 0, count = 1; ///< queries

  bool hide(int64_t query, int64_t key) const {
    const int32_t* of = numbers + key * columns;
    const auto in = [&](int64_t begin, int64_t end) { return begin <= query && query < end; };
    switch (columns) {
    case 1:
      return query >= of[0];
    case 2:
      return causal ? in(of[0], of[1]) : query >= of[0] || query < of[1];
    default:
      return in(of[0], of[1]) || in(of[2], of[3]);
    }
  }
  /// Whether any of the queries sees the key.
  bool show(int64_t key) const {
    for (int64_t query = first; numbers && query < first + count; ++query)
      if (!hide(query, key))
        return true;
    return !numbers;
  }
};

/// The keys that a query sees: those of a range that are in listed blocks and that intervals do not
/// hide, from the first on. Loops over keys use it, and know nothing else about the mask.
class VisibleKeys {
public:
  VisibleKeys(int64_t first, int64_t end, ListedBlocks blocks = {}, KeyIntervals intervals = {})
      : first_(first), end_(std::max(first, end)), blocks_(blocks), intervals_(intervals) {}

  struct Iterator {
    int64_t key, end;
    ListedBlocks blocks;
    KeyIntervals intervals;
    int64_t operator*() const { return key; }
    Iterator& operator++() { return ++key, find(), *this; }
    bool operator==(const Iterator& other) const { return key == other.key; }
    void find() {
      while (key < end && !(blocks.has(key) && intervals.show(key)))
        ++key;
    }
  };
  Iterator begin() const {
    Iterator first{first_, end_, blocks_, intervals_};
    first.find();
    return first;
  }
  Iterator end() const { return {end_, end_, blocks_, intervals_}; }
  bool empty() const { return begin() == end(); }
  /// The keys of this range among the keys first .. first + count - 1.
  VisibleKeys within(int64_t first, int64_t count) const {
    return {std::max(first_, first), std::min(end_, first + count), blocks_, intervals_};
  }

  /// Those of them that are in listed blocks.
  VisibleKeys of(ListedBlocks blocks) const { return {first_, end_, blocks, intervals_}; }
  /// Those of them that intervals show.
  VisibleKeys of(const KeyIntervals& intervals) const { return {first_, end_, blocks_, intervals}; }

private:
  int64_t first_, end_;
  ListedBlocks blocks_;
  KeyIntervals intervals_;
};

/// The options of a spec that hide keys from queries.
struct Mask {
  AttentionSpec spec;

  Mask(Causal of) : spec{.causal = of} {}
  Mask(const AttentionSpec& of) : spec(of) {}
  Mask(const ResolvedSpec& of) : spec(of) {}
};

/// The keys that at least one of `count` queries from `first` on sees.
inline VisibleKeys keys_of(const Mask& mask, int64_t queries, int64_t keys, int64_t first,
                           int64_t count = 1) {
  const MaskEdges edges = mask_edges(mask.spec, queries, keys);
  return {std::clamp<int64_t>(first + edges.first, 0, keys),
          std::clamp<int64_t>(first + count + edges.last, 0, keys)};
}

} // namespace sagebwd::reference
