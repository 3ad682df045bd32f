//===- nvrtc_signals_test.cpp - Signals while NVRTC compiles ----------------===//
//
// Needs libnvrtc, not a GPU.
//
//===----------------------------------------------------------------------===//

#include "runtime/nvrtc/nvrtc.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <unistd.h>

using namespace sagebwd;

namespace {

std::atomic<int> heard{0};

/// A handler of the process with flags that signal() would not keep.
class Listening {
public:
  explicit Listening(int number) : number_(number) {
    struct sigaction ours {};
    ours.sa_handler = [](int) { ++heard; };
    ours.sa_flags = SA_NODEFER;
    ::sigaction(number, &ours, &before_);
  }
  ~Listening() { ::sigaction(number_, &before_, nullptr); }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

  void expect_unchanged() const {
    struct sigaction now {};
    ::sigaction(number_, nullptr, &now);
    EXPECT_EQ(now.sa_flags & (SA_NODEFER | SA_RESTART), SA_NODEFER);
  }

private:
  int number_;
  struct sigaction before_ {};
};

/// Parsing it takes NVRTC a third of a second.
std::string long_source() {
  std::string source;
  for (int i = 0; i < 20000; ++i)
    source += "template <int N> __device__ float f" + std::to_string(i) +
              "(float x) { float y = x; for (int i = 0; i < N; ++i) y = y * x + i; return y; }\n";
  return source + "extern \"C\" __global__ void first(float* x) { *x = f0<3>(*x); }\n";
}

// NVRTC's own handler would end this process with code 4.
TEST(NvrtcSignals, ReachTheHandlersOfTheProcessWhileItCompiles) {
  const Listening listening[] = {Listening(SIGINT), Listening(SIGTERM)};
  std::atomic<bool> done{false};
  const std::string source = long_source();
  std::thread compiler([&] {
    Nvrtc::instance().compile("first", source, "sm_80");
    done = true;
  });
  while (!done) {
    for (int number : {SIGINT, SIGTERM})
      ::kill(::getpid(), number);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  compiler.join();
  EXPECT_GT(heard, 0);
  for (const Listening& one : listening)
    one.expect_unchanged();
}

} // namespace
