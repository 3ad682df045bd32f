//===- console.h - Tables, progress and JSON on the terminal ---------------===//
#pragma once

#include "llvm/Support/JSON.h"

#include <chrono>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::tools {

/// With '?' for control characters: what a file or a driver says must not steer the terminal.
std::string printable(std::string text, std::string_view but = {});
/// "sagebwd COMMAND: WHAT" to standard error, printable but for lines and tabs.
void complain(const std::string& command, const std::string& what);

/// One value of a row.
struct Cell {
  std::string key;    ///< in JSON; "": it is only in the table
  std::string header; ///< of its column; "": it is only in JSON
  llvm::json::Value value;
  std::string text = {}; ///< in the table, where that is not the value as it is
};

/// With so many digits in the table. In JSON, which lacks them, NaN and infinities are null.
Cell number(std::string key, std::string header, int digits, double value);

/// Rows of the same cells, for people and as JSON.
class Table {
public:
  void add(std::initializer_list<Cell> row);
  /// To standard output: columns as wide as their widest cell, numbers right-aligned. Without rows
  /// nothing.
  void print() const;
  /// An object a row.
  llvm::json::Array json() const { return objects_; }
  /// The objects by their value of `key`, which they leave out.
  llvm::json::Object json_by(const char* key) const;

private:
  std::vector<std::vector<std::string>> rows_; ///< the headers first
  llvm::json::Array objects_;
};

/// "[####......]", full where the share is 1 or more.
std::string bar(double share);
/// One on standard error for work that takes over a second; nothing where that is no terminal.
class Progress {
public:
  explicit Progress(std::string what, size_t total = 0);
  ~Progress();
  void advance(const std::string& done);
  /// For work that does not say how far it is, several times a second: how long it has lasted.
  void tick();

private:
  void draw(std::string line);

  std::string what_;
  size_t total_, done_ = 0;
  bool terminal_;
  std::string drawn_; ///< what stands there
  std::chrono::steady_clock::time_point start_;
};

/// Text in lines that a terminal of 80 columns holds, all but the first behind `indent` spaces.
std::string wrapped(const std::string& text, size_t indent);
/// "1 kernel", "2 kernels".
std::string counted(uint64_t count, const std::string& noun);
/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);
double milliseconds_since(std::chrono::steady_clock::time_point start);

} // namespace sagebwd::tools
