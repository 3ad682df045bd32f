//===- nvrtc_fixture.h - Tests that compile kernels -------------------------===//
#pragma once

#include "generator/kernel.h"
#include "runtime/nvrtc/nvrtc.h"

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

inline Compilation compile(const KernelSpec& kernel, bool want_ptx) {
  const KernelSource source = emit(kernel);
  return Nvrtc::instance().compile(source.name, source.text, kernel.arch.name, want_ptx,
                                   source.options);
}

} // namespace sagebwd::test
