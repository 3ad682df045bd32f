//===- compile_bytes_test.cpp - Whether a kernel's bytes depend on its company --===//
//
// Caches and packs hold what a process compiled, beside whatever it compiled before and in other
// threads. Here kernels are compiled by processes of their own, one after the other in two orders,
// and in threads; all of a kernel's results must have the same bytes. Among them are those of
// mma.sync under qk16 for heads that fill a part of a width, which once spilled in a process with
// 16 threads.
//
//   SAGEBWD_TEST_COMPILES=25 SAGEBWD_TEST_THREADS=16 build/bin/templates_tests
//     --gtest_filter='CompileBytes.*'      # 12 kernels, each 25 times; else 3, each once
//
//===----------------------------------------------------------------------===//
#include "cache/key.h"
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/space.h"
#include "runtime/parallel_for.h"
#include "tests/templates/nvrtc_fixture.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <random>
#include <sys/wait.h>
#include <unistd.h>

using namespace sagebwd;

namespace {

int number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

std::vector<KernelSpec> kernels() {
  const Arch& arch = find_arch("sm_90a");
  std::vector<KernelSpec> list;
  const auto add = [&](AttentionSpec spec, std::optional<Family> family) {
    for (KernelKind kind : tiled_kernels())
      if (kind != KernelKind::backward)
        list.push_back(tiled_kernel(kind, resolved(spec), arch,
                                    family ? default_tile(kind, resolved(spec), arch, *family)
                                           : default_tile(kind, resolved(spec), arch)));
  };
  add({.head_dim = 40,
       .dtype = DType::fp16,
       .causal = Causal::top_left,
       .precision = Precision::qk16},
      Family::mma);
  if (!std::getenv("SAGEBWD_TEST_COMPILES"))
    return list;
  add({.head_dim = 96, .precision = Precision::qk16}, Family::mma);
  add({.head_dim = 160, .causal = Causal::bottom_right, .precision = Precision::qk16}, Family::mma);
  add({.head_dim = 128, .causal = Causal::top_left}, std::nullopt);
  return list;
}

/// Tells in one line what a compilation gave.
std::string summary(const KernelSpec& kernel) {
  const KernelSource source = emit(kernel); // compiled again, whatever tests remember
  const Compilation made = Nvrtc::instance().compile(source.name, source.text, kernel.arch.name,
                                                     /*want_ptx=*/false, source.options);
  return sha256_hex(made.cubin) + ", " + std::to_string(made.registers) + " registers, " +
         std::to_string(made.spill_bytes) + " bytes of spills";
}

/// Tells it of a process that has compiled nothing else: NVRTC is not open yet.
std::string summary_of_child(const KernelSpec& kernel) {
  int ends[2];
  if (::pipe(ends) != 0)
    return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text;
    try {
      text = summary(kernel);
    } catch (const std::exception& error) {
      text = error.what();
    }
    const ssize_t written = ::write(ends[1], text.data(), text.size());
    ::_exit(written < 0);
  }
  ::close(ends[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t count; (count = ::read(ends[0], bytes, sizeof(bytes))) > 0;)
    text.append(bytes, static_cast<size_t>(count));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

TEST(CompileBytes, DependOnNeitherThreadsNorWhatWasCompiledBefore) {
  const std::vector<KernelSpec> list = kernels();
  const size_t count = list.size();
  const auto threads = static_cast<size_t>(number("SAGEBWD_TEST_THREADS", 2));
  const auto times = static_cast<size_t>(number("SAGEBWD_TEST_COMPILES", 1));
  std::vector<std::string> alone;
  for (const KernelSpec& kernel : list)
    alone.push_back(summary_of_child(kernel));
  try {
    Nvrtc::instance();
  } catch (const LibraryError& error) {
    GTEST_SKIP() << "kernels are not compiled here, for want of NVRTC: " << error.what();
  }
  const auto name = [&](size_t i) {
    return emit(list[i]).name + " (" + to_string(list[i].tile) + ")";
  };
  for (size_t i = 0; i < count; ++i)
    std::printf("%s: %s\n", name(i).c_str(), alone[i].c_str());
  for (size_t i = 0; i < count; ++i)
    EXPECT_EQ(summary(list[i]), alone[i]) << name(i) << ", one after the other";
  for (size_t i = count; i-- > 0;)
    EXPECT_EQ(summary(list[i]), alone[i]) << name(i) << ", in the other order";

  std::vector<size_t> order;
  for (size_t i = 0; i < count * times; ++i)
    order.push_back(i % count);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  std::vector<std::string> found(order.size());
  parallel_for(order.size(), threads, [&](size_t i) { found[i] = summary(list[order[i]]); });
  for (size_t i = 0; i < order.size(); ++i)
    EXPECT_EQ(found[i], alone[order[i]]) << name(order[i]) << ", in " << threads << " threads";
}

} // namespace
