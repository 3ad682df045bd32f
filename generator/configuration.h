//===- configuration.h - A template's constants, as CUDA source ------------===//
#pragma once

#include <string>
#include <string_view>

namespace sagebwd {

class Configuration {
public:
  void add(std::string_view name, int value) {
    line("constexpr int " + std::string(name) + " = " + std::to_string(value) + ";");
  }
  void add(std::string_view name, bool value) {
    line("constexpr bool " + std::string(name) + (value ? " = true;" : " = false;"));
  }
  void line(const std::string& text) { text_ += text + "\n"; }
  const std::string& text() const { return text_; }

private:
  std::string text_;
};

} // namespace sagebwd
