//===- tuner_bench.h - A worker without a GPU, for the tuner's tests -------===//
//
// The worker is this test executable again, running the test
// TunerWorker.SpeaksFirstAndEndsWithTheLine. A candidate's machine code says what it does there:
// "ms=0.8 noise=0.1 slows=1.5 vet=crash time=hang", each optional. A kernel that is timed right
// after a candidate takes `slows` times as long.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/tuner/trials.h"
#include "runtime/tuner/worker/bench.h"
#include "tests/cache/temp_directory.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>

namespace sagebwd::test {

inline constexpr const char* kWorkerVariable = "SAGEBWD_TEST_WORKER";
/// A file to which each worker adds its number when it opens.
inline constexpr const char* kWorkerLog = "SAGEBWD_TEST_WORKER_LOG";

inline std::vector<std::string> test_worker() {
  return {std::filesystem::read_symlink("/proc/self/exe").string(),
          "--gtest_filter=TunerWorker.SpeaksFirstAndEndsWithTheLine"};
}

class FakeBench : public Bench {
public:
  void open(const BenchSetup& setup) override {
    if (const char* log = std::getenv(kWorkerLog))
      std::ofstream(log, std::ios::app) << ::getpid() << std::endl;
    if (setup.operation.empty())
      throw std::runtime_error("no operation to open");
    act(traits_of(setup.operation.back())["open"]);
  }
  Vetting vet(const BenchKernel& kernel) override {
    auto traits = traits_of(kernel);
    Vetting vetting;
    vetting.ms = number(traits["ms"], 1);
    if (spoilt_)
      vetting.wrong = "the data is spoilt";
    if (traits["vet"] == "wrong")
      vetting.wrong = "everything differs";
    else if (traits["vet"] == "inexact")
      vetting.identical = false, vetting.rel_l2 = 1e-5;
    else if (traits["vet"] == "spoil")
      spoilt_ = true;
    else
      act(traits["vet"]);
    return vetting;
  }
  double time_ms(const BenchKernel& kernel) override {
    auto traits = traits_of(kernel);
    act(traits["time"]);
    // Symmetric around the median, the same in every run.
    constexpr double kSwing[] = {0, 1, -1, 0.5, -0.5, 0.75, -0.75};
    const double swing = kSwing[launches_[kernel.name]++ % 7] * number(traits["noise"], 0.001);
    return number(traits["ms"], 1) * (1 + swing) *
           std::exchange(slowed_, number(traits["slows"], 1));
  }

private:
  static std::map<std::string, std::string> traits_of(const BenchKernel& kernel) {
    std::map<std::string, std::string> traits;
    std::istringstream words(kernel.cubin);
    for (std::string word; words >> word;)
      traits[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    return traits;
  }
  static double number(const std::string& text, double otherwise) {
    return text.empty() ? otherwise : std::stod(text);
  }
  static void act(const std::string& how) {
    if (how == "crash") {
      std::signal(SIGSEGV, SIG_DFL);
      std::raise(SIGSEGV);
    } else if (how == "exit") {
      std::fprintf(stderr, "so long");
      ::_exit(3);
    } else if (how == "hang") {
      while (true)
        std::this_thread::sleep_for(std::chrono::seconds(1));
    } else if (how == "throw") {
      throw std::runtime_error("CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    } else if (how == "garbage") {
      if (::write(STDIN_FILENO, "]]} garbage\n", 12) < 0)
        ::_exit(4);
    } else if (how == "print") {
      std::printf("printed by a library\n");
      std::fflush(stdout);
    } else if (how == "flood") {
      const std::string line(1 << 16, 'x');
      while (::write(STDERR_FILENO, line.data(), line.size()) > 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1)); // two cores have other work
    }
  }
  bool spoilt_ = false;
  std::map<std::string, int> launches_;
  double slowed_ = 1;
};

} // namespace sagebwd::test
