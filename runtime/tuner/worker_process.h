//===- worker_process.h - A worker, seen from its tuner ---------------------===//
#pragma once

#include "runtime/tuner/protocol.h"

#include <chrono>
#include <string>
#include <vector>

namespace sagebwd::tuner {

/// A child process that may crash, hang or say anything. Nothing here waits longer than it is told,
/// nor raises a signal in this process.
class WorkerProcess {
public:
  using Milliseconds = std::chrono::milliseconds;

  /// Raises std::runtime_error where the command cannot be started.
  explicit WorkerProcess(const std::vector<std::string>& command);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// False where the worker is gone or does not take it within the limit.
  bool send(const Order&, Milliseconds limit);

  enum class Heard {
    report,
    gone,    ///< it ended, or closed the line
    nothing, ///< within the limit
    garbage, ///< what no worker of ours says
  };
  Heard hear(Report&, Milliseconds limit);

  /// Kills it where it still runs, and says how it ended: "was killed by signal 11 (Segmentation
  /// fault)", "ended with exit code 3". What it wrote to standard error follows.
  std::string end();

private:
  using Clock = std::chrono::steady_clock;
  /// Waits until the line can be read or, where asked, written; collects standard error meanwhile.
  bool wait(bool to_write, Clock::time_point deadline);
  void read_errors();
  bool reap(Milliseconds limit);

  int pid_ = -1;
  int socket_ = -1, errors_ = -1;
  int status_ = 0;
  bool reaped_ = false;
  std::string received_;
  size_t searched_ = 0;
  std::string error_text_; ///< the end of standard error
};

} // namespace sagebwd::tuner
