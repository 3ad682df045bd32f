//===- nvrtc_fixture.h - Tests that compile kernels -------------------------===//
#pragma once

#include "runtime/nvrtc/nvrtc.h"
#include "tests/templates/remembered.h"

#include <gtest/gtest.h>

namespace sagebwd::test {

/// Skips by name where there is no NVRTC.
class WithNvrtc : public testing::Test {
protected:
  void SetUp() override {
    try {
      Nvrtc::instance();
    } catch (const LibraryError& error) {
      GTEST_SKIP() << "kernels are not compiled here, for want of NVRTC: " << error.what();
    }
  }
};

} // namespace sagebwd::test
