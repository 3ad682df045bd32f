//===- calls_of_threads_test.cpp - One operation among threads -------------===//
//
// Errors, captures and launches of many threads at once, through C, on a fake driver
// (fake_libcuda.c), in a child process that is this executable again. To the fake driver every
// stream but the null stream is being captured. Also built with ThreadSanitizer; see
// cmake/SanitizedTests.cmake.
//
//===----------------------------------------------------------------------===//

#include "c/sagebwd.h"
#include "generator/operation.h"
#include "runtime/kernel_builder.h"
#include "runtime/loaded_kernels.h"
#include "tests/runtime/again.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

using namespace sagebwd;
using test::ScopedVariable;

namespace {

constexpr int kCallers = 16, kCalls = 50;
void* const kCaptured = reinterpret_cast<void*>(uintptr_t{1});

void* at(uintptr_t megabytes) { return reinterpret_cast<void*>(megabytes << 20); }

sagebwd_tensor tensor(int where) { return {at(where), 1 << 16, 1 << 13, 64}; }

/// Gives what the arguments of both passes have in common.
template <typename Args> Args args_of(int64_t heads) {
  Args args{};
  args.struct_size = sizeof(args);
  args.problem = {1, heads, 2, 100, 90};
  args.q = tensor(1), args.k = tensor(2), args.v = tensor(3), args.out = tensor(4);
  args.lse = static_cast<float*>(at(5));
  return args;
}

sagebwd_status call(sagebwd_operation* operation, int64_t heads, void* stream) {
  const auto args = args_of<sagebwd_forward_args>(heads);
  return sagebwd_forward(operation, &args, 0.125f, at(16), 1 << 24, stream);
}

sagebwd_status call_backward(sagebwd_operation* operation, int64_t heads, void* stream) {
  auto args = args_of<sagebwd_backward_args>(heads);
  args.dout = tensor(6), args.dq = tensor(7), args.dk = tensor(8), args.dv = tensor(9);
  return sagebwd_backward(operation, &args, 0.125f, at(16), 1 << 24, stream);
}

/// Loads the operation's kernels, of which no code is known: the fake driver looks at none.
void load_stand_ins(const char* line) {
  const Operation operation(resolved(parse_spec(line)), find_arch("sm_80"));
  for (const KernelSpec& kernel : operation.distinct_kernels()) {
    BuiltKernel built;
    built.spec = kernel;
    built.entry.kernel_name = "kernel";
    built.entry.cubin = "cubin";
    built.threads = 128;
    load_once(built, 0);
  }
}

/// Counts what differs from what a single thread would see.
std::atomic<int> wrong{0};

void expect(bool right, const char* what) {
  if (!right && wrong++ < 5)
    std::printf("%s: %s\n", what, sagebwd_last_error());
}

bool last_error_has(const std::string& part) {
  return std::string(sagebwd_last_error()).find(part) != std::string::npos;
}

/// Behind a warm-up without sizes: each kernel once, those that both passes launch, too.
void capture_both_passes() {
  for (const char* line : {"d64", "d64 causal=top-left smooth_q"}) {
    sagebwd_operation* operation = nullptr;
    expect(sagebwd_create(line, 0, &operation) == SAGEBWD_OK, "create");
    load_stand_ins(line);
    sagebwd_warmup_args warmup{};
    warmup.struct_size = sizeof(warmup), warmup.backward = 1;
    expect(sagebwd_warmup(operation, &warmup) == SAGEBWD_OK, "warmup");
    expect(call(operation, 4, kCaptured) == SAGEBWD_OK, "forward");
    expect(call_backward(operation, 4, kCaptured) == SAGEBWD_OK, "backward");
    sagebwd_destroy(operation);
  }
  std::printf("wrong: %d\n", wrong.load());
}

/// Each thread's refused call, whose message names a number of its own.
void refuse_own(sagebwd_operation* operation, int thread) {
  const int64_t heads = 1001 + 2 * thread; // two heads of keys
  expect(call(operation, heads, nullptr) == SAGEBWD_INVALID &&
             last_error_has("heads = " + std::to_string(heads) + " "),
         "own error");
}

void work(sagebwd_operation* shared, const char* line, std::barrier<>& together, int thread) {
  together.arrive_and_wait();
  sagebwd_operation* own = nullptr;
  expect(sagebwd_create(line, 0, &own) == SAGEBWD_OK, "create");
  for (int i = 0; i < kCalls; ++i) { // no kernel is loaded
    expect(call(shared, 4, kCaptured) == SAGEBWD_DRIVER && last_error_has("being captured"),
           "captured too early");
    refuse_own(i % 2 ? own : shared, thread);
  }
  together.arrive_and_wait();
  if (thread % 4 == 0)
    load_stand_ins(line);
  for (int i = 0; i < kCalls; ++i) { // while kernels are being loaded
    const sagebwd_status status = call(i % 2 ? own : shared, 4, kCaptured);
    expect(status == SAGEBWD_OK || (status == SAGEBWD_DRIVER && last_error_has("being captured")),
           "captured meanwhile");
    refuse_own(shared, thread);
  }
  together.arrive_and_wait();
  const sagebwd_warmup_args warmup{sizeof(warmup), {1, 4, 2, 100, 90}, 1};
  for (int i = 0; i < kCalls; ++i) {
    if (i % 8 == thread % 8)
      expect(sagebwd_warmup(shared, &warmup) == SAGEBWD_OK, "warmup");
    expect(call(shared, 4, thread % 2 ? kCaptured : nullptr) == SAGEBWD_OK, "call");
    expect(call_backward(own, 4, kCaptured) == SAGEBWD_OK, "backward");
    refuse_own(own, thread);
  }
  sagebwd_destroy(own);
}

void call_in_threads() {
  const char* line = "d64 causal=top-left";
  sagebwd_operation* shared = nullptr;
  expect(sagebwd_create(line, 0, &shared) == SAGEBWD_OK, "create");
  std::barrier together(kCallers);
  std::vector<std::thread> threads;
  for (int i = 0; i < kCallers; ++i)
    threads.emplace_back([&, i] { work(shared, line, together, i); });
  for (std::thread& thread : threads)
    thread.join();
  sagebwd_destroy(shared);
  std::printf("wrong: %d\n", wrong.load());
}

/// Gives what a task prints in a process of its own, on the fake driver.
std::string result_of(const char* task) {
  const test::TempDirectory folder;
  test::compile_fake_driver(folder.path());
  ScopedVariable path("LD_LIBRARY_PATH", folder.path());
  ScopedVariable cache("SAGEBWD_CACHE_DIR", folder / "cache"), mode("SAGEBWD_TUNE", "use");
  ScopedVariable major("FAKE_MAJOR", "8"), minor("FAKE_MINOR", "0"), sms("FAKE_SMS", "108");
  ScopedVariable quiet("FAKE_QUIET", "1"), offline("SAGEBWD_OFFLINE", "1");
  return test::report_of_child("CallsOfThreads.GiveWhatOneThreadSees", task);
}

TEST(CallsOfThreads, GiveWhatOneThreadSees) {
  if (const char* task = test::child_task()) {
    test::report(std::string(task) == "threads" ? call_in_threads : capture_both_passes);
    return;
  }
  EXPECT_EQ(result_of("threads"), "wrong: 0\n");
}

TEST(CallsOfThreads, AWarmUpWithoutSizesServesCapturesOfBothPasses) {
  EXPECT_EQ(result_of("captures"), "wrong: 0\n");
}

} // namespace
