//===- found_sound.cpp - What compile tests need not compile again ------------===//

#include "tests/templates/found_sound.h"
#include "cache/key.h"
#include "cache/whole_file.h"
#include "generator/emit.h"
#include "runtime/nvrtc/nvrtc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <stdexcept>

namespace sagebwd::test {

namespace {

namespace fs = std::filesystem;

const std::string kRepository = SAGEBWD_SOURCE_DIR "/";

std::string running_test() {
  const auto& test = *testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test.test_suite_name()) + "." + test.name();
}

} // namespace

FoundSound::FoundSound()
    : FoundSound(running_test(), kRepository + "tests/templates/found_sound.txt") {
  compiles_all_ = std::getenv("SAGEBWD_COMPILE_REPORT") != nullptr;
}

FoundSound::FoundSound(std::string test, std::string file)
    : file_(std::move(file)), whose_(Nvrtc::instance().identity() + " | " + test + " | ") {
  for (const std::string& option : Nvrtc::options())
    add(option);
}

/// With its length before it, so that no two lists of texts run together alike.
void FoundSound::add(std::string_view text) {
  all_ += std::to_string(text.size()) + "\n";
  all_ += text;
}

void FoundSound::add(const KernelSource& source) {
  add(source.text);
  for (const std::string& option : source.options)
    add(option);
}

void FoundSound::add(const std::map<std::string, KernelSpec>& kernels) {
  for (const auto& [label, kernel] : kernels) {
    add(label);
    add(emit(kernel));
  }
}

void FoundSound::add_file(const std::string& path) {
  if (!fs::is_directory(kRepository + path))
    return add(read_input(kRepository + path));
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(kRepository + path))
    if (entry.is_regular_file())
      files.push_back(entry.path().lexically_relative(kRepository).string());
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    add(file);
    add_file(file);
  }
}

std::string FoundSound::line() const { return whose_ + sha256_hex(all_); }

bool FoundSound::is_listed() const {
  if (compiles_all_)
    return false;
  const std::string wanted = line();
  std::istringstream lines(read_input(file_));
  for (std::string line; std::getline(lines, line);)
    if (line == wanted)
      return true;
  return false;
}

void FoundSound::passed() const {
  if (!std::getenv("SAGEBWD_UPDATE_GOLDEN")) {
    std::cout << "to be listed in found_sound.txt by SAGEBWD_UPDATE_GOLDEN=1: " << line() << "\n";
    return;
  }
  std::istringstream before(read_input(file_));
  std::string text;
  for (std::string line; std::getline(before, line);)
    if (!line.starts_with(whose_))
      text += line + "\n";
  text += line() + "\n";
  if (const std::string why = write_output(file_, {&text}); !why.empty())
    throw std::runtime_error(why);
}

} // namespace sagebwd::test
