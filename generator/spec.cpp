//===- spec.cpp - Parsing, printing and checking specs ---------------------===//

#include "generator/spec.h"

#include <span>
#include <utility>

namespace sagebwd {
namespace {

template <typename T> using Names = std::span<const std::pair<T, std::string_view>>;

constexpr std::pair<DType, std::string_view> kDTypes[] = {{DType::bf16, "bf16"},
                                                          {DType::fp16, "fp16"}};
constexpr std::pair<Causal, std::string_view> kCausals[] = {
    {Causal::none, "none"}, {Causal::top_left, "top-left"}, {Causal::bottom_right, "bottom-right"}};
constexpr std::pair<Granularity, std::string_view> kGranularities[] = {
    {Granularity::row, "row"}, {Granularity::block, "block"}};
constexpr std::pair<Precision, std::string_view> kPrecisions[] = {
    {Precision::six_of_seven, "six-of-seven"}, {Precision::qk16, "qk16"}};

template <typename T> std::string_view name_in(Names<T> names, T value) {
  for (const auto& [candidate, name] : names)
    if (candidate == value)
      return name;
  return "?";
}

template <typename T> T parse_in(Names<T> names, std::string_view what, std::string_view text) {
  std::string known;
  for (const auto& [value, name] : names) {
    if (name == text)
      return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw SpecError("unknown " + std::string(what) + " '" + std::string(text) + "': supported are " +
                  known);
}

/// The largest shared memory of one block, by the CUDA C++ Programming Guide's table of technical
/// specifications per compute capability.
constexpr int kB163 = 163 * 1024, kB99 = 99 * 1024, kB227 = 227 * 1024;

} // namespace

std::string_view to_string(DType x) { return name_in<DType>(kDTypes, x); }
std::string_view to_string(Causal x) { return name_in<Causal>(kCausals, x); }
std::string_view to_string(Granularity x) { return name_in<Granularity>(kGranularities, x); }
std::string_view to_string(Precision x) { return name_in<Precision>(kPrecisions, x); }

DType parse_dtype(std::string_view s) { return parse_in<DType>(kDTypes, "dtype", s); }
Causal parse_causal(std::string_view s) { return parse_in<Causal>(kCausals, "causal mask", s); }
Granularity parse_granularity(std::string_view s) {
  return parse_in<Granularity>(kGranularities, "granularity", s);
}
Precision parse_precision(std::string_view s) {
  return parse_in<Precision>(kPrecisions, "precision", s);
}

AttentionSpec resolved(AttentionSpec spec) {
  if (spec.head_dim != 64 && spec.head_dim != 128)
    throw SpecError("head dimension " + std::to_string(spec.head_dim) +
                    " is not built: supported are 64 and 128; pad q, k and v with zero channels "
                    "(and keep softmax_scale at that of the unpadded dimension)");
  const bool row = spec.granularity == Granularity::row;
  if (spec.group_q == 0)
    spec.group_q = row ? 64 : 128;
  if (spec.group_kv == 0)
    spec.group_kv =
        row && spec.precision == Precision::six_of_seven && spec.head_dim <= 64 ? 128 : 64;
  if (row ? spec.group_q != 64 : spec.group_q != 128)
    throw SpecError("group_q = " + std::to_string(spec.group_q) + " is not supported under '" +
                    std::string(to_string(spec.granularity)) + "': it is " + (row ? "64" : "128") +
                    " there; leave it out for that default");
  if (row ? spec.group_kv != 64 && spec.group_kv != 128 : spec.group_kv != 64)
    throw SpecError("group_kv = " + std::to_string(spec.group_kv) + " is not supported under '" +
                    std::string(to_string(spec.granularity)) + "': it is " +
                    (row ? "64 or 128" : "64") + " there; leave it out for the default");
  return spec;
}

AttentionSpec resolved(AttentionSpec spec, const Arch& arch) {
  if (spec.group_kv == 0 && spec.granularity == Granularity::row &&
      spec.precision == Precision::six_of_seven && arch.name == "sm_90a")
    spec.group_kv = 128;
  return resolved(spec);
}

std::string to_string(const AttentionSpec& s) {
  std::string text = "d" + std::to_string(s.head_dim) + " " + std::string(to_string(s.dtype)) +
                     " causal=" + std::string(to_string(s.causal)) + " " +
                     std::string(to_string(s.granularity)) + " " + std::to_string(s.group_q) + "x" +
                     std::to_string(s.group_kv) + " " + std::string(to_string(s.precision));
  if (s.smooth_k)
    text += " smooth_k";
  if (s.rotate)
    text += " rotate";
  if (s.deterministic)
    text += " deterministic";
  return text;
}

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
  std::string known;
  for (const Arch& arch : all_archs()) {
    if (arch.name == name)
      return arch;
    known += (known.empty() ? "" : ", ") + std::string(arch.name);
  }
  throw SpecError("unknown architecture '" + std::string(name) + "': supported are " + known);
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
                    "(A100) to 12.1");
  return *best;
}

} // namespace sagebwd
