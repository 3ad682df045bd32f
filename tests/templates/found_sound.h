//===- found_sound.h - What compile tests need not compile again --------------===//
#pragma once

#include "generator/emit.h"
#include "generator/kernel.h"

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::test {

/// Whether found_sound.txt lists that the running test passed before with the same texts and
/// options, compiled by the same build of NVRTC. To compile them takes minutes. A line is of one
/// test, by its whole name, so that what one test found sound is not taken for sound by another.
/// Whatever changes a text, an option or what else a test adds makes it another set, which is
/// compiled. A test that asks more of a compilation than before adds its own file, or its lines are
/// to be removed.
class FoundSound {
public:
  /// Asks for the running test in the repository's file, or for another test in another file.
  FoundSound();
  FoundSound(std::string test, std::string file);

  /// Adds what is compiled, and what is expected of it.
  void add(std::string_view text);
  void add(const KernelSource&);
  /// Adds every kernel, after its label.
  void add(const std::map<std::string, KernelSpec>&);
  /// Adds what a file says, or all files of a folder say, by its path in the repository.
  void add_file(const std::string& path);

  bool is_listed() const;
  /// For one that passed: lists it where SAGEBWD_UPDATE_GOLDEN is set, in place of what the file
  /// has for this test and this build of NVRTC; else says how. Not for several processes at a time.
  void passed() const;

private:
  std::string line() const;

  std::string file_;
  std::string whose_; ///< NVRTC and test
  std::string all_;
  bool compiles_all_ = false; ///< for ./run nvrtc, which asks about every kernel
};

} // namespace sagebwd::test
