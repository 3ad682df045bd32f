//===- gpu_bench.h - Run candidates on a GPU ------------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

#include <memory>

namespace sagebwd {

/// The bytes of device memory that tuning a kernel of the operation needs. The spec must be
/// resolved.
double bench_bytes(KernelKind, const ResolvedSpec&, const Problem&);

/// Runs kernels on scratch buffers of random normal inputs. Everything runs on the null stream; no
/// other code uses it, because this process is the tuner's worker.
class GpuBench : public Bench {
public:
  GpuBench();
  ~GpuBench() override;
  /// Raises LibraryError, DriverError (also if memory is short) or SpecError.
  void open(const BenchSetup&) override;
  Vetting vet(const BenchKernel&) override;
  double time_ms(const BenchKernel&) override;

private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace sagebwd

namespace sagebwd {

/// The main function of `sagebwd tune-worker`: a worker with a GPU, whose tuner is at standard
/// input. If a person started the command, it prints a message and returns exit code 2.
int tune_worker_main();

} // namespace sagebwd
