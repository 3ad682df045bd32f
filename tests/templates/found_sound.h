//===- found_sound.h - Sets of kernels that compile tests need not compile again ===//
#pragma once

#include "generator/kernel.h"

#include <map>
#include <string>
#include <string_view>

namespace sagebwd::test {

/// Whether found_sound.txt lists these kernels of an architecture: the same text and options,
/// compiled by the same build of NVRTC, with the same known spills, passed before. To compile them
/// takes minutes. Whatever changes a kernel's text makes it another set, which is compiled. A test
/// that asks more of a compilation than before has to empty the file.
class FoundSound {
public:
  /// By the repository's file, or another.
  FoundSound(const std::map<std::string, KernelSpec>&, std::string_view arch,
             std::string file = kFile);

  bool is_listed() const;
  /// For one that passed: lists it where SAGEBWD_UPDATE_GOLDEN is set, in place of what the file
  /// has for this build of NVRTC and this architecture; else says how. Not for several processes at
  /// a time.
  void passed() const;

private:
  static constexpr const char* kFile = SAGEBWD_SOURCE_DIR "/tests/templates/found_sound.txt";
  std::string file_;
  std::string whose_; ///< NVRTC and architecture
  std::string line_;
};

} // namespace sagebwd::test
