//===- tile/walk/hidden.cuh - Which scores of a tile are hidden -------------------===//
//
// Those that the mask hides (tile/walk/mask.cuh). Kernels that hide any
// score have hidden_anywhere.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/mask.cuh"

constexpr bool HIDES_ANYWHERE = false;

/// Which keys are hidden from queries g and g + 8, of tiles with so many n8 tiles.
template <int COLUMNS8> using KeysHiddenFrom = HiddenKeys;

/// From which queries of a tile, of a query head, two keys are hidden: of row g + 8r, key_of(r), by
/// its column.
template <typename KeyOf> class QueriesHiddenFrom {
public:
  __device__ __forceinline__ QueriesHiddenFrom(const KeyHead& at, int, const KeyOf& key_of,
                                               int first_query)
      : at_(at), key_of_(key_of), first_(first_query) {}
  __device__ __forceinline__ bool operator()(int r, int column) const {
    return hidden(at_, first_ + column, key_of_(r));
  }

private:
  const KeyHead& at_;
  const KeyOf& key_of_;
  int first_;
};
