//===- found_sound.cpp - Sets of kernels that compile tests need not compile again ===//

#include "tests/templates/found_sound.h"
#include "cache/key.h"
#include "cache/whole_file.h"
#include "runtime/nvrtc/nvrtc.h"

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>

namespace sagebwd::test {

namespace {

/// With its length before it, so that no two lists of texts run together alike.
void add(std::string& all, std::string_view text) {
  all += std::to_string(text.size()) + "\n";
  all += text;
}

} // namespace

FoundSound::FoundSound(const std::map<std::string, KernelSpec>& kernels, std::string_view arch,
                       std::string file)
    : file_(std::move(file)),
      whose_(Nvrtc::instance().identity() + " | " + std::string(arch) + " | ") {
  std::string all;
  for (const std::string& option : Nvrtc::options())
    add(all, option);
  add(all, read_input(SAGEBWD_SOURCE_DIR "/tests/templates/known_spills.txt"));
  for (const auto& [label, kernel] : kernels) {
    const KernelSource source = emit(kernel);
    add(all, label);
    add(all, source.text);
    for (const std::string& option : source.options)
      add(all, option);
  }
  line_ = whose_ + sha256_hex(all);
}

bool FoundSound::is_listed() const {
  std::istringstream lines(read_input(file_));
  for (std::string line; std::getline(lines, line);)
    if (line == line_)
      return true;
  return false;
}

void FoundSound::passed() const {
  if (!std::getenv("SAGEBWD_UPDATE_GOLDEN")) {
    std::cout << "to be listed in found_sound.txt by SAGEBWD_UPDATE_GOLDEN=1: " << line_ << "\n";
    return;
  }
  std::istringstream before(read_input(file_));
  std::string text;
  for (std::string line; std::getline(before, line);)
    if (!line.starts_with(whose_))
      text += line + "\n";
  text += line_ + "\n";
  if (const std::string why = write_output(file_, {&text}); !why.empty())
    throw std::runtime_error(why);
}

} // namespace sagebwd::test
