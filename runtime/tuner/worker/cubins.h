//===- cubins.h - Pass machine code to workers ----------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

namespace sagebwd::tuner {

/// A file without a name (memfd) that holds the machine code of kernels; workers inherit its
/// descriptor. The file takes no space on a disk, nobody else can write to it, and nothing of it
/// remains if a process is killed.
class Cubins {
public:
  /// Raises std::runtime_error if the file cannot be made.
  Cubins();
  ~Cubins();
  Cubins(const Cubins&) = delete;
  Cubins& operator=(const Cubins&) = delete;

  int descriptor() const { return descriptor_; }
  /// Appends the kernel's machine code and stores its place in the kernel.
  void add(BenchKernel&);

private:
  int descriptor_;
  size_t bytes_ = 0;
};

/// Reads the machine code of a kernel that has a place in the file. Raises std::runtime_error.
void read_cubin(int descriptor, BenchKernel&);

} // namespace sagebwd::tuner
