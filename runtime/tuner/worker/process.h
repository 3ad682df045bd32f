//===- process.h - A worker, seen from its tuner ----------------------------===//
#pragma once

#include "runtime/tuner/worker/line.h"
#include "runtime/tuner/worker/protocol.h"

#include <chrono>
#include <string>
#include <vector>

namespace sagebwd::tuner {

/// A child process that may crash, hang or say anything. Nothing here waits longer than it is told,
/// nor raises a signal in this process; what the thread's watch raises ends a wait.
class WorkerProcess {
public:
  using Milliseconds = std::chrono::milliseconds;

  /// Hands over `cubins`, a descriptor. Raises std::runtime_error where the command cannot be
  /// started.
  WorkerProcess(const std::vector<std::string>& command, int cubins);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// False where the worker is gone or does not take it within the limit.
  bool send(const Order&, Milliseconds limit);

  /// Garbage, too, where a line is no report.
  Heard hear(Report&, Milliseconds limit);

  /// Kills it where it still runs, and says how it ended: "was killed by signal 11 (Segmentation
  /// fault)", "ended with exit code 3". What it wrote to standard error follows.
  std::string end();

private:
  using Clock = std::chrono::steady_clock;
  /// Waits until the line can be read or, where asked, written, or until the deadline; collects
  /// standard error meanwhile.
  bool wait(bool to_write);
  void read_errors();
  bool reap(Milliseconds limit);

  int pid_ = -1;
  int socket_ = -1, errors_ = -1;
  int status_ = 0;
  bool reaped_ = false;
  Clock::time_point deadline_; ///< of the wait under way
  LineSocket line_;
  std::string error_text_; ///< the end of standard error
};

} // namespace sagebwd::tuner
