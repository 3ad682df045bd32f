//===- protocol.h - Messages between a tuner and its worker ---------------===//
//
// Each message is one JSON object on one line. Both directions use one socket, which is the
// worker's standard input. Machine code is passed in a file (cubins.h). The worker's standard
// output is not used, because libraries may print there. A line that cannot be parsed is an error
// of the sender.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd::tuner {

/// Raise this number if tuner and worker of two versions would misunderstand each other.
inline constexpr int kProtocol = 3;

/// A message from the tuner.
struct Order {
  enum Kind {
    open, ///< has `setup` and `kernels` (the candidates); the answer is opened or failed
    vet,  ///< has `candidate`; the answer is vetted or failed
    time, ///< has `candidates` and `rounds`; the answers are starting and timed for each launch,
          ///< then done
  };
  Kind kind = open;
  BenchSetup setup;
  std::vector<BenchKernel> kernels;
  int candidate = -1;
  std::vector<int> candidates;
  int rounds = 0;
};

/// A message from the worker.
struct Report {
  enum Kind {
    hello,    ///< the first message; has `protocol`
    opened,   ///< the worker is ready
    vetted,   ///< has `candidate` and `vetting`
    starting, ///< `candidate` is about to be launched
    timed,    ///< has `candidate` and `ms`
    done,     ///< a time order is finished
    failed,   ///< has `detail`; the worker ends
  };
  Kind kind = hello;
  int protocol = 0;
  int candidate = -1;
  Vetting vetting;
  double ms = 0;
  std::string detail;
};

/// The message as a line, with the newline.
std::string line_of(const Order&);
std::string line_of(const Report&);
/// The message of a line, or nothing if the line is not valid.
std::optional<Order> parse_order(const std::string& line);
std::optional<Report> parse_report(const std::string& line);

} // namespace sagebwd::tuner
