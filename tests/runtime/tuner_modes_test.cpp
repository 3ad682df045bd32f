//===- tuner_modes_test.cpp - Who tunes, and when ---------------------------===//
//
// SAGEBWD_TUNE's modes, processes at one time, ranks of a group.
//
//===----------------------------------------------------------------------===//

#include "tests/runtime/tune_fixture.h"

#include <algorithm>

using namespace sagebwd;
using namespace std::chrono_literals;
using test::ScopedVariable;

namespace {

TEST_F(Tune, ModesDecide) {
  traits_[kFast] = "ms=0.8";
  EXPECT_EQ(chosen(TuneMode::use), default_()); // nothing there yet
  EXPECT_EQ(chosen(TuneMode::off), default_());
  const std::string what = failure<TuneError>([&] { chosen(TuneMode::frozen); });
  for (const char* part : {"frozen", "forward of d128", "q8192 kv8192 full", "Some GPU",
                           "sagebwd tune --spec 'd128 ", "--import"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
  EXPECT_EQ(workers(), 0u);
  EXPECT_EQ(to_string(chosen(TuneMode::tune)), kFast);
  EXPECT_EQ(to_string(chosen(TuneMode::tune)), kFast);
  EXPECT_EQ(workers(), 1u);
  EXPECT_EQ(to_string(chosen(TuneMode::use)), kFast);
  EXPECT_EQ(to_string(chosen(TuneMode::frozen)), kFast);
  EXPECT_EQ(chosen(TuneMode::off), default_());
}

TEST_F(Tune, ARecordOfATileThatNoKernelHasIsReported) {
  Tuned made = tuned();
  made.record.tile = "mma 96x64 w6 s1 b1";
  store().publish_record(made.record);
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen(TuneMode::use), default_());
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find(made.record.key.digest), std::string::npos) << warning;
  EXPECT_NE(warning.find("the default tile is used"), std::string::npos);
  EXPECT_NE(failure<TuneError>([&] { chosen(TuneMode::frozen); }).find("cannot be used"),
            std::string::npos);
}

TEST_F(Tune, OfTwoProcessesOneTunesAndTheOtherReads) {
  traits_[kFast] = "ms=0.8";
  const auto work = [&] { return to_string(chosen(TuneMode::tune)) == kFast ? 0 : 1; };
  std::vector<pid_t> processes;
  for (int i = 0; i < 4; ++i)
    processes.push_back(start(work));
  for (pid_t process : processes)
    EXPECT_EQ(wait_for(process), 0);
  EXPECT_EQ(workers(), 1u);
}

TEST_F(Tune, OfAGroupRankZeroTunesAndTheOthersWait) {
  traits_[kFast] = "ms=0.8";
  const auto rank = [&](int number) {
    return [this, number] {
      rank_ = number;
      if (number == 0)
        std::this_thread::sleep_for(300ms); // the others are there first
      return to_string(chosen(TuneMode::tune)) == kFast ? 0 : 1;
    };
  };
  const pid_t one = start(rank(1)), two = start(rank(2)), zero = start(rank(0));
  EXPECT_EQ(wait_for(zero), 0);
  EXPECT_EQ(wait_for(one), 0);
  EXPECT_EQ(wait_for(two), 0);
  EXPECT_EQ(workers(), 1u);
}

TEST_F(Tune, ARankThatWaitsInVainTakesTheDefaultWithAWarning) {
  rank_ = 3;
  request_.wait_limit = 300ms;
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen(TuneMode::tune), default_());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("rank 0 left no record"),
            std::string::npos);
  EXPECT_EQ(workers(), 0u);
}

TEST_F(Tune, ARankThatCanSeeNoRecordDoesNotWait) {
  rank_ = 3;
  directory_ = "";
  testing::internal::CaptureStderr();
  EXPECT_EQ(chosen(TuneMode::tune), default_());
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("waiting"), std::string::npos);
}

TEST_F(Tune, WhatCannotBeTunedIsTriedOnceAndCostsNoStep) {
  request_.worker = {"/nonexistent/worker"};
  Records records(store());
  const auto call = [&] {
    return chosen_tile(TuneMode::tune, KernelKind::forward, request_, around(records));
  };
  testing::internal::CaptureStderr();
  EXPECT_EQ(call(), default_());
  EXPECT_EQ(call(), default_());
  const std::string text = testing::internal::GetCapturedStderr();
  const size_t first = text.find("is not tuned");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("is not tuned", first + 1), std::string::npos) << "it was tried again";
}

} // namespace
