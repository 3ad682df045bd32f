//===- picture.h - Bar charts for --plot -----------------------------------===//
//
// SVG is written by hand, because the command line needs neither Python nor a library for it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tools/options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

struct Bar {
  std::string label;
  double value;     ///< no bar is drawn for NaN
  std::string text; ///< next to the bar
  bool marked = false;
};
/// Bars below each other; the longest fills the width.
struct BarChart {
  std::string title;
  std::vector<Bar> bars;
};

/// The option --plot FILE: a picture as SVG.
class PlotOption {
public:
  void declare(OptionTable& options, const std::string& what);
  explicit operator bool() const { return !file_.empty(); }
  const std::string& file() const { return file_; }
  /// Writes the picture if --plot was given. Raises std::runtime_error if it cannot be written.
  void write(const std::string& title, const std::vector<BarChart>& charts) const;
  /// A line of text: where it is written, if it is.
  void say() const;

private:
  std::string file_;
};

/// A page of charts.
std::string svg_of(const std::string& title, const std::vector<BarChart>& charts);

} // namespace sagebwd::tools
