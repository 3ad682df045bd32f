//===- pack_items.h - What tests of packs put into them --------------------===//
#pragma once

#include "cache/pack.h"
#include "cache/record.h"
#include "cache/store.h"
#include "tests/cache/processes.h"
#include "tests/cache/temp_directory.h"

#include <filesystem>
#include <functional>
#include <iterator>
#include <sys/wait.h>
#include <unistd.h>

namespace sagebwd {

inline constexpr uid_t kNobody = 65534;

inline CacheKey pack_key(int number, const std::string& arch = "sm_80") {
  return make_key({{"arch", arch}, {"number", std::to_string(number)}});
}

inline std::string kernel_number(int number, int lowest_driver = 12000,
                                 const std::string& arch = "sm_80", size_t cubin_bytes = 500) {
  CacheEntry entry;
  entry.kernel_name = "kernel_" + std::to_string(number);
  entry.arch = arch;
  entry.compiler = "stand-in 1";
  entry.lowest_driver = lowest_driver;
  entry.cubin.assign(cubin_bytes + static_cast<size_t>(number % 7), static_cast<char>(number));
  return serialize(pack_key(number, arch), entry);
}

inline TuningRecord record() {
  TuningRecord record;
  record.key = make_key({{"schema", kTuningSchema}, {"arch", "sm_90a"}, {"gpu", "NVIDIA X"}});
  record.tile = "mma 128x64 w8 s2 b1";
  record.default_tile = "mma 64x64 w4 s1 b2";
  record.compiler = "stand-in 1";
  return record;
}

inline std::vector<std::string> some_items() {
  std::vector<std::string> items = {serialize(record())};
  for (int i = 0; i < 20; ++i)
    items.push_back(kernel_number(i));
  return items;
}

/// Gives what an attempt is refused with.
inline std::string refusal(const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (const PackError& error) {
    return error.what();
  }
  return "";
}
inline std::string refusal(const std::string& path) {
  return refusal([&] { Pack::open(path); });
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline size_t count_files_in(const std::string& path) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path),
                                           std::filesystem::directory_iterator()));
}

/// Runs in a child, which reports by its exit status; -1 where it was killed.
inline int in_child(const std::function<int()>& work) {
  pid_t child = ::fork();
  if (child == 0)
    ::_exit(work());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

} // namespace sagebwd
