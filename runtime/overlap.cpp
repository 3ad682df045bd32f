//===- overlap.cpp - Whether tensors of a call share memory ---------------===//

#include "runtime/overlap.h"
#include "generator/fields.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace sagebwd {
namespace {

/// The most pairs of rows that are compared.
constexpr int64_t kMostSteps = 1 << 16;

/// A range of bytes: `begin` is the lowest, `end` lies behind the highest.
struct Range {
  int64_t begin, end;
};

Range range_of(const MemoryArea& area) {
  Range range{0, area.row_bytes};
  for (int i = 0; i < 3; ++i) {
    const int64_t last = (area.sizes[i] - 1) * area.strides[i];
    (last < 0 ? range.begin : range.end) += last;
  }
  return range;
}

int64_t rows_of(const MemoryArea& area) { return area.sizes[0] * area.sizes[1] * area.sizes[2]; }

/// Whether rows fill the range without gaps, each byte once.
bool is_dense(const MemoryArea& area) {
  int order[3] = {0, 1, 2};
  std::sort(order, order + 3,
            [&](int x, int y) { return std::abs(area.strides[x]) < std::abs(area.strides[y]); });
  int64_t filled = area.row_bytes;
  for (int i : order)
    if (area.sizes[i] > 1) {
      if (std::abs(area.strides[i]) != filled)
        return false;
      filled *= area.sizes[i];
    }
  return true;
}

bool is_empty(const MemoryArea& area) {
  return area.address == 0 || area.row_bytes == 0 || rows_of(area) == 0;
}

/// Whether `low` < `first` + step * stride < `high` for a step from `least` to `most`.
bool reaches(int64_t first, int64_t stride, int64_t least, int64_t most, int64_t low,
             int64_t high) {
  const int64_t towards = stride == 0 ? least : -first / stride;
  for (int64_t step : {towards - 1, towards, towards + 1}) {
    const int64_t at = first + std::clamp(step, least, most) * stride;
    if (low < at && at < high)
      return true;
  }
  return false;
}

/// Whether a row of `one` and a row of `other` overlap, if `one` begins `distance` bytes behind
/// `other` and both have the same `strides`: 1 yes, 0 no, -1 if there are too many rows to compare.
int meet_on_grid(const MemoryArea& one, const MemoryArea& other, const int64_t (&strides)[3],
                 int64_t distance) {
  // Along the longest dimension the nearest row is calculated; along the others all rows are tried.
  int order[3] = {0, 1, 2};
  std::sort(order, order + 3, [&](int a, int b) {
    return one.sizes[a] + other.sizes[a] < one.sizes[b] + other.sizes[b];
  });
  const auto least = [&](int i) { return 1 - other.sizes[order[i]]; };
  const auto most = [&](int i) { return one.sizes[order[i]] - 1; };
  if ((most(0) - least(0) + 1) * (most(1) - least(1) + 1) > kMostSteps)
    return -1;
  for (int64_t a = least(0); a <= most(0); ++a)
    for (int64_t b = least(1); b <= most(1); ++b)
      if (reaches(distance + a * strides[order[0]] + b * strides[order[1]], strides[order[2]],
                  least(2), most(2), -one.row_bytes, other.row_bytes))
        return 1;
  return 0;
}

} // namespace

bool share_memory(const MemoryArea& one, const MemoryArea& other) {
  if (is_empty(one) || is_empty(other))
    return false;
  const auto distance = static_cast<int64_t>(one.address - other.address);
  const Range a = range_of(one), b = range_of(other);
  if (distance + a.end <= b.begin || b.end <= distance + a.begin)
    return false;
  int64_t strides[3];
  bool one_grid = true;
  for (int i = 0; i < 3; ++i) {
    one_grid &= one.sizes[i] == 1 || other.sizes[i] == 1 || one.strides[i] == other.strides[i];
    strides[i] = one.sizes[i] == 1 ? other.strides[i] : one.strides[i];
  }
  if (one_grid)
    return meet_on_grid(one, other, strides, distance) == 1;
  // A row overlaps an area without gaps exactly if it overlaps the area's range.
  const auto whole = [](const MemoryArea& area, const Range& range) {
    MemoryArea row{area.name, area.written, area.address + static_cast<uint64_t>(range.begin)};
    row.row_bytes = range.end - range.begin;
    return row;
  };
  if (is_dense(one))
    return share_memory(whole(one, a), other);
  return is_dense(other) && share_memory(one, whole(other, b));
}

void check_shared_memory(std::span<const MemoryArea> areas) {
  for (size_t i = 0; i < areas.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if ((areas[i].written || areas[j].written) && share_memory(areas[i], areas[j]))
        throw SpecError(std::string(areas[j].name) + " and " + std::string(areas[i].name) +
                        " share memory, and the pass writes " +
                        std::string(areas[j].written ? areas[j].name : areas[i].name) +
                        ": give it memory of its own");
}

} // namespace sagebwd
