//===- gpu_bench.h - Candidates on a GPU ------------------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

#include <memory>

namespace sagebwd {

/// Bytes of device memory that tuning a kernel of the operation takes. The spec must be resolved.
double bench_bytes(KernelKind, const ResolvedSpec&, const Problem&);

/// Kernels on scratch buffers of random normal inputs. Everything runs on the null stream, which
/// nobody shares: the process is the tuner's worker.
class GpuBench : public Bench {
public:
  GpuBench();
  ~GpuBench() override;
  /// Raises LibraryError, DriverError (out of memory included) or SpecError.
  void open(const BenchSetup&) override;
  Vetting vet(const BenchKernel&) override;
  double time_ms(const BenchKernel&) override;

private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace sagebwd

namespace sagebwd {

/// What `sagebwd tune-worker` is: a worker with a GPU, whose tuner is at standard input. Says so
/// and gives exit code 2 where a person started it.
int tune_worker_main();

} // namespace sagebwd
