//===- doctor.cpp - What this machine has, and what is missing for what ----===//
#include "runtime/diagnosis.h"
#include "runtime/driver/driver.h"
#include "runtime/measure.h"
#include "runtime/on_gpu.h"
#include "runtime/settings.h"
#include "tools/command.h"

#include <map>

namespace sagebwd::tools {

namespace {

std::string list_of_variables() {
  std::string text = "\nvariables:\n";
  for (const SettingVariable& v : setting_variables())
    text +=
        format("  %-22s %s\n  %-22s %s\n", v.name, wrapped(v.meaning, 25).c_str(), "", v.values);
  return text;
}

class Doctor : public Command {
public:
  Doctor()
      : Command("doctor", "show what this machine has and what it lacks",
                "Looks for the run-time compiler (NVRTC), the CUDA driver, GPUs, the cache\n"
                "directory and packs, and kernels that this driver is too old for. Under\n"
                "SAGEBWD_OFFLINE=1 it says which kernels there are, and does not look for NVRTC.\n"
                "A missing component (no GPU, no NVRTC) is reported and is not an error. The\n"
                "exit code is 1 if there is a GPU and no attention can run, if there is no kernel\n"
                "under SAGEBWD_OFFLINE=1, or if a directory, a pack (every kernel is checked) or\n"
                "a variable that you set cannot be used. An unknown variable SAGEBWD_... counts\n"
                "as one. Neither Python nor PyTorch is needed.\n"
                "\n"
                "examples:\n"
                "  sagebwd doctor\n"
                "  sagebwd doctor --json\n"
                "  sagebwd doctor --measure        # the rates of a GPU, in a few seconds\n" +
                    list_of_variables()) {
    options.flag("measure", measure_,
                 "measure and print how fast a GPU runs what kernels are made of");
    options.integer("gpu", gpu_, 0, 1023, "which GPU --measure runs on");
  }

  bool warns_of_variables() const override { return measure_; } // the report names them
  ExitCode run() override {
    if (!measure_ && options.given("gpu"))
      throw UsageError("--gpu is for --measure: give both, or neither");
    if (measure_)
      return print_rates();
    const Diagnosis diagnosis = diagnose();
    fputs((json ? diagnosis.json + "\n" : diagnosis.text).c_str(), stdout);
    return diagnosis.sound ? kDone : kFailed;
  }

private:
  ExitCode print_rates() const {
    require_gpu(gpu_, "--measure");
    const driver::DeviceInfo gpu = driver::device_info(gpu_);
    Table table;
    std::map<std::string, double> clocks; // per operation on one SM
    for (const MeasuredRate& rate : measure_rates(gpu_)) {
      clocks[rate.name] = 1 / rate.per_clock;
      table.add({{"name", "", rate.name},
                 {"what", "what", rate.what},
                 {"unit", "counted", rate.unit},
                 number("per_clock_and_sm", "per clock and SM", 1, rate.per_clock),
                 number("tera_per_second", "10^12 per second", 2, rate.tera),
                 number("clock_ghz", "GHz", 3, rate.clock_ghz)});
    }
    // Two thirds of the operations of the mixture are INT8, as an INT8 product has twice as many.
    const double in_turn = (2 * clocks["mma_s8"] + clocks["mma_bf16"]) / 3;
    const double share = clocks["mma_mixed"] / in_turn;
    return finish(llvm::json::Object{{"gpu", printable(gpu.name)},
                                     {"sm_count", gpu.sm_count},
                                     {"rates", table.json()},
                                     {"mixed_time_of_in_turn", share}},
                  [&] {
                    printf("%s, %d SMs\n\n", printable(gpu.name).c_str(), gpu.sm_count);
                    table.print();
                    printf("\nBoth kinds of products at once take %.2f of their times one after "
                           "the other.\n",
                           share);
                  });
  }

  bool measure_ = false;
  int gpu_ = 0;
};

} // namespace

std::unique_ptr<Command> make_doctor() { return std::make_unique<Doctor>(); }

} // namespace sagebwd::tools
