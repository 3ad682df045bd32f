//===- process.h - A worker process as its tuner sees it ------------------===//
#pragma once

#include "runtime/tuner/worker/line.h"
#include "runtime/tuner/worker/protocol.h"

#include <chrono>
#include <string>
#include <vector>

namespace sagebwd::tuner {

/// A child process that may crash, hang or send anything. No function here waits longer than its
/// limit or raises a signal in this process. An error that the thread's watch (ScopedWatch) raises
/// ends a wait.
class WorkerProcess {
public:
  using Milliseconds = std::chrono::milliseconds;

  /// Starts the command, which inherits the descriptor `cubins`. Raises std::runtime_error if the
  /// command cannot be started.
  WorkerProcess(const std::vector<std::string>& command, int cubins);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// Returns false if the worker is gone or does not receive the order within the limit.
  bool send(const Order&, Milliseconds limit);

  /// Returns Heard::garbage also for a line that is not a report.
  Heard hear(Report&, Milliseconds limit);

  /// Kills the process if it still runs, and says how it ended, e.g. "was killed by signal 11
  /// (Segmentation fault)" or "ended with exit code 3", followed by its standard error.
  std::string end();

private:
  using Clock = std::chrono::steady_clock;
  /// Waits until the socket can be read or, if `to_write`, written, or until the deadline.
  /// Meanwhile it collects standard error.
  bool wait(bool to_write);
  void read_errors();
  bool reap(Milliseconds limit);

  int pid_ = -1;
  int socket_ = -1, errors_ = -1;
  int status_ = 0;
  bool reaped_ = false;
  Clock::time_point deadline_; ///< of the current wait
  LineSocket line_;
  std::string error_text_; ///< the end of standard error
};

} // namespace sagebwd::tuner
