//===- command.cpp - Find the program that runs candidates ----------------===//

#include "runtime/tuner/worker/command.h"
#include "cache/at_fork.h"
#include "runtime/tuner/trials.h"

#include <cstdlib>
#include <filesystem>
#include <unistd.h>

namespace sagebwd {
namespace {

constexpr const char* kProgram = "sagebwd";
constexpr const char* kSubcommand = "tune-worker";

/// The command that set_tune_worker() has set for the process.
struct Worker {
  ForkSafeMutex mutex;
  std::vector<std::string> command;
};
Worker& process_worker() {
  static constinit Single<Worker> worker;
  return worker.get([] { return new Worker; });
}

bool is_program(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
}

} // namespace

void set_tune_worker(std::vector<std::string> command) {
  Worker& worker = process_worker();
  std::lock_guard lock(worker.mutex);
  worker.command = std::move(command);
}

std::vector<std::string> worker_command(const std::vector<std::string>& given,
                                        const std::string& named) {
  if (!given.empty())
    return given;
  if (!named.empty()) {
    if (!is_program(named))
      throw TuneError("SAGEBWD_TUNE_WORKER is '" + named +
                      "', which is no program; it takes the path of the sagebwd command line");
    return {named, kSubcommand};
  }
  {
    Worker& worker = process_worker();
    std::lock_guard lock(worker.mutex);
    if (!worker.command.empty())
      return worker.command;
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error && self.filename() == kProgram)
    return {self.string(), kSubcommand};
  if (!error && is_program(self.parent_path() / kProgram))
    return {(self.parent_path() / kProgram).string(), kSubcommand};
  const char* path = std::getenv("PATH");
  for (std::string rest = path ? path : ""; !rest.empty();) {
    const size_t end = rest.find(':');
    const std::filesystem::path folder = rest.substr(0, end);
    if (folder.is_absolute() && is_program(folder / kProgram))
      return {(folder / kProgram).string(), kSubcommand};
    rest = end == std::string::npos ? "" : rest.substr(end + 1);
  }
  throw TuneError("tuning runs candidates in a process of its own, the sagebwd command line, and "
                  "there is none beside " +
                  self.string() + " or in PATH: name it with SAGEBWD_TUNE_WORKER");
}

} // namespace sagebwd
