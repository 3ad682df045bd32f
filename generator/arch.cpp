//===- arch.cpp - GPU architectures -----------------------------------------===//

#include "generator/arch.h"
#include "generator/fields.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace sagebwd {
namespace {

/// The largest shared memory of one block in bytes, from the table of technical specifications per
/// compute capability in the CUDA C++ Programming Guide.
constexpr int kB163 = 163 * 1024, kB99 = 99 * 1024, kB227 = 227 * 1024;

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

/// What to do with other GPUs.
const std::string kElsewhere = "; on other GPUs use PyTorch's attention";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool fits(std::string_view given, std::string_view name) {
  return std::equal(name.begin(), name.end(), given.begin(), given.end(), [](char of_name, char c) {
    return of_name == '#' ? is_digit(c) : of_name == c;
  });
}

/// The architecture of a GPU ("H100", "RTX 4090"), or the architecture for another spelling of its
/// name ("sm_90", "SM_80", "8.0", "compute_80"). Empty if the name means no known architecture.
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

} // namespace

const std::vector<Arch>& all_archs() {
  static const std::vector<Arch> archs = {
      {"sm_80", 8, 0, kB163, 11000},   {"sm_86", 8, 6, kB99, 11010},
      {"sm_87", 8, 7, kB163, 11040},   {"sm_89", 8, 9, kB99, 11080},
      {"sm_90a", 9, 0, kB227, 12000},  {"sm_100", 10, 0, kB227, 12080},
      {"sm_103", 10, 3, kB227, 12090}, {"sm_110", 11, 0, kB227, 13000},
      {"sm_120", 12, 0, kB99, 12080},  {"sm_121", 12, 1, kB99, 12090},
  };
  return archs;
}

const Arch& find_arch(std::string_view name) {
  for (const Arch& arch : all_archs())
    if (arch.name == name)
      return arch;
  const std::string meant(arch_meant_by(name));
  throw SpecError("unknown architecture '" + std::string(name) + "': supported are " +
                  joined(all_archs(), ", ", [](const Arch& arch) { return arch.name; }) +
                  (meant.empty() ? kElsewhere : "; did you mean '" + meant + "'?"));
}

const Arch& arch_for_capability(int major, int minor) {
  const Arch* best = nullptr;
  for (const Arch& arch : all_archs())
    // Machine code runs on later minor versions of its major version.
    if (arch.major == major && arch.minor <= minor && (!best || arch.minor > best->minor))
      best = &arch;
  if (!best)
    throw SpecError("compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                    " is not supported: the kernels need INT8 tensor cores with m16n8k32, from 8.0 "
                    "(A100) to 12.1" +
                    kElsewhere);
  return *best;
}

} // namespace sagebwd
