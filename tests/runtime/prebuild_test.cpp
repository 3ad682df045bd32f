//===- prebuild_test.cpp - Packs made by prebuild() ------------------------===//
//
// With a stand-in compiler, but for the cases at the end.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/prebuild.h"
#include "runtime/tuner/records.h"
#include "tests/cache/temp_directory.h"
#include "tests/runtime/prebuild_requests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <random>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace sagebwd;
using namespace sagebwd::test;
namespace fs = std::filesystem;

namespace {

//===--- The machinery -----------------------------------------------------===//

TEST(Prebuild, WritesAPackThatServesTheBuilder) {
  TempDirectory temp;
  StandIn compiler;
  const std::vector<KernelSpec> kernels = kernels_of(some_operations());
  size_t reported = 0;
  PrebuildRequest request = request_for(temp / "p.pack", kernels, compiler);
  const std::thread::id here = std::this_thread::get_id();
  request.progress = [&](const BuiltKernel&, size_t done, size_t total) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(done, ++reported);
    EXPECT_EQ(total, kernels.size());
  };
  const PrebuildResult result = prebuild(request);
  EXPECT_EQ(reported, kernels.size());
  EXPECT_EQ(result.kernels.size(), kernels.size());
  EXPECT_EQ(result.pack_bytes, fs::file_size(temp / "p.pack"));
  EXPECT_FALSE(fs::exists(temp / "p.pack.partial"));
  EXPECT_EQ(compiler.compiles, static_cast<int>(kernels.size()));

  StoreOptions options;
  options.packs = {temp / "p.pack"};
  CacheStore store(options);
  KernelBuilder::Policy offline;
  offline.offline = true;
  KernelBuilder builder(
      store, [](const KernelSpec& kernel) { return emit(kernel); },
      [](auto&, auto&) -> KernelBuilder::Compiled { throw std::logic_error("!"); }, offline);
  for (const auto& kernel : builder.build_all(kernels)) {
    EXPECT_TRUE(kernel->cached);
    EXPECT_FALSE(kernel->entry.cubin.empty());
  }
  EXPECT_EQ(store.counters().pack_hits, kernels.size());
}

TEST(Prebuild, TheSameInputsGiveTheSameBytesInAnyOrder) {
  TempDirectory temp;
  StandIn compiler;
  std::vector<KernelSpec> kernels = kernels_of(some_operations());
  prebuild(request_for(temp / "a.pack", kernels, compiler));
  std::shuffle(kernels.begin(), kernels.end(), std::mt19937(5));
  kernels.push_back(kernels[3]);
  prebuild(request_for(temp / "b.pack", kernels, compiler));
  EXPECT_TRUE(test::read_text(temp / "a.pack") == test::read_text(temp / "b.pack"));
}

TEST(Prebuild, RecordsGoIntoThePack) {
  TempDirectory temp;
  StandIn compiler;
  const TuningRecord record =
      record_of(operation(), KernelKind::forward, {Family::mma, 128, 128, 8, 2, 1});
  PrebuildRequest request =
      request_for(temp / "p.pack", kernels_of({operation()}, {record}), compiler);
  request.records = {record};
  EXPECT_EQ(prebuild(request).records, 1u);
  StoreOptions options;
  options.packs = {temp / "p.pack"};
  CacheStore store(options);
  std::optional<TuningRecord> found = store.load_record(record.key);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tile, record.tile);
}

TEST(Prebuild, GoesOnWhereAFailureEndedItAndNamesAllFailures) {
  TempDirectory temp;
  const std::vector<KernelSpec> kernels = kernels_of(some_operations());
  StandIn compiler;
  prebuild(request_for(temp / "whole.pack", kernels, compiler));

  compiler.compiles = 0;
  compiler.fails_for = "backward_dq";
  try {
    prebuild(request_for(temp / "p.pack", kernels, compiler));
    FAIL() << "a pack was written without some kernels";
  } catch (const CompileError& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.rfind("3 of " + std::to_string(kernels.size()) + " kernels", 0), 0u) << what;
    for (const KernelSpec& kernel : kernels)
      EXPECT_EQ(contains(what, kernel_name(kernel)), kernel.kind == KernelKind::backward_dq);
    EXPECT_TRUE(contains(what, temp / "p.pack.partial")) << what;
    EXPECT_EQ(error.log, "a log");
  }
  EXPECT_FALSE(fs::exists(temp / "p.pack"));
  EXPECT_EQ(compiler.compiles, static_cast<int>(kernels.size()));

  compiler.compiles = 0;
  compiler.fails_for = "";
  const PrebuildResult result = prebuild(request_for(temp / "p.pack", kernels, compiler));
  EXPECT_EQ(compiler.compiles, 3);
  EXPECT_EQ(std::count_if(result.kernels.begin(), result.kernels.end(),
                          [](const auto& kernel) { return kernel->cached; }),
            static_cast<long>(kernels.size()) - 3);
  EXPECT_TRUE(test::read_text(temp / "whole.pack") == test::read_text(temp / "p.pack"));
  EXPECT_FALSE(fs::exists(temp / "p.pack.partial"));
}

TEST(Prebuild, KernelsOfAnotherCompilerDoNotCount) {
  TempDirectory temp;
  const std::vector<KernelSpec> kernels = kernels_of({operation()});
  StandIn old;
  old.name = "stand-in 0";
  old.fails_for = "forward_d64";
  EXPECT_THROW(prebuild(request_for(temp / "p.pack", kernels, old)), CompileError);
  StandIn compiler;
  prebuild(request_for(temp / "p.pack", kernels, compiler));
  EXPECT_EQ(compiler.compiles, static_cast<int>(kernels.size()));
  StandIn again;
  prebuild(request_for(temp / "q.pack", kernels, again));
  EXPECT_TRUE(test::read_text(temp / "p.pack") == test::read_text(temp / "q.pack"));
}

TEST(Prebuild, BadFilesInTheWorkFolderAreCompiledAnew) {
  TempDirectory temp;
  const std::vector<KernelSpec> kernels = kernels_of({operation()});
  StandIn compiler;
  compiler.fails_for = "sagebwd_forward_d64";
  EXPECT_THROW(prebuild(request_for(temp / "p.pack", kernels, compiler)), CompileError);
  int spoilt = 0;
  for (const auto& file : fs::directory_iterator(temp / "p.pack.partial"))
    if (file.path().extension() == ".kernel" && ++spoilt <= 3)
      fs::resize_file(file.path(), spoilt == 1 ? 0 : file.file_size() / 2);
  compiler.compiles = 0;
  compiler.fails_for = "";
  prebuild(request_for(temp / "p.pack", kernels, compiler));
  EXPECT_EQ(compiler.compiles, 3 + 1);
  prebuild(request_for(temp / "q.pack", kernels, compiler));
  EXPECT_TRUE(test::read_text(temp / "p.pack") == test::read_text(temp / "q.pack"));
}

TEST(Prebuild, KilledAgainAndAgainItEndsWithTheSameBytes) {
  TempDirectory temp;
  const std::vector<KernelSpec> kernels = kernels_of(some_operations());
  StandIn compiler;
  compiler.pause_us = 2000;
  prebuild(request_for(temp / "whole.pack", kernels, compiler));
  int killed = 0;
  for (int round = 0; round < 8; ++round) {
    pid_t child = ::fork();
    if (child == 0) {
      prebuild(request_for(temp / "p.pack", kernels, compiler));
      ::_exit(0);
    }
    ::usleep(static_cast<useconds_t>(5000 + 4000 * round));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    killed += WIFSIGNALED(status);
  }
  EXPECT_GT(killed, 0);
  prebuild(request_for(temp / "p.pack", kernels, compiler));
  EXPECT_TRUE(test::read_text(temp / "whole.pack") == test::read_text(temp / "p.pack"));
  size_t files = 0;
  for (const auto& file : fs::directory_iterator(temp.path()))
    files += file.is_directory() || file.file_size() > 0; // an empty one stays for a minute
  EXPECT_EQ(files, 2u) << "leftovers";
}

TEST(Prebuild, TwoOfOneFileAtOnceGiveAnErrorToTheSecond) {
  TempDirectory temp;
  const std::vector<KernelSpec> kernels = kernels_of({operation()});
  StandIn slow, other;
  PrebuildRequest request = request_for(temp / "p.pack", kernels, slow);
  std::string why;
  request.progress = [&](const BuiltKernel&, size_t done, size_t) {
    if (done == 1)
      why = message_of([&] { prebuild(request_for(temp / "p.pack", kernels, other)); });
  };
  prebuild(request);
  EXPECT_TRUE(contains(why, "another process is building it")) << why;
  EXPECT_TRUE(contains(why, temp / "p.pack")) << why;
  EXPECT_EQ(other.compiles, 0);
  EXPECT_EQ(Pack::open(temp / "p.pack")->digests().size(), kernels.size());
}

TEST(Prebuild, WhatIsNoCompileErrorEndsItAtOnce) {
  TempDirectory temp;
  StandIn compiler;
  PrebuildRequest request = request_for(temp / "p.pack", kernels_of(some_operations()), compiler);
  request.progress = [](const BuiltKernel&, size_t done, size_t) {
    if (done == 2)
      throw std::runtime_error("enough");
  };
  EXPECT_EQ(message_of([&] { prebuild(request); }), "enough");
  EXPECT_FALSE(fs::exists(temp / "p.pack"));
  request.progress = nullptr;
  request.compile = [](auto&, auto&) -> KernelBuilder::Compiled {
    throw LibraryError("no compiler");
  };
  request.output = temp / "q.pack";
  EXPECT_EQ(message_of([&] { prebuild(request); }), "no compiler");
  EXPECT_FALSE(fs::exists(temp / "q.pack.partial")) << "an empty folder stayed";
}

TEST(Prebuild, WhatMayNotBeKeptIsNotPacked) {
  TempDirectory temp;
  StandIn compiler;
  PrebuildRequest request = request_for(temp / "p.pack", kernels_of({operation()}), compiler);
  request.compile = [&](const KernelSource& source, const KernelSpec& spec) {
    return KernelBuilder::Compiled{compiler(source, spec).entry, /*keep=*/false};
  };
  EXPECT_TRUE(contains(message_of([&] { prebuild(request); }), "packs take sound kernels only"));
  EXPECT_FALSE(fs::exists(temp / "p.pack"));
}

TEST(Prebuild, AnOutputThatCannotBeWrittenIsRefusedBeforeAnythingIsCompiled) {
  TempDirectory temp;
  StandIn compiler;
  const std::vector<KernelSpec> kernels = kernels_of({operation()});
  fs::create_directory(temp / "folder");
  test::write_text(temp / "taken.partial", "a file");
  fs::create_directory(temp / "open.partial");
  ::chmod((temp / "open.partial").c_str(), 0777);
  for (const char* name : {"folder", "none/p.pack", "taken", "open"}) {
    std::string why = message_of([&] { prebuild(request_for(temp / name, kernels, compiler)); });
    EXPECT_TRUE(contains(why, temp / name)) << why;
  }
  EXPECT_TRUE(contains(message_of([&] { prebuild(request_for("/dev/null", kernels, compiler)); }),
                       "no regular file"));
  EXPECT_EQ(compiler.compiles, 0);
  EXPECT_EQ(test::read_text(temp / "taken.partial"), "a file");
}

TEST(Prebuild, AFullDiskIsAnErrorAndWhatFitsIsKept) {
  TempDirectory temp;
  StandIn compiler;
  const std::vector<KernelSpec> kernels = kernels_of({operation()});
  pid_t child = ::fork();
  if (child == 0) {
    // A mount of our own, seen by this process only.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", temp.path().c_str(), "tmpfs", 0, "size=300k,mode=700") != 0)
      ::_exit(77);
    const std::string why =
        message_of([&] { prebuild(request_for(temp / "p.pack", kernels, compiler)); });
    if (!contains(why, "No space left on device") || !contains(why, temp / "p.pack"))
      ::_exit(11);
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(temp.path()))
      names.push_back(file.path().filename());
    if (names != std::vector<std::string>{"p.pack.partial"})
      ::_exit(12);
    const int first = compiler.compiles;
    if (::mount("tmpfs", temp.path().c_str(), "tmpfs", MS_REMOUNT, "size=64m,mode=700") != 0)
      ::_exit(13);
    const PrebuildResult result = prebuild(request_for(temp / "p.pack", kernels, compiler));
    const bool resumed = compiler.compiles - first < static_cast<int>(kernels.size());
    ::_exit(resumed && Pack::open(temp / "p.pack")->digests().size() == kernels.size() ? 0 : 14);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "mounting a small file system is not permitted here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Prebuild, OtherFilesInTheWorkFolderStay) {
  TempDirectory temp;
  fs::create_directory(temp / "p.pack.partial");
  ::chmod((temp / "p.pack.partial").c_str(), 0700);
  test::write_text(temp / "p.pack.partial/thesis.txt", "mine");
  StandIn compiler;
  prebuild(request_for(temp / "p.pack", kernels_of({operation()}), compiler));
  EXPECT_EQ(test::read_text(temp / "p.pack.partial/thesis.txt"), "mine");
}

TEST(Prebuild, AWorkFolderThatIsNotItsOwnIsLeftAlone) {
  TempDirectory temp;
  StandIn compiler;
  const std::vector<KernelSpec> kernels = kernels_of(some_operations());
  ASSERT_TRUE(CacheStore(temp / "precious")
                  .publish(make_key({{"name", "precious"}}), {.kernel_name = "precious"}));
  const auto kernel_files = [&](const std::string& folder) {
    return std::count_if(fs::directory_iterator(folder), fs::directory_iterator(),
                         [](const auto& item) { return item.path().extension() == ".kernel"; });
  };
  fs::create_directory_symlink(temp / "precious", temp / "a.pack.partial");
  fs::copy(temp / "precious", temp / "b.pack.partial");
  fs::permissions(temp / "b.pack.partial", fs::perms::owner_all);
  EXPECT_TRUE(contains(
      message_of([&] { prebuild(request_for(temp / "a.pack", kernels, compiler)); }), "is a link"));
  EXPECT_TRUE(
      contains(message_of([&] { prebuild(request_for(temp / "b.pack", kernels, compiler)); }),
               "no work folder"));
  std::ofstream(temp / "c.pack.partial") << "a thesis";
  EXPECT_TRUE(
      contains(message_of([&] { prebuild(request_for(temp / "c.pack", kernels, compiler)); }),
               "c.pack.partial is there and is no folder; remove it, or name another file"));
  EXPECT_EQ(fs::file_size(temp / "c.pack.partial"), 8u);
  EXPECT_EQ(compiler.compiles, 0);
  EXPECT_EQ(kernel_files(temp / "precious"), 1);
  EXPECT_EQ(kernel_files(temp / "b.pack.partial"), 1);
}

//===--- With NVRTC --------------------------------------------------------===//

TEST(PrebuildWithNvrtc, KilledAndResumedItGivesTheBytesOfAnUninterruptedRun) {
  TempDirectory temp;
  WantedOperation forward = operation("sm_80", 64);
  forward.backward = false;
  PrebuildRequest request;
  request.kernels = kernels_of({forward});
  request.output = temp / "whole.pack";
  const PrebuildResult whole = prebuild(request);
  for (const auto& kernel : whole.kernels) {
    EXPECT_EQ(kernel->entry.compiler, Nvrtc::instance().identity());
    EXPECT_FALSE(kernel->cached);
  }
  request.output = temp / "p.pack";
  request.progress = [](const BuiltKernel&, size_t done, size_t) {
    if (done == 2)
      throw std::runtime_error("interrupted");
  };
  EXPECT_EQ(message_of([&] { prebuild(request); }), "interrupted");
  request.progress = nullptr;
  const PrebuildResult resumed = prebuild(request);
  EXPECT_GE(std::count_if(resumed.kernels.begin(), resumed.kernels.end(),
                          [](const auto& kernel) { return kernel->cached; }),
            2);
  EXPECT_TRUE(test::read_text(temp / "whole.pack") == test::read_text(temp / "p.pack"));
}

} // namespace
