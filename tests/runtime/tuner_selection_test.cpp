//===- tuner_selection_test.cpp - Buckets, modes, and who wins -------------===//

#include "runtime/tuner/bucket.h"
#include "runtime/tuner/selection.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

std::string bucket(KernelKind kind, Problem problem, int sm_count = 132) {
  return to_string(bucket_of(kind, problem, sm_count));
}

TEST(Bucket, LengthsAreRoundedUpToPowersOfTwo) {
  const auto of = [](int64_t seq_q, int64_t seq_kv) {
    return bucket(KernelKind::forward, {1, 1, 1, seq_q, seq_kv});
  };
  EXPECT_EQ(of(1, 512), "q512 kv512 partial");
  EXPECT_EQ(of(513, 1024), "q1024 kv1024 partial");
  EXPECT_EQ(of(1025, 4097), "q2048 kv8192 partial");
  EXPECT_EQ(of(65536, 65537), "q65536 kv65536 full");
  EXPECT_EQ(of((int64_t{1} << 31) - 1024, 1), "q65536 kv512 full");
}

TEST(Bucket, IsFullFromTwoBlocksAnSm) {
  using enum KernelKind;
  EXPECT_EQ(bucket(forward, {1, 33, 33, 1024, 1024}), "q1024 kv1024 full"); // 264 blocks
  EXPECT_EQ(bucket(forward, {1, 32, 32, 1024, 1024}), "q1024 kv1024 partial");
  EXPECT_EQ(bucket(forward, {3, 11, 1, 1000, 600}), "q1024 kv1024 full");
  EXPECT_EQ(bucket(backward_dq, {1, 33, 11, 1024, 1024}), "q1024 kv1024 full");
  // dK and dV have a block for each tile of keys of a key/value head.
  EXPECT_EQ(bucket(backward_dkv, {1, 33, 11, 1024, 1024}), "q1024 kv1024 partial");
  EXPECT_EQ(bucket(backward_dkv, {1, 33, 33, 128, 1024}), "q512 kv1024 full");
  EXPECT_EQ(bucket(forward, {65535, 65535, 1, 1 << 30, 1}), "q65536 kv512 full"); // no overflow
}

TEST(Median, IsTheMiddleAndItsDeviationIgnoresAnOutlier) {
  EXPECT_EQ(median_of({}), 0);
  EXPECT_EQ(median_of({3, 1, 2}), 2);
  EXPECT_EQ(median_of({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(mad_of({1, 2, 3, 4, 100}), 1);
  EXPECT_EQ(mad_of({5, 5, 5}), 0);
}

size_t winner(std::vector<std::optional<Timing>> timings) { return winner_of(timings); }

TEST(Winner, IsTheDefaultUnlessAnotherIsFasterBeyondDoubt) {
  EXPECT_EQ(winner({Timing{1, 0}}), 0u);
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.985, 0}}), 0u); // 2 %
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.975, 0}}), 1u);
  EXPECT_EQ(winner({Timing{1, 0.02}, Timing{0.95, 0}}), 0u); // 3 MADs of the default
  EXPECT_EQ(winner({Timing{1, 0.01}, Timing{0.95, 0}}), 1u);
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.9, 0.05}}), 0u); // or of the challenger
  EXPECT_EQ(winner({Timing{1, 0}, Timing{2, 0}, Timing{1.5, 0}}), 0u);
}

TEST(Winner, AmongEqualsTheEarliest) {
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.81, 0}, Timing{0.8, 0}}), 1u);
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.83, 0}, Timing{0.8, 0}}), 2u);
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.83, 0.012}, Timing{0.8, 0}}), 1u);
  EXPECT_EQ(winner({Timing{1, 0}, Timing{0.99, 0}, Timing{0.8, 0}, Timing{0.79, 0}}), 2u);
}

TEST(Winner, WhatDroppedOutIsPassedOver) {
  EXPECT_EQ(winner({Timing{1, 0}, std::nullopt, Timing{0.5, 0}}), 2u);
  EXPECT_EQ(winner({Timing{1, 0}, std::nullopt, std::nullopt}), 0u);
  EXPECT_THROW(winner({std::nullopt, Timing{1, 0}}), std::bad_optional_access);
}

} // namespace
