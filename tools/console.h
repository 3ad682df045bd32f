//===- console.h - Tables, progress and JSON on the terminal ---------------===//
#pragma once

#include "llvm/Support/JSON.h"

#include <chrono>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::tools {

/// The text with '?' for control characters, so that no file or driver controls the terminal.
std::string printable(std::string text, std::string_view but = {});
/// Prints "sagebwd COMMAND: WHAT" to standard error; of control characters only newlines and tabs.
void complain(const std::string& command, const std::string& what);

/// From now on Ctrl-C prints "sagebwd COMMAND: interrupted", with `more`, and ends the process by
/// the signal, which shells show as exit code 130. Background jobs go on ignoring the signal.
void say_when_interrupted(const std::string& command, const std::string& more = {});

/// One value of a row.
struct Cell {
  std::string key;    ///< its key in JSON; "" means that only the table has it
  std::string header; ///< of its column; "" means that only JSON has it
  llvm::json::Value value;
  std::string text = {}; ///< for the table, if not the value itself
};

/// A number with so many digits in the table. NaN and infinities are null in JSON.
Cell number(std::string key, std::string header, int digits, double value);

/// Rows with the same cells, as text and as JSON.
class Table {
public:
  void add(std::initializer_list<Cell> row);
  /// Prints to standard output, with numbers right-aligned; prints nothing if there are no rows.
  void print() const;
  /// One object per row.
  llvm::json::Array json() const { return objects_; }
  /// The objects under their values of `key`, which the objects leave out.
  llvm::json::Object json_by(const char* key) const;

private:
  std::vector<std::vector<std::string>> rows_; ///< the headers first
  llvm::json::Array objects_;
};

/// "[####......]", full where the share is 1 or more.
std::string bar(double share);
/// A progress bar for work of more than a second, if standard error is a terminal.
class Progress {
public:
  explicit Progress(std::string what, size_t total = 0);
  ~Progress();
  void advance(const std::string& done);
  /// For work of unknown length, called several times a second: shows how long it has lasted.
  void tick();

private:
  void draw(std::string line);

  std::string what_;
  size_t total_, done_ = 0;
  bool terminal_;
  std::string drawn_; ///< what the line shows
  std::chrono::steady_clock::time_point start_;
};

/// The text in lines for 80 columns; all lines except the first are indented.
std::string wrapped(const std::string& text, size_t indent);
/// "1 kernel", "2 kernels".
std::string counted(uint64_t count, const std::string& noun);
/// Like printf, into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);
double milliseconds_since(std::chrono::steady_clock::time_point start);

} // namespace sagebwd::tools
