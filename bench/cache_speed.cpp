//===- cache_speed.cpp - How fast a kernel is found ------------------------===//
//
//   cache_speed [--arch sm_90a] [--head-dim 128] [--dtype bf16] [--causal none]
//               [--granularity row] [--check FACTOR]
//
// Prints JSON: a whole operation cold, in an empty directory; from the disk in a new process; and
// one kernel in memory. With --check it fails where a time is over its limit times the factor.
// Needs NVRTC, not a GPU. A new process is this executable again.
//
//===----------------------------------------------------------------------===//

#include "generator/operation.h"
#include "runtime/kernels.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

using namespace sagebwd;
using Clock = std::chrono::steady_clock;

namespace {

constexpr double kLookupNs = 2000, kDiskMs = 10, kColdMs = 2000;
constexpr int kDiskRuns = 9, kLookups = 200000;
constexpr const char* kChildVariable = "SAGEBWD_CACHE_SPEED_REPORT";

struct Options {
  std::string arch = "sm_90a";
  AttentionSpec spec;
  double check = 0; ///< 0: only measure
};

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

bool maps_nvrtc() {
  return test::read_text("/proc/self/maps").find("libnvrtc") != std::string::npos;
}

std::vector<KernelSpec> operation(const Options& options) {
  return Operation(resolved(options.spec), find_arch(options.arch)).distinct_kernels();
}

/// In a new process: how long all kernels took, how many came from the disk, whether NVRTC is
/// there.
struct Report {
  double ms = 0, process_ms = 0;
  size_t cached = 0;
  bool nvrtc = false;
};

void build_and_report(const Options& options, const std::string& file) {
  const Clock::time_point start = Clock::now();
  const auto kernels = build_all(operation(options));
  const double ms = ms_since(start);
  size_t cached = 0;
  for (const auto& kernel : kernels)
    cached += kernel->cached;
  std::ofstream(file) << ms << ' ' << cached << ' ' << maps_nvrtc();
}

Report run_process(char** arguments) {
  test::TempDirectory temp;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const Clock::time_point start = Clock::now();
  const int status = test::finish(test::start([&] {
    ::setenv(kChildVariable, (temp / "report").c_str(), 1);
    ::execv(self.c_str(), arguments);
    return 127;
  }));
  Report report;
  report.process_ms = ms_since(start);
  if (status != 0)
    throw std::runtime_error("a child failed; what it said is above");
  std::ifstream(temp / "report") >> report.ms >> report.cached >> report.nvrtc;
  return report;
}

double lookup_ns(const std::vector<KernelSpec>& specs) {
  build_all(specs);
  size_t bytes = 0; // so that nothing is optimised away
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < kLookups; ++i)
    bytes += build(specs[static_cast<size_t>(i) % specs.size()])->entry.cubin.size();
  const double ns = ms_since(start) * 1e6 / kLookups;
  return bytes ? ns : 0;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i], value = i + 1 < count ? arguments[i + 1] : "";
    if (name == "--arch")
      options.arch = value;
    else if (name == "--head-dim")
      options.spec.head_dim = std::stoi(value);
    else if (name == "--dtype")
      options.spec.dtype = parse_word<DType>(value);
    else if (name == "--granularity")
      options.spec.granularity = parse_word<Granularity>(value);
    else if (name == "--causal")
      options.spec.causal = parse_word<Causal>(value);
    else if (name == "--check")
      options.check = std::stod(value);
    else
      throw std::invalid_argument("unknown option " + name + "; see the head of cache_speed.cpp");
  }
  return options;
}

int measure(const Options& options, char** arguments) {
  test::TempDirectory temp;
  const test::ScopedVariable directory("SAGEBWD_CACHE_DIR", temp / "cache");
  const std::vector<KernelSpec> specs = operation(options);
  const Report cold = run_process(arguments);
  std::vector<Report> disk;
  for (int i = 0; i < kDiskRuns; ++i)
    disk.push_back(run_process(arguments));
  for (const Report& report : disk)
    if (cold.cached != 0 || report.cached != specs.size() || report.nvrtc)
      throw std::runtime_error("the disk did not serve what it should, or NVRTC was opened");
  auto median = [&](double Report::*value) {
    std::vector<double> values;
    for (const Report& report : disk)
      values.push_back(report.*value);
    std::nth_element(values.begin(), values.begin() + kDiskRuns / 2, values.end());
    return values[kDiskRuns / 2];
  };
  const double disk_ms = median(&Report::ms), ns = lookup_ns(specs);
  std::printf("{\"arch\": \"%s\", \"op\": \"%s\", \"kernels\": %zu, \"cold_ms\": %.1f, "
              "\"disk_ms\": %.2f, \"disk_process_ms\": %.2f, \"lookup_ns\": %.0f, "
              "\"limits\": {\"cold_ms\": %.0f, \"disk_ms\": %.0f, \"lookup_ns\": %.0f}}\n",
              options.arch.c_str(), to_string(specs.back().attention).c_str(), specs.size(),
              cold.ms, disk_ms, median(&Report::process_ms), ns, kColdMs, kDiskMs, kLookupNs);
  if (options.check == 0)
    return 0;
  return cold.ms <= options.check * kColdMs && disk_ms <= options.check * kDiskMs &&
                 ns <= options.check * kLookupNs
             ? 0
             : 1;
}

} // namespace

int main(int count, char** arguments) {
  try {
    const Options options = parse(count, arguments);
    if (const char* report = std::getenv(kChildVariable)) {
      build_and_report(options, report);
      return 0;
    }
    return measure(options, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cache_speed: %s\n", error.what());
    return 2;
  }
}
