//===- device.h - Tests on GPU 0 -------------------------------------------===//
#pragma once

#include "runtime/on_gpu.h"

#include <gtest/gtest.h>

namespace sagebwd::test {

/// Skips by name where there is no GPU; else GPU 0's context is current.
class OnGpu : public testing::Test {
protected:
  void SetUp() override {
    if (const std::string& why = driver::unavailable(); !why.empty())
      GTEST_SKIP() << "no GPU: " << why;
    scope_.emplace(0);
  }

private:
  std::optional<driver::DeviceScope> scope_;
};

} // namespace sagebwd::test
