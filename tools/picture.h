//===- picture.h - Bar charts for --plot -----------------------------------===//
#pragma once

#include "tools/options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

struct Bar {
  std::string label;
  double value;     ///< of none that is no number a bar is drawn
  std::string text; ///< beside the bar
  bool marked = false;
};
/// One below the other; the longest fills the width.
struct BarChart {
  std::string title;
  std::vector<Bar> bars;
};

/// --plot FILE: a picture as SVG, which browsers and word processors show.
class PlotOption {
public:
  void declare(OptionTable& options, const std::string& what);
  explicit operator bool() const { return !file_.empty(); }
  const std::string& file() const { return file_; }
  /// Nothing where it was not asked for. Raises std::runtime_error for what cannot be written.
  void write(const std::string& title, const std::vector<BarChart>& charts) const;
  /// A line of text: where it is written, if it is.
  void say() const;

private:
  std::string file_;
};

/// A page of charts.
std::string svg_of(const std::string& title, const std::vector<BarChart>& charts);

} // namespace sagebwd::tools
