//===- driver_fake_test.cpp - The driver's table without a GPU -------------===//
//
// A child process of this executable opens a fake libcuda.so.1 (fake_libcuda.c), compiled here, by
// LD_LIBRARY_PATH. The tests compare what it prints.
//
//===----------------------------------------------------------------------===//

#include "runtime/driver/driver.h"
#include "runtime/kernel_builder.h"
#include "runtime/settings.h"
#include "tests/runtime/again.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>

using namespace sagebwd;
using test::ScopedVariable;
using test::TempDirectory;

namespace {

/// Runs an action and prints the error it ends with.
void attempt(const std::function<void()>& action) {
  try {
    action();
    std::printf("done\n");
  } catch (const LibraryError& error) {
    std::printf("LibraryError: %s\n", error.what());
  } catch (const DriverError& error) {
    std::printf("DriverError %d: %s\n", error.code, error.what());
  }
}

void use_everything() {
  using namespace driver;
  std::printf("count %d version %d\n", device_count(), driver_version());
  DeviceInfo info = device_info(1);
  std::printf("%s (%s) sm_%d.%d, %d SMs, %d bytes shared, %zu bytes\n", info.name.c_str(),
              info.uuid.c_str(), info.major, info.minor, info.sm_count, info.max_shared_bytes,
              info.memory_bytes);
  DeviceScope scope(1);
  Function function = get_function(load_module("cubin"), "kernel");
  set_max_dynamic_shared(function, 99000);
  Stream stream = create_stream();
  int params = 42;
  launch(function, 3, 4, 5, 128, 99000, stream, &params);
  launch(function, 3, 4, 5, 128, 99000, stream, &params, /*overlaps=*/true);
  std::printf("capturing %d %d\n", is_capturing(nullptr), is_capturing(stream));
  Pointer memory = allocate(16);
  int value = 0;
  fill(memory, 0, 16);
  copy_to_device(memory, &value, 4);
  copy_to_host(&value, memory, 4);
  release(memory);
  Event start = create_event(), stop = create_event();
  record(start, stream);
  record(stop, stream);
  std::printf("value %x elapsed %.1f\n", value, elapsed_ms(start, stop));
  destroy_event(start);
  destroy_event(stop);
  synchronize(stream);
  synchronize();
  destroy_stream(stream);
}

/// Names what a child process may be asked to do.
const std::map<std::string, std::function<void()>>& driver_scenarios() {
  static const std::map<std::string, std::function<void()>> map = {
      {"everything", [] { attempt(use_everything); }},
      {"unavailable",
       [] {
         std::printf("unavailable: %s\n", driver::unavailable().c_str());
         attempt([] { driver::device_count(); });
         attempt([] { driver::DeviceScope scope(0); });
         attempt([] { driver::load_module("cubin"); });
       }},
      {"scopes",
       [] {
         for (int i = 0; i < 2; ++i)
           std::thread([] { driver::DeviceScope scope(0); }).join();
         driver::DeviceScope outer(0);
         driver::DeviceScope inner(1);
       }},
      {"ordinal", [] { attempt([] { driver::DeviceScope scope(2); }); }},
      {"launch",
       [] {
         attempt([] {
           int params = 0;
           driver::launch(nullptr, 1, 1, 1, 1, 0, nullptr, &params);
         });
       }},
      {"capturing", [] { attempt([] { driver::is_capturing(nullptr); }); }},
      {"accept",
       [] {
         const auto accept = KernelBuilder::Policy::of(Settings::from_environment()).accept;
         for (int round = 0; round < 2; ++round) {
           if (round == 1)
             driver::driver_version(); // which opens it
           for (int lowest : {12030, 12040, 12050})
             std::printf("%d ", accept(CacheEntry{.lowest_driver = lowest}));
         }
       }},
      {"release",
       [] {
         attempt([] {
           driver::DeviceScope scope(0);
           driver::Memory memory(16);
           driver::Stopwatch stopwatch;
           throw DriverError("a kernel failed", 719);
         });
       }},
      {"load", [] { attempt([] { driver::load_module("cubin"); }); }},
  };
  return map;
}

/// The fake driver in a folder of its own.
class FakeDriver : public testing::Test {
protected:
  void compile(const std::string& options = "") {
    test::compile_fake_driver(temp_.path(), options);
  }

  /// The output of a scenario in a new process.
  std::string run(const std::string& scenario) {
    ScopedVariable path("LD_LIBRARY_PATH", temp_.path());
    return test::report_of_child("FakeDriver.WorksByProcAddress", scenario);
  }

  TempDirectory temp_;
};

constexpr const char* kEverything =
    "count 2 version 12040\n"
    "Fake GPU 11 (GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a00b) sm_75.76, 16 SMs, 97 bytes shared, "
    "21474836480 bytes\n"
    "cuda: retain 11\ncuda: push 111\n"
    "cuda: load cubin\ncuda: function kernel of 7\n"
    "cuda: attribute 8 = 99000\n"
    "cuda: launch 8 grid 3 4 5 block 128 1 1 shared 99000 stream 1 overlaps 0 param 42 extra "
    "(nil)\n"
    "cuda: launch 8 grid 3 4 5 block 128 1 1 shared 99000 stream 1 overlaps 1 param 42 extra "
    "(nil)\n"
    "capturing 0 1\n"
    "cuda: free 4096\n"
    "cuda: wait\n"
    "value 1010101 elapsed 1.5\n"
    "cuda: synchronize\n"
    "cuda: pop\n"
    "done\n";

TEST_F(FakeDriver, WorksByProcAddress) {
  if (const char* scenario = test::child_task()) {
    test::report(driver_scenarios().at(scenario));
    return;
  }
  compile();
  EXPECT_EQ(run("everything"), kEverything);
}

TEST_F(FakeDriver, WorksBySymbolsWhereAnOldDriverHasNoProcAddress) {
  compile("-DOLD");
  EXPECT_EQ(run("everything"), kEverything);
}

TEST_F(FakeDriver, RetainsEachPrimaryContextOnceAndPopsWhatItPushes) {
  compile();
  EXPECT_EQ(run("scopes"), "cuda: retain 10\n"
                           "cuda: push 110\ncuda: pop\n"
                           "cuda: push 110\ncuda: pop\n"
                           "cuda: push 110\n"
                           "cuda: retain 11\ncuda: push 111\n"
                           "cuda: pop\ncuda: pop\n");
}

TEST_F(FakeDriver, EntriesTooNewForTheOpenDriverAreMisses) {
  compile();
  EXPECT_EQ(run("accept"), "1 1 1 1 1 0 ");
}

TEST_F(FakeDriver, WithoutALibraryEveryCallSaysWhatIsMissing) {
  test::write_text(temp_ / "libcuda.so.1", "no ELF file, so that it does not open");
  std::string output = run("unavailable");
  EXPECT_NE(output.find("unavailable: no CUDA driver: libcuda.so.1 cannot be opened"),
            std::string::npos)
      << output;
  EXPECT_NE(output.find("NVIDIA driver"), std::string::npos);
  size_t errors = 0;
  for (size_t at = 0; (at = output.find("LibraryError: no CUDA driver", at)) != std::string::npos;
       ++at)
    ++errors;
  EXPECT_EQ(errors, 3u) << output;
}

TEST_F(FakeDriver, ADriverThatDoesNotStartIsUnavailable) {
  compile();
  ScopedVariable init("FAKE_INIT", "803");
  std::string output = run("unavailable");
  EXPECT_NE(output.find("unavailable: the CUDA driver does not start: cuInit: CUDA_ERROR_OTHER "
                        "(803): as the test asked"),
            std::string::npos)
      << output;
}

TEST_F(FakeDriver, ADriverWithoutGpusIsUnavailable) {
  compile();
  ScopedVariable devices("FAKE_DEVICES", "0");
  EXPECT_NE(run("unavailable").find("unavailable: the CUDA driver sees no GPU"), std::string::npos);
}

TEST_F(FakeDriver, AMissingFunctionIsAnErrorOnlyWhereItIsCalled) {
  compile("-DOLD -DcuStreamIsCapturing=renamed");
  EXPECT_EQ(run("capturing"), "LibraryError: the CUDA driver (for CUDA 12.4) has no "
                              "cuStreamIsCapturing, which came with CUDA 10.0. Update the NVIDIA "
                              "driver.\n");
  EXPECT_EQ(run("scopes").substr(0, 15), "cuda: retain 10");
}

/// As while another thread captures a stream that the null stream waits for.
TEST_F(FakeDriver, ANullStreamThatCannotBeAskedSaysWhy) {
  compile();
  ScopedVariable refuses("FAKE_NULL_STREAM", "906");
  const std::string output = run("capturing");
  EXPECT_EQ(output.find("DriverError 906: cuStreamIsCapturing failed: "), 0u) << output;
  EXPECT_NE(output.find("Another stream of this process is being captured"), std::string::npos);
  EXPECT_NE(output.find("warm up"), std::string::npos) << output;
  ScopedVariable fails("FAKE_NULL_STREAM", "700");
  EXPECT_EQ(run("capturing"), "DriverError 700: cuStreamIsCapturing failed: "
                              "CUDA_ERROR_ILLEGAL_ADDRESS (700): as the test asked\n");
}

TEST_F(FakeDriver, AFailedCallNamesItself) {
  compile();
  ScopedVariable fails("FAKE_FAILS", "cuLaunchKernelEx");
  std::string output = run("launch");
  EXPECT_NE(
      output.find("DriverError 700: cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): "
                  "as the test asked\n"),
      std::string::npos)
      << output;
}

TEST_F(FakeDriver, WhatIsReleasedAfterAFailureDoesNotHideIt) {
  compile();
  for (const char* function : {"cuMemFree_v2", "cuEventDestroy_v2"}) {
    ScopedVariable fails("FAKE_FAILS", function);
    const std::string output = run("release");
    EXPECT_NE(output.find("DriverError 719: a kernel failed\n"), std::string::npos) << output;
  }
}

TEST_F(FakeDriver, AnOrdinalOutOfRangeIsRefused) {
  compile();
  EXPECT_EQ(run("ordinal"), "DriverError 101: there is no GPU 2: this process sees 2, numbered "
                            "from 0\n");
}

TEST_F(FakeDriver, ACubinTheDriverDoesNotTakeComesWithAHint) {
  compile();
  ScopedVariable load("FAKE_LOAD", "209");
  std::string output = run("load");
  EXPECT_NE(output.find("DriverError 209: cuModuleLoadData failed"), std::string::npos) << output;
  EXPECT_NE(output.find("the driver's (12)"), std::string::npos) << output;
  EXPECT_NE(output.find("SAGEBWD_NVRTC"), std::string::npos) << output;
}

} // namespace
