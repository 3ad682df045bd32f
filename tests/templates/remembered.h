//===- remembered.h - Kernels that an earlier run of the tests compiled -----===//
#pragma once

#include "generator/kernel.h"

#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::test {

/// Tests ask this of a compilation.
struct Compiled {
  std::string log;
  std::string ptx; ///< where asked for
  int registers = 0;
  int spill_bytes = 0;
};

/// Compiles as Nvrtc::compile() does. A kernel that was compiled before from the same text, with
/// the same options, by the same build of NVRTC is read from SAGEBWD_TEST_KERNELS, a folder;
/// build/test-kernels where that is unset, none where it is empty. Errors are not remembered.
Compiled compile(std::string_view name, std::string_view source, std::string_view arch,
                 bool want_ptx, const std::vector<std::string>& options);
Compiled compile(const KernelSpec&, bool want_ptx);

} // namespace sagebwd::test
