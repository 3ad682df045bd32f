//===- gpu_names.cpp - Architectures of GPUs by name ------------------------===//

#include "generator/gpu_names.h"

#include "generator/spec.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace sagebwd {
namespace {

struct GpuName {
  std::string_view name; ///< capitals and digits; '#' is any digit
  std::string_view arch;
};
constexpr GpuName kGpuNames[] = {
    {"A100", "sm_80"},     {"A800", "sm_80"},      {"A30", "sm_80"},        {"A10", "sm_86"},
    {"A16", "sm_86"},      {"A2", "sm_86"},        {"A40", "sm_86"},        {"RTX30##", "sm_86"},
    {"RTXA####", "sm_86"}, {"ORIN", "sm_87"},      {"AGXORIN", "sm_87"},    {"ORINNX", "sm_87"},
    {"L4", "sm_89"},       {"L40", "sm_89"},       {"L20", "sm_89"},        {"RTX40##", "sm_89"},
    {"H100", "sm_90a"},    {"H200", "sm_90a"},     {"H800", "sm_90a"},      {"H20", "sm_90a"},
    {"GH200", "sm_90a"},   {"B200", "sm_100"},     {"GB200", "sm_100"},     {"B300", "sm_103"},
    {"GB300", "sm_103"},   {"THOR", "sm_110"},     {"AGXTHOR", "sm_110"},   {"RTX50##", "sm_120"},
    {"GB10", "sm_121"},    {"DGXSPARK", "sm_121"}, {"RTXPRO####", "sm_120"}};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool fits(std::string_view given, std::string_view name) {
  return std::equal(name.begin(), name.end(), given.begin(), given.end(), [](char of_name, char c) {
    return of_name == '#' ? is_digit(c) : of_name == c;
  });
}

} // namespace

std::string_view arch_meant_by(std::string_view name) {
  std::string words, letters, digits; // of the name; `words` has '-' for every other sign
  for (char c : name) {
    const bool small = c >= 'a' && c <= 'z';
    const char capital = small ? static_cast<char>(c - 'a' + 'A') : c;
    if (is_digit(c))
      digits += c;
    else if (capital >= 'A' && capital <= 'Z')
      letters += capital;
    words += is_digit(c) || (capital >= 'A' && capital <= 'Z') ? capital : '-';
  }
  if (words.ends_with("A")) // the name ends as "90a" does
    letters.pop_back();
  for (const std::string_view known : {"", "SM", "COMPUTE", "CC"})
    if (letters == known)
      for (const Arch& arch : all_archs()) {
        std::string of_arch;
        std::copy_if(arch.name.begin(), arch.name.end(), std::back_inserter(of_arch), is_digit);
        if (!digits.empty() && digits == of_arch)
          return arch.name;
      }
  for (const std::string_view maker : {"NVIDIA-", "GEFORCE-", "TESLA-", "JETSON-"})
    if (words.starts_with(maker))
      words.erase(0, maker.size());
  for (const GpuName& gpu : kGpuNames) {
    std::string given; // as many letters and digits as gpu.name has; "-SXM5-80GB" may follow
    size_t end = 0;
    for (; end < words.size() && given.size() < gpu.name.size(); ++end)
      if (words[end] != '-')
        given += words[end];
    if (fits(given, gpu.name) && (end == words.size() || !is_digit(words[end])))
      return gpu.arch;
  }
  return "";
}

} // namespace sagebwd
