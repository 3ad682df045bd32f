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

/// Which scores of a head are seen beside the mask's edges, a byte for each of (queries, keys), and
/// some queries that ask; or null for all.
struct SeenScores {
  const uint8_t* seen = nullptr;
  int64_t keys = 0;             ///< of a row
  int64_t first = 0, count = 1; ///< queries

  /// Whether any of the queries sees the key.
  bool has(int64_t key) const {
    for (int64_t query = first; seen && query < first + count; ++query)
      if (seen[query * keys + key])
        return true;
    return !seen;
  }
};

/// The keys that a query sees: those of a range that are in listed blocks and that SeenScores has,
/// from the first on. Loops over keys use it, and know nothing else about the mask.
class VisibleKeys {
public:
  VisibleKeys(int64_t first, int64_t end, ListedBlocks blocks = {}, SeenScores scores = {})
      : first_(first), end_(std::max(first, end)), blocks_(blocks), scores_(scores) {}

  struct Iterator {
    int64_t key, end;
    ListedBlocks blocks;
    SeenScores scores;
    int64_t operator*() const { return key; }
    Iterator& operator++() { return ++key, find(), *this; }
    bool operator==(const Iterator& other) const { return key == other.key; }
    void find() {
      while (key < end && !(blocks.has(key) && scores.has(key)))
        ++key;
    }
  };
  Iterator begin() const {
    Iterator first{first_, end_, blocks_, scores_};
    first.find();
    return first;
  }
  Iterator end() const { return {end_, end_, blocks_, scores_}; }
  bool empty() const { return begin() == end(); }
  /// The keys of this range among the keys first .. first + count - 1.
  VisibleKeys within(int64_t first, int64_t count) const {
    return {std::max(first_, first), std::min(end_, first + count), blocks_, scores_};
  }

  /// Those of them that are in listed blocks.
  VisibleKeys of(ListedBlocks blocks) const { return {first_, end_, blocks, scores_}; }
  /// Those of them that some scores are seen of.
  VisibleKeys of(const SeenScores& scores) const { return {first_, end_, blocks_, scores}; }

private:
  int64_t first_, end_;
  ListedBlocks blocks_;
  SeenScores scores_;
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
