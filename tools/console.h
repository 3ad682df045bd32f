//===- console.h - Tables, progress and JSON on the terminal ---------------===//
#pragma once

#include "llvm/Support/JSON.h"

#include <chrono>
#include <string>
#include <vector>

namespace sagebwd::tools {

/// With '?' for control characters: what a file or a driver says must not steer the terminal.
std::string printable(std::string text);

/// Columns as wide as their widest cell; numbers are right-aligned.
class Table {
public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row);
  /// To standard output.
  void print() const;

private:
  std::vector<std::vector<std::string>> rows_;
};

/// A bar on standard error for work that takes over a second; nothing where that is no terminal.
class Progress {
public:
  Progress(std::string what, size_t total);
  ~Progress();
  void advance(const std::string& done);

private:
  std::string what_;
  size_t total_, done_ = 0;
  bool terminal_, drawn_ = false;
  std::chrono::steady_clock::time_point start_;
};

/// "1 kernel", "2 kernels".
std::string counted(uint64_t count, const std::string& noun);
/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);
double milliseconds_since(std::chrono::steady_clock::time_point start);

/// Indented, with a newline, to standard output.
void print_json(const llvm::json::Value&);
/// NaN and infinities, which JSON lacks, become null.
llvm::json::Value json_number(double);

} // namespace sagebwd::tools
