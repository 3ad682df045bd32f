//===- ptxas_report.cpp - Read the report of ptxas about a kernel ---------===//
//
// This file parses logs such as:
//   ptxas info    : Compiling entry function 'k' for 'sm_80'
//   ptxas info    : Function properties for k
//   ptxas         .     40 bytes stack frame, 44 bytes spill stores, 44 bytes spill loads
//   ptxas info    : Used 32 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]
//   ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are ...
//   ptxas info    : Compile time = 15.613 ms
//
//===----------------------------------------------------------------------===//

#include "runtime/nvrtc/ptxas_report.h"
#include "runtime/nvrtc/nvrtc.h"

#include <algorithm>
#include <sstream>

namespace sagebwd {

namespace {

bool contains(const std::string& line, const char* text) {
  return line.find(text) != std::string::npos;
}

/// The number directly before `unit`, or nothing.
std::optional<int> number_before(const std::string& line, const std::string& unit) {
  size_t end = line.find(" " + unit);
  if (end == std::string::npos)
    return std::nullopt;
  size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9')
    --begin;
  if (begin == end)
    return std::nullopt;
  return std::stoi(line.substr(begin, end - begin));
}

int spill_bytes(const std::string& line) {
  return number_before(line, "bytes spill stores").value_or(0) +
         number_before(line, "bytes spill loads").value_or(0);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    lines.push_back(line);
  return lines;
}

/// Whether a line is an advisory. C7519 is not one: it only says for which number of registers a
/// kernel with setmaxnreg is compiled.
bool is_advisory(const std::string& line) {
  return contains(line, "(C75") && !contains(line, "(C7519)");
}

bool is_routine(const std::string& line) {
  if (line.rfind("ptxas", 0) != 0 || contains(line, "warning") || contains(line, "(C"))
    return false;
  return contains(line, "bytes gmem") || contains(line, "Compiling entry function") ||
         contains(line, "Function properties for") || contains(line, "bytes stack frame") ||
         contains(line, "Used ") || contains(line, "Compile time =");
}

} // namespace

std::optional<nvrtc::PtxasReport> nvrtc::parse_ptxas_report(const std::string& log) {
  PtxasReport report;
  bool found = false;
  for (const std::string& line : lines_of(log)) {
    report.spill_bytes += spill_bytes(line);
    if (auto registers = number_before(line, "registers"); registers && contains(line, "Used ")) {
      found = true;
      report.registers = std::max(report.registers, *registers);
      report.static_shared_bytes =
          std::max(report.static_shared_bytes, number_before(line, "bytes smem").value_or(0));
    }
  }
  return found ? std::optional(report) : std::nullopt;
}

std::vector<std::string> compile_warnings(const std::string& log) {
  std::vector<std::string> warnings;
  for (const std::string& line : lines_of(log))
    if (spill_bytes(line) > 0 || is_advisory(line) ||
        (line.rfind("ptxas", 0) == 0 && contains(line, "warning")))
      warnings.push_back(line);
  return warnings;
}

std::string without_report(const std::string& log) {
  std::string rest;
  for (const std::string& line : lines_of(log))
    if (!is_routine(line))
      rest += line + "\n";
  return rest;
}

} // namespace sagebwd
