//===- cubins.h - Machine code on its way to the workers --------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

namespace sagebwd::tuner {

/// A file without a name that holds kernels' machine code: nothing on a disk to fill, to trust or
/// to leave behind, whoever is killed. Workers inherit it.
class Cubins {
public:
  /// Raises std::runtime_error.
  Cubins();
  ~Cubins();
  Cubins(const Cubins&) = delete;
  Cubins& operator=(const Cubins&) = delete;

  int descriptor() const { return descriptor_; }
  /// Says in the kernel where its machine code lies.
  void add(BenchKernel&);

private:
  int descriptor_;
  size_t bytes_ = 0;
};

/// The machine code of a kernel that says where it lies. Raises std::runtime_error.
void read_cubin(int descriptor, BenchKernel&);

} // namespace sagebwd::tuner
