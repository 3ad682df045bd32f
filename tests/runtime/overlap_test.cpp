//===- overlap_test.cpp - Which areas of memory have a byte in common ------===//

#include "generator/fields.h"
#include "runtime/overlap.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

using namespace sagebwd;

namespace {

MemoryArea area(uint64_t address, std::array<int64_t, 3> sizes, std::array<int64_t, 3> strides,
                int64_t row_bytes, bool written = false) {
  return {"x",
          written,
          address,
          {sizes[0], sizes[1], sizes[2]},
          {strides[0], strides[1], strides[2]},
          row_bytes};
}

/// By every byte.
bool share_a_byte(const MemoryArea& one, const MemoryArea& other) {
  std::map<int64_t, int> owners;
  for (const MemoryArea* x : {&one, &other})
    for (int64_t a = 0; a < x->sizes[0]; ++a)
      for (int64_t b = 0; b < x->sizes[1]; ++b)
        for (int64_t c = 0; c < x->sizes[2]; ++c)
          for (int64_t i = 0; i < x->row_bytes; ++i)
            owners[static_cast<int64_t>(x->address) + a * x->strides[0] + b * x->strides[1] +
                   c * x->strides[2] + i] |= x == &one ? 1 : 2;
  for (const auto& [at, who] : owners)
    if (who == 3)
      return true;
  return false;
}

TEST(Overlap, IsThatOfTheBytes) {
  std::mt19937 random(1);
  const auto one_of = [&](std::initializer_list<int64_t> from) {
    return from.begin()[random() % from.size()];
  };
  int sharing = 0, apart = 0;
  for (int i = 0; i < 4000; ++i) {
    const int64_t row = one_of({4, 8, 12});
    const std::array<int64_t, 3> strides = {one_of({-96, 96, 200}), one_of({-32, 0, 16, 24, 32}),
                                            one_of({12, 48, 100})};
    const auto sizes = [&] {
      return std::array<int64_t, 3>{one_of({1, 2, 3}), one_of({1, 2}), one_of({1, 3, 4})};
    };
    const MemoryArea grid = area(4096, sizes(), strides, row);
    const auto place = static_cast<uint64_t>(4096 + one_of({-200, -9, -4, 0, 4, 8, 12, 52, 144}));
    const MemoryArea same_grid = area(place, sizes(), strides, one_of({4, 8}));
    const int64_t tokens = one_of({1, 3, 5}); // without gaps
    const MemoryArea dense = area(place, {2, 2, tokens}, {8 * tokens, 16 * tokens, 8}, 8);
    for (const MemoryArea* other : {&same_grid, &dense}) {
      const bool expected = share_a_byte(grid, *other);
      ASSERT_EQ(share_memory(grid, *other), expected) << i;
      ASSERT_EQ(share_memory(*other, grid), expected) << i;
      ++(expected ? sharing : apart);
    }
  }
  EXPECT_GT(sharing, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(Overlap, NothingIsSharedWithNothing) {
  const MemoryArea some = area(4096, {2, 2, 2}, {64, 32, 16}, 16);
  EXPECT_TRUE(share_memory(some, some));
  EXPECT_FALSE(share_memory(some, area(0, {2, 2, 2}, {64, 32, 16}, 16)));
  EXPECT_FALSE(share_memory(some, area(4096, {0, 2, 2}, {64, 32, 16}, 16)));
}

TEST(Overlap, GradientsInOneTensorAreFine) {
  // dq, dk and dv are slices of (batch, tokens, 3, heads, channels).
  const int64_t head = 128, token = 3 * 4 * head, batch = 50 * token;
  std::vector<MemoryArea> areas;
  for (uint64_t i = 0; i < 3; ++i)
    areas.push_back(area(4096 + i * 4 * head, {2, 4, 50}, {batch, head, token}, head, true));
  check_shared_memory(areas);
  areas[1].address -= 16;
  EXPECT_THROW(check_shared_memory(areas), SpecError);
}

TEST(Overlap, IsAnErrorWhereOneIsWritten) {
  MemoryArea one = area(4096, {1, 1, 1}, {}, 64), other = area(4096 + 32, {1, 1, 1}, {}, 64);
  one.name = "q", other.name = "out";
  check_shared_memory(std::vector{one, other});
  other.written = true;
  try {
    check_shared_memory(std::vector{one, other});
    FAIL();
  } catch (const SpecError& error) {
    EXPECT_STREQ(error.what(), "q and out share memory, and the pass writes out: give it memory "
                               "of its own");
  }
}

} // namespace
