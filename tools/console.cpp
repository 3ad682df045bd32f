//===- console.cpp - Tables, progress and JSON on the terminal -------------===//
#include "tools/console.h"

#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/raw_ostream.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <sys/ioctl.h>
#include <unistd.h>

namespace sagebwd::tools {

std::string printable(std::string text, std::string_view but) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
    const bool c1 = i + 1 < text.size() && byte(i) == 0xc2 && byte(i + 1) < 0xa0; // in UTF-8
    const bool c0 = byte(i) < ' ' && but.find(text[i]) == std::string_view::npos;
    if (c0 || c1 || byte(i) == 0x7f)
      text[i] = '?';
    if (c1)
      text[++i] = '?';
  }
  return text;
}

void complain(const std::string& command, const std::string& what) {
  fprintf(stderr, "sagebwd%s: %s\n", (command.empty() ? "" : " " + command).c_str(),
          printable(what, "\n\t").c_str());
}

namespace {
std::string interrupted; ///< what the handler below prints; it changes only outside of it
}

void say_when_interrupted(const std::string& command, const std::string& more) {
  const auto say = [](int signal) {
    [[maybe_unused]] auto done = ::write(STDERR_FILENO, interrupted.data(), interrupted.size());
    std::signal(signal, SIG_DFL);
    ::raise(signal); // ends the process after this function returns
  };
  if (std::signal(SIGINT, SIG_IGN) == SIG_IGN)
    return;
  interrupted = "\nsagebwd " + command + ": interrupted" + more + "\n";
  std::signal(SIGINT, say);
}

Cell number(std::string key, std::string header, int digits, double value) {
  using llvm::json::Value;
  return {std::move(key), std::move(header), std::isfinite(value) ? Value(value) : Value(nullptr),
          format("%.*f", digits, value)};
}

void Table::add(std::initializer_list<Cell> row) {
  std::vector<std::string> headers, cells;
  llvm::json::Object object;
  for (const Cell& cell : row) {
    if (!cell.key.empty())
      object[cell.key] = cell.value;
    if (cell.header.empty())
      continue;
    std::string text = cell.text;
    if (const auto words = cell.value.getAsString(); words && text.empty())
      text = words->str();
    else if (const auto flag = cell.value.getAsBoolean(); flag && text.empty())
      text = *flag ? "yes" : "no";
    else if (text.empty())
      text = llvm::formatv("{0}", cell.value);
    headers.push_back(cell.header);
    cells.push_back(printable(std::move(text)));
  }
  if (rows_.empty())
    rows_.push_back(std::move(headers));
  rows_.push_back(std::move(cells));
  objects_.push_back(std::move(object));
}

llvm::json::Object Table::json_by(const char* key) const {
  llvm::json::Object named;
  for (const llvm::json::Value& row : objects_) {
    llvm::json::Object rest = *row.getAsObject();
    const std::string name = rest.getString(key)->str();
    rest.erase(key);
    named[name] = std::move(rest);
  }
  return named;
}

void Table::print() const {
  if (rows_.empty())
    return;
  const size_t columns = rows_.front().size();
  std::vector<size_t> widths(columns);
  std::vector<bool> numbers(columns, true);
  for (size_t r = 0; r < rows_.size(); ++r)
    for (size_t i = 0; i < columns; ++i) {
      const std::string& cell = rows_[r][i];
      widths[i] = std::max(widths[i], cell.size());
      if (r > 0 && cell.find_first_not_of("0123456789.-%") != std::string::npos)
        numbers[i] = false;
    }
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < columns; ++i) {
      std::string padding(widths[i] - row[i].size(), ' ');
      line += numbers[i] ? padding + row[i] : row[i] + padding;
      line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    puts(line.c_str());
  }
}

std::string bar(double share) {
  constexpr size_t kWidth = 30;
  const size_t filled = std::min(kWidth, static_cast<size_t>(share * kWidth + 0.5));
  return "[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "]";
}

Progress::Progress(std::string what, size_t total)
    : what_(std::move(what)), total_(total), terminal_(isatty(STDERR_FILENO)),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (!drawn_.empty())
    fputs("\r\033[K", stderr);
}

void Progress::advance(const std::string& done) {
  ++done_;
  if (!terminal_ || milliseconds_since(start_) < 1000)
    return;
  const double share = static_cast<double>(done_) / static_cast<double>(std::max(done_, total_));
  const double seconds = milliseconds_since(start_) / 1e3;
  const double rate = static_cast<double>(done_) / seconds;
  const double rest = static_cast<double>(total_ - std::min(done_, total_)) / rate;
  draw(format("%s %s %zu/%zu, %.3g/s, %.0f s left: %s", what_.c_str(), bar(share).c_str(), done_,
              total_, rate, rest, done.c_str()));
}

void Progress::tick() {
  if (const double ms = milliseconds_since(start_); terminal_ && ms >= 1000)
    draw(format("%s, %.0f s", what_.c_str(), std::floor(ms / 1e3)));
}

void Progress::draw(std::string line) {
  // A line that wraps could not be erased.
  winsize size = {};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
    line.resize(std::min<size_t>(line.size(), size.ws_col - 1));
  if (line == drawn_)
    return;
  drawn_ = std::move(line);
  fprintf(stderr, "\r\033[K%s", drawn_.c_str());
  fflush(stderr);
}

std::string wrapped(const std::string& text, size_t indent) {
  constexpr size_t kColumns = 80;
  std::string lines;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.size();
    if (end - begin > kColumns - indent) {
      end = text.rfind(' ', begin + kColumns - indent);
      if (end == std::string::npos || end <= begin)
        end = std::min(text.find(' ', begin), text.size()); // a word longer than the line
    }
    lines +=
        (lines.empty() ? "" : "\n" + std::string(indent, ' ')) + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return lines;
}

std::string counted(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(std::vsnprintf(nullptr, 0, pattern, arguments), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  std::chrono::duration<double, std::milli> span = std::chrono::steady_clock::now() - start;
  return span.count();
}

} // namespace sagebwd::tools
