//===- picture.cpp - Bar charts for --plot ---------------------------------===//
#include "tools/picture.h"

#include "cache/whole_file.h"
#include "tools/console.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace sagebwd::tools {

namespace {

constexpr int kWidth = 900, kMargin = 20, kLine = 22, kLabels = 230, kTexts = 120;
constexpr size_t kTitle = 95; ///< characters in a line

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text)
    switch (c) {
    case '&':
      safe += "&amp;";
      break;
    case '<':
      safe += "&lt;";
      break;
    case '>':
      safe += "&gt;";
      break;
    default:
      safe += c;
    }
  return safe;
}

std::string text_at(int x, int y, const std::string& text, const char* more = "") {
  return format("<text x=\"%d\" y=\"%d\" %s>", x, y, more) + escaped(printable(text)) + "</text>\n";
}

} // namespace

std::string svg_of(const std::string& title, const std::vector<BarChart>& charts) {
  std::string body;
  int y = kMargin + kLine / 2;
  for (std::string rest = title; !rest.empty(); y += rest.empty() ? 0 : kLine) {
    size_t end = rest.size() <= kTitle ? rest.size() : rest.rfind(' ', kTitle);
    end = end == std::string::npos ? rest.size() : end;
    body += text_at(kMargin, y, rest.substr(0, end), "class=\"title\"");
    rest.erase(0, std::min(end + 1, rest.size()));
  }
  for (const BarChart& chart : charts) {
    y += 2 * kLine;
    body += text_at(kMargin, y, chart.title, "class=\"chart\"");
    double longest = 0;
    for (const Bar& bar : chart.bars)
      if (std::isfinite(bar.value))
        longest = std::max(longest, bar.value);
    for (const Bar& bar : chart.bars) {
      y += kLine;
      constexpr int kLeft = kMargin + kLabels;
      constexpr double kMost = kWidth - kLeft - kTexts - kMargin;
      const double length =
          std::isfinite(bar.value) && longest > 0 ? kMost * std::max(0.0, bar.value) / longest : 0;
      body += text_at(kLeft - 10, y, bar.label, "text-anchor=\"end\"");
      body += format("<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"/>\n", kLeft,
                     y - kLine * 2 / 3, length, kLine - 6, bar.marked ? "marked" : "bar");
      body += text_at(kLeft + static_cast<int>(length) + 8, y, bar.text);
    }
  }
  const int height = y + kMargin;
  return format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
                "height=\"%d\">\n",
                kWidth, height, kWidth, height) +
         "<style>text{font:13px sans-serif;fill:#222}.title{font-size:15px}"
         ".chart{font-weight:bold}.bar{fill:#8aa4c0}.marked{fill:#2b5c94}</style>\n"
         "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n" +
         body + "</svg>\n";
}

void PlotOption::declare(OptionTable& options, const std::string& what) {
  options.word(
      "plot", "FILE",
      [this](const std::string& given) {
        if (given.size() < 5 || !given.ends_with(".svg"))
          throw UsageError("--plot is '" + given +
                           "'; it writes SVG, into a file whose name ends in .svg");
        file_ = given;
      },
      "draw " + what + " into an .svg file");
}

void PlotOption::write(const std::string& title, const std::vector<BarChart>& charts) const {
  if (file_.empty())
    return;
  const std::string text = svg_of(title, charts);
  if (const std::string why = write_output(file_, {&text}); !why.empty())
    throw std::runtime_error(why);
}

void PlotOption::say() const {
  if (!file_.empty())
    printf("written to %s\n", file_.c_str());
}

} // namespace sagebwd::tools
