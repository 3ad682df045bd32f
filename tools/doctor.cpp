//===- doctor.cpp - What this machine has, and what is missing for what ----===//
#include "runtime/diagnosis.h"
#include "runtime/settings.h"
#include "tools/command.h"

namespace sagebwd::tools {

namespace {

std::string list_of_variables() {
  std::string text = "\nvariables:\n";
  for (const SettingVariable& v : setting_variables())
    text += format("  %-21s %s\n  %-21s %s\n", v.name, v.meaning, "", v.values);
  return text;
}

class Doctor : public Command {
public:
  Doctor()
      : Command(
            "doctor", "what this machine has, and what is missing for what",
            "Looks for the run-time compiler (NVRTC), the CUDA driver, GPUs, the cache\n"
            "directory and packs, and kernels that this driver is too old for. Finding\n"
            "something missing is not a failure; a directory, pack or variable that is set and\n"
            "cannot be used is. Neither Python nor PyTorch is needed.\n"
            "\n"
            "examples:\n"
            "  sagebwd doctor\n"
            "  sagebwd doctor --json\n" +
                list_of_variables()) {}

  ExitCode run() override {
    const Diagnosis diagnosis = diagnose(SAGEBWD_VERSION);
    fputs((json ? diagnosis.json + "\n" : diagnosis.text).c_str(), stdout);
    return diagnosis.sound ? kDone : kFailed;
  }
};

} // namespace

std::unique_ptr<Command> make_doctor() { return std::make_unique<Doctor>(); }

} // namespace sagebwd::tools
