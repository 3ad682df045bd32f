//===- tune_fixture.h - tune() with a stand-in compiler and bench ----------===//
//
// In real worker processes, each test in a directory of its own.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/choice.h"
#include "generator/space.h"
#include "runtime/parallel_for.h"
#include "runtime/tuner/tile_choice.h"
#include "tests/runtime/tuner_bench.h"

#include <gtest/gtest.h>

#include <sys/wait.h>

namespace sagebwd {

using namespace std::chrono_literals;

inline constexpr const char* kFast = "mma 128x128 w8 s2 b1"; ///< of sm_80's forward at D 128

class Tune : public testing::Test {
protected:
  Tune() {
    request_.problem = {1, 32, 32, 8192, 8192};
    request_.worker = test::test_worker();
    request_.kernels = {KernelKind::forward};
    request_.limits = {20000ms, 1000ms, 1000ms, 1000ms, 5};
    request_.wait_limit = 30s;
  }
  /// A compiler whose kernels do what `traits_` says of their tile, or 1 ms a launch.
  std::shared_ptr<const BuiltKernel> build(const KernelSpec& spec) {
    const std::string tile = to_string(spec.tile);
    if (traits_[tile] == "refused")
      throw CompileError("ptxas has no registers", "", "");
    if (traits_[tile] == "missing")
      throw OfflineError("it is in no place");
    auto built = std::make_shared<BuiltKernel>();
    built->spec = spec;
    built->entry.kernel_name = kernel_name(spec);
    built->entry.cubin = traits_[tile];
    built->entry.spill_bytes = traits_[tile] == "spills" ? 64 : 0;
    return built;
  }
  TuneSurroundings around(Records& records) {
    return {records,
            {"Some GPU", 108, find_arch("sm_80"), "13.0"},
            [this](const KernelSpec& spec) {
              std::lock_guard lock(mutex_);
              return build(spec);
            },
            [this] { return compiler_; },
            rank_};
  }
  /// As a new process would find it.
  Tuned tuned() {
    Records records(store());
    return tune(request_, around(records)).at(0);
  }
  TileConfig chosen(TuneMode mode) {
    Records records(store());
    return chosen_tile(mode, KernelKind::forward, request_, around(records));
  }
  CacheStore& store() {
    stores_.push_back(std::make_unique<CacheStore>(StoreOptions{directory_, {}}));
    return *stores_.back();
  }
  CacheKey key() {
    Records records(store());
    return record_key(KernelKind::forward, resolved(request_.spec), around(records).gpu,
                      bucket_of(KernelKind::forward, request_.problem, 108));
  }
  TileConfig default_() {
    return default_tile(KernelKind::forward, resolved(request_.spec), find_arch("sm_80"));
  }
  size_t workers() const {
    const std::string log = test::read_text(temp_ / "log");
    return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
  }
  /// The message of what must fail.
  template <typename Error> std::string failure(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "it did not fail";
    return "";
  }
  /// Exit code of a child process.
  static int child(const std::function<int()>& work) { return wait_for(start(work)); }
  static pid_t start(const std::function<int()>& work) {
    const pid_t process = ::fork();
    if (process == 0)
      ::_exit(work());
    return process;
  }
  static int wait_for(pid_t process) {
    int status = 0;
    ::waitpid(process, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  test::TempDirectory temp_;
  test::ScopedVariable role_{test::kWorkerVariable, "serves"};
  test::ScopedVariable log_{test::kWorkerLog, temp_ / "log"};
  std::string directory_ = temp_ / "cache";
  std::string compiler_ = "nvrtc 13.0";
  int rank_ = 0;
  TuneRequest request_;
  std::map<std::string, std::string> traits_;
  std::mutex mutex_; ///< of traits_
  std::vector<std::unique_ptr<CacheStore>> stores_;
};

} // namespace sagebwd
