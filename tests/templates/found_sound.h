//===- found_sound.h - Sets of kernels that compile tests need not compile again ===//
#pragma once

#include "generator/kernel.h"

#include <map>
#include <string>
#include <string_view>

namespace sagebwd::test {

/// Whether found_sound.txt lists these kernels of an architecture: the same text and options,
/// compiled by the same build of NVRTC, with the same known spills, passed before. To compile them
/// takes minutes. Whatever changes a kernel's text makes it another set, which is compiled.
class FoundSound {
public:
  FoundSound(const std::map<std::string, KernelSpec>&, std::string_view arch);

  bool is_listed() const;
  /// For one that passed: lists it where SAGEBWD_UPDATE_GOLDEN is set, in place of what the file
  /// has for this build of NVRTC and this architecture; else says how. Not for several processes at
  /// a time.
  void passed() const;

private:
  std::string whose_; ///< NVRTC and architecture
  std::string line_;
};

} // namespace sagebwd::test
