//===- tuner_protocol_test.cpp - What tuner and worker say -----------------===//

#include "runtime/tuner/worker/protocol.h"

#include <gtest/gtest.h>

#include <cmath>

#include <random>

using namespace sagebwd;
using namespace sagebwd::tuner;

namespace {

BenchKernel kernel() {
  BenchKernel k{};
  k.spec.kind = KernelKind::backward_dkv;
  k.spec.pass = Pass::backward;
  k.spec.attention = resolved({64, DType::fp16, Causal::bottom_right, Granularity::block,
                               Precision::qk16, false, true, false});
  k.spec.arch = find_arch("sm_90a");
  k.spec.tile = parse_tile("wgmma 64x64 w4 s1 b2");
  k.name = "sagebwd_kernel";
  k.cubin_at = size_t{1} << 33;
  k.cubin_bytes = 70000;
  k.threads = 128;
  k.shared_bytes = 99000;
  return k;
}

Order open_order() {
  Order order;
  order.kind = Order::open;
  order.setup.device = 3;
  order.setup.gpu = "GPU-1";
  order.setup.spec = resolved(kernel().spec.attention);
  order.setup.problem = {2, 8, 4, 1000, int64_t{1} << 33};
  order.setup.kind = KernelKind::backward_dq;
  order.setup.operation = {kernel(), kernel()};
  order.setup.exact = false;
  order.kernels = {kernel(), kernel(), kernel()};
  return order;
}

void expect_equal(const BenchKernel& a, const BenchKernel& b) {
  EXPECT_EQ(a.spec, b.spec);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.cubin_at, b.cubin_at);
  EXPECT_EQ(a.cubin_bytes, b.cubin_bytes);
  EXPECT_EQ(a.threads, b.threads);
  EXPECT_EQ(a.shared_bytes, b.shared_bytes);
}

TEST(Protocol, OrdersAreReadBack) {
  const std::string line = line_of(open_order());
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const std::optional<Order> open = parse_order(line);
  ASSERT_TRUE(open);
  EXPECT_EQ(open->kind, Order::open);
  EXPECT_EQ(open->setup.device, 3);
  EXPECT_EQ(open->setup.gpu, "GPU-1");
  EXPECT_EQ(*open->setup.spec, kernel().spec.attention);
  EXPECT_EQ(open->setup.problem.seq_kv, int64_t{1} << 33);
  EXPECT_EQ(open->setup.problem.heads_kv, 4);
  EXPECT_EQ(open->setup.kind, KernelKind::backward_dq);
  EXPECT_FALSE(open->setup.exact);
  ASSERT_EQ(open->setup.operation.size(), 2u);
  expect_equal(open->setup.operation[1], kernel());
  ASSERT_EQ(open->kernels.size(), 3u);
  expect_equal(open->kernels[2], kernel());

  Order time;
  time.kind = Order::time;
  time.candidates = {0, 4, 2};
  time.rounds = 15;
  const std::optional<Order> timed = parse_order(line_of(time));
  ASSERT_TRUE(timed);
  EXPECT_EQ(timed->candidates, time.candidates);
  EXPECT_EQ(timed->rounds, 15);
}

TEST(Protocol, ReportsAreReadBack) {
  Report report;
  report.kind = Report::vetted;
  report.candidate = 4;
  report.vetting = {"dq differs\nby \xff much", false, 0.125, 1.5};
  const std::optional<Report> vetted = parse_report(line_of(report));
  ASSERT_TRUE(vetted);
  EXPECT_EQ(vetted->candidate, 4);
  EXPECT_EQ(vetted->vetting.wrong.substr(0, 14), "dq differs\nby ");
  EXPECT_FALSE(vetted->vetting.identical);
  EXPECT_EQ(vetted->vetting.rel_l2, 0.125);
  EXPECT_EQ(vetted->vetting.ms, 1.5);
  report.vetting.rel_l2 = INFINITY; // where an output is not finite
  const std::optional<Report> infinite = parse_report(line_of(report));
  ASSERT_TRUE(infinite);
  EXPECT_GT(infinite->vetting.rel_l2, 1e300);
  report.kind = Report::failed;
  report.detail = "cuLaunchKernelEx failed";
  EXPECT_EQ(parse_report(line_of(report))->detail, report.detail);
}

TEST(Protocol, WhatNoneOfOursSaysIsRefused) {
  for (const char* text :
       {"", "{", "null", "[]", "{}", "{\"report\":1}", "{\"report\":\"hi\"}",
        "{\"report\":\"timed\",\"candidate\":1}", "{\"report\":\"timed\",\"ms\":1}",
        "{\"report\":\"timed\",\"candidate\":\"1\",\"ms\":1}",
        "{\"report\":\"vetted\",\"candidate\":1,\"wrong\":\"\",\"rel_l2\":null}", "hello\n"}) {
    EXPECT_FALSE(parse_report(text)) << text;
    EXPECT_FALSE(parse_order(text)) << text;
  }
  EXPECT_FALSE(parse_report(std::string(1000000, '[')));
  EXPECT_FALSE(parse_order("{\"order\":\"open\",\"setup\":{}}"));
}

TEST(Protocol, MutatedLinesAreRefusedOrReadButNeverWorse) {
  const std::string orders[] = {line_of(open_order())};
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    std::string line = orders[0];
    line[random() % line.size()] ^= static_cast<char>(1 << random() % 8);
    if (i % 3 == 0)
      line.resize(random() % line.size());
    parse_order(line);
    parse_report(line);
  }
}

} // namespace
