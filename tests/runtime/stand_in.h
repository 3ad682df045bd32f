//===- stand_in.h - A compiler for tests whose point is the cache ----------===//
#pragma once

#include "generator/emit.h"
#include "runtime/kernel_builder.h"

#include <atomic>
#include <fcntl.h>
#include <string>
#include <unistd.h>

namespace sagebwd::test {

inline KernelSpec spec_number(int number) {
  AttentionSpec attention;
  attention.group_q = number;
  return {KernelKind::forward, Pass::forward, attention, find_arch("sm_90a"), {}};
}

/// Gives what stands for the cubin of spec_number(number): some kilobytes, so that it is written in
/// more than one piece. The loop only appends, as ThreadSanitizer makes all else in it slow.
inline std::string cubin_of(const KernelSpec& spec) {
  const std::string part = "cubin of " + std::to_string(spec.attention.group_q) + ";";
  std::string cubin;
  for (int i = 0; i < 2000; ++i)
    cubin += part;
  return cubin;
}

/// Appends a byte a compile to a file, which counts them among processes whatever kills them.
class CompileLog {
public:
  explicit CompileLog(const std::string& path)
      : fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {}
  ~CompileLog() { ::close(fd_); }
  CompileLog(const CompileLog&) = delete;
  CompileLog& operator=(const CompileLog&) = delete;

  void add() const {
    if (::write(fd_, "x", 1) != 1)
      ::abort();
  }
  long count() const { return ::lseek(fd_, 0, SEEK_END); }

private:
  int fd_;
};

inline KernelSource emit_stand_in(const KernelSpec& spec) {
  const std::string name = "k" + std::to_string(spec.attention.group_q);
  return {name, "source of " + name, 128, 4096, {}};
}

inline KernelBuilder::Compiled compile_stand_in(const KernelSource& source,
                                                const KernelSpec& spec) {
  CacheEntry entry;
  entry.kernel_name = source.name;
  entry.arch = spec.arch.name;
  entry.compiler = "stand-in";
  entry.cubin = cubin_of(spec);
  return {std::move(entry), /*keep=*/true};
}

} // namespace sagebwd::test
