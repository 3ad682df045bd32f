//===- measure.cpp - Measure the rates of instructions on a GPU -----------===//

#include "runtime/measure.h"

#include "generator/spec.h"
#include "runtime/driver/driver.h"
#include "runtime/generate.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"

#include <algorithm>

namespace sagebwd {
namespace {

struct Rate {
  const char* name; ///< as in templates/measure/rates.cuh, in the same order
  const char* what;
  const char* unit;
  double per_unit; ///< per unit of a warp
};

constexpr double kMmaOps8 = 2.0 * 16 * 8 * 32, kMmaOps16 = 2.0 * 16 * 8 * 16;
constexpr Rate kRates[] = {
    {"mma_s8", "mma.sync s8 x s8", "operations", kMmaOps8},
    {"mma_u8", "mma.sync u8 x s8", "operations", kMmaOps8},
    {"mma_bf16", "mma.sync bf16, FP32 sums", "operations", kMmaOps16},
    {"mma_half_sums", "mma.sync fp16, FP16 sums", "operations", kMmaOps16},
    {"ffma", "FFMA", "results", 4 * 32},
    {"mma_s8_ffma", "mma.sync s8 x s8, each beside 4 FFMA", "operations", kMmaOps8},
    {"mma_mixed", "mma.sync s8 and bf16, half of the warps each", "operations",
     (kMmaOps8 + kMmaOps16) / 2},
    {"int_to_float", "INT32 to FP32", "results", 32},
    {"pack_s8", "FP32 rounded and packed to 8 bits", "results", 4 * 32},
    {"ex2", "exponential (EX2)", "results", 32},
    {"ldmatrix", "ldmatrix x4", "bytes", 512},
};

// These constants are the same as in templates/measure/rates.cuh.
constexpr int kThreads = 512;
constexpr int kUnits = 64; ///< units of each turn
constexpr int kTurns = 1024;
constexpr int kRuns = 5; ///< timed runs; a first run is not counted

struct Params {
  driver::Pointer clocks, results;
  int turns;
};

std::string entry_of(const Rate& rate) { return std::string("sagebwd_measure_") + rate.name; }

/// Runs one block on each SM. The clocks are those of the median block.
MeasuredRate measured(const Rate& rate, driver::Function function, int sm_count) {
  driver::Memory clocks(sizeof(uint64_t) * sm_count);
  driver::Memory results(sizeof(uint32_t) * sm_count * kThreads);
  driver::fill(results.pointer(), 1, results.bytes());
  Params params{clocks.pointer(), results.pointer(), kTurns};
  driver::Stopwatch stopwatch;
  const auto launch = [&] {
    driver::launch(function, sm_count, 1, 1, kThreads, 0, nullptr, &params);
  };
  launch();
  driver::synchronize();
  double best_ms = 0, best_clocks = 0;
  for (int run = 0; run < kRuns; ++run) {
    stopwatch.start();
    launch();
    stopwatch.stop();
    const double ms = stopwatch.milliseconds();
    std::vector<uint64_t> of_blocks(sm_count);
    driver::copy_to_host(of_blocks.data(), clocks.pointer(), sizeof(uint64_t) * sm_count);
    const auto middle = of_blocks.begin() + sm_count / 2;
    std::nth_element(of_blocks.begin(), middle, of_blocks.end());
    const auto of_block = static_cast<double>(*middle);
    best_ms = run ? std::min(best_ms, ms) : ms;
    best_clocks = run ? std::min(best_clocks, of_block) : of_block;
  }
  const double done = rate.per_unit * kUnits * kTurns * (kThreads / 32); // done by one SM
  const double per_clock = done / best_clocks, tera = done * sm_count / best_ms / 1e9;
  return {rate.name, rate.what, rate.unit, per_clock, tera, tera * 1e3 / per_clock / sm_count};
}

} // namespace

std::string measure_source() {
  const std::string& folder = settings().template_dir;
  std::string source =
      expanded("measure/rates.cuh", folder.empty() ? embedded_template : templates_in(folder));
  for (const Rate& rate : kRates)
    source +=
        "\nextern \"C\" __global__ void __launch_bounds__(MEASURE_THREADS)\n    " + entry_of(rate) +
        "(const __grid_constant__ MeasureParams p) {\n  run<Rate::" + rate.name + ">(p);\n}\n";
  return source;
}

std::vector<std::string> measured_names() {
  std::vector<std::string> names;
  for (const Rate& rate : kRates)
    names.push_back(rate.name);
  return names;
}

std::vector<MeasuredRate> measure_rates(int device) {
  const driver::DeviceInfo info = driver::device_info(device);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  const Compilation compilation =
      Nvrtc::instance().compile("sagebwd_measure", measure_source(), arch.name);
  driver::DeviceScope scope(device);
  const driver::Module module = driver::load_module(compilation.cubin);
  std::vector<MeasuredRate> rates;
  for (const Rate& rate : kRates)
    rates.push_back(measured(rate, driver::get_function(module, entry_of(rate)), info.sm_count));
  return rates;
}

} // namespace sagebwd
