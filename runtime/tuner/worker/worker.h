//===- worker.h - The process that runs candidates --------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

namespace sagebwd::tuner {

/// A worker's end of the line, and of the machine code.
inline constexpr int kSocket = 0, kCubins = 3;

/// Serves a tuner until it hangs up or an order fails; gives the exit code. Ends with the tuner,
/// however that ends. Standard output goes to standard error from here on.
int run_worker(Bench&);

} // namespace sagebwd::tuner
