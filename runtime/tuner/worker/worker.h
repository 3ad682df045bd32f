//===- worker.h - The process that runs candidates ------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

namespace sagebwd::tuner {

/// The descriptors of a worker's end of the socket and of the machine code.
inline constexpr int kSocket = 0, kCubins = 3;

/// Serves a tuner until the tuner closes the socket or an order fails, and returns the exit code.
/// If the tuner ends for any reason, the process ends. From this call on, standard output goes to
/// standard error.
int run_worker(Bench&);

} // namespace sagebwd::tuner
