//===- order_lists_test.cpp - Lists of queries, and their order ------------===//
#include "generator/operation.h"
#include "templates/layouts/copies.cuh"
#include "tests/gpu/launched.h"
#include "tests/gpu/listed.h"

#include <cmath>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Words = std::vector<uint32_t>;

/// The two kernels write these.
struct Written {
  Words bits, lengths, order;
};

class OrderLists : public OnGpu {
protected:
  const ResolvedSpec spec = resolved({.head_dim = 64, .sparse_q = 64, .sparse_kv = 128});

  Written written(const reference::Inputs& in) const {
    const driver::DeviceInfo info = driver::device_info(0);
    const Problem& p = in.problem;
    const Words rows = packed_lists(*spec, in);
    Buffer row_bits(rows.size() * 4), workspace(workspace_bytes(Pass::backward, spec, p));
    row_bits.upload(rows);
    OperandValues values{};
    place_workspace(Pass::backward, spec, p, workspace.pointer(), values);
    const uint64_t of_head = lists_of(*spec, p) * list_words(*spec, p);
    set(values, Operand::row_bits, row_bits.pointer());
    set(values, Operand::row_stride_h, of_head);
    set(values, Operand::row_stride_b, of_head * p.heads);
    std::vector<KernelSpec> kernels =
        Operation(spec, arch_for_capability(info.major, info.minor)).kernels(Pass::backward);
    std::erase_if(kernels, [](const KernelSpec& k) {
      return k.kind != KernelKind::transpose_bits && k.kind != KernelKind::order_lists;
    });
    launch_alone(kernels, p, values, workspace);
    const Words all = workspace.download<uint32_t>();
    const auto at = [&](Operand operand, int64_t count) {
      const auto begin = all.begin() + (get(values, operand) - workspace.pointer()) / 4;
      return Words(begin, begin + count);
    };
    const int64_t blocks = p.batch * blocks_of(*spec, p);
    return {at(Operand::column_bits, blocks * p.heads * column_words(*spec, p)),
            at(Operand::list_lengths, blocks * p.heads_kv),
            at(Operand::key_order, blocks * p.heads_kv * KEY_ORDER_WORDS)};
  }

  /// From the mask, block by block.
  void expect(const reference::Inputs& in) const {
    const Problem& p = in.problem;
    const Written got = written(in);
    const int64_t blocks = blocks_of(*spec, p), rows = lists_of(*spec, p);
    const int64_t columns = column_words(*spec, p), group = p.heads / p.heads_kv;
    Words lengths(p.batch * p.heads_kv * blocks), bits(got.bits.size());
    double all = 0;
    for (int64_t head = 0; head < p.batch * p.heads; ++head)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t block = 0; block < blocks; ++block)
          if (in.listed[(head * rows + row) * blocks + block]) {
            ++lengths[head / group * blocks + block], ++all;
            bits[(head * blocks + block) * columns + row / 32] |= 1u << row % 32;
          }
    EXPECT_EQ(got.bits, bits);
    EXPECT_EQ(got.lengths, lengths);
    const double mean = std::floor(all / lengths.size()) + 1;
    const auto level = [&](size_t list) {
      int halvings = 0;
      for (double length = lengths[list]; length >= 2 * mean && halvings < 7; length /= 2)
        ++halvings;
      return halvings;
    };
    std::vector<size_t> order(lengths.size());
    for (size_t i = 0; i < order.size(); ++i)
      order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return level(a) > level(b); });
    for (size_t place = 0; place < order.size(); ++place) {
      const int64_t list = order[place], head = list / blocks;
      const uint32_t* words = &got.order[place * KEY_ORDER_WORDS];
      ASSERT_EQ(Words(words, words + 3),
                (Words{uint32_t(list % blocks), uint32_t(head % p.heads_kv),
                       uint32_t(head / p.heads_kv)}))
          << "place " << place;
    }
  }

  /// One of eleven blocks is always listed, one by a quarter of the lists, the others hardly ever.
  reference::Inputs unequal(const Problem& p) const {
    reference::Inputs in;
    in.problem = p;
    const int64_t blocks = blocks_of(*spec, p);
    in.listed.resize(p.batch * p.heads * lists_of(*spec, p) * blocks);
    std::mt19937 draw(17);
    for (size_t i = 0; i < in.listed.size(); ++i) {
      const size_t kind = i % blocks % 11;
      in.listed[i] = draw() % (kind == 3 ? 1 : kind == 7 ? 4 : 128) == 0;
    }
    return in;
  }
};

TEST_F(OrderLists, LongOnesComeFirst) {
  for (const Problem& p : {Problem{2, 4, 2, 700, 1100}, {1, 1, 1, 1, 1}, {1, 6, 3, 2100, 4200}}) {
    SCOPED_TRACE("M = " + std::to_string(p.seq_q));
    expect(unequal(p));
  }
}

/// More lists than threads, not as many for each.
TEST_F(OrderLists, OfManyHeads) { expect(unequal({3, 26, 13, 1000, 128 * 31 - 3})); }

TEST_F(OrderLists, OfOneLength) {
  for (bool listed : {false, true}) {
    reference::Inputs in = unequal({2, 4, 2, 700, 1100});
    std::fill(in.listed.begin(), in.listed.end(), listed);
    expect(in);
  }
}

} // namespace
