//===- protocol.h - What a tuner and its worker say to each other -----------===//
//
// One JSON object a line, in both directions over one socket: the worker's standard input. Machine
// code goes by a file (cubins.h). The worker's standard output is free for whatever a library
// prints. What does not parse is the other side's failure, never this side's.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/tuner/worker/bench.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd::tuner {

/// Raise it when either side would misunderstand the other.
inline constexpr int kProtocol = 3;

/// From the tuner.
struct Order {
  enum Kind {
    open, ///< `setup`, `kernels`: the candidates; answered by opened or failed
    vet,  ///< `candidate`; answered by vetted or failed
    time, ///< `candidates`, `rounds`; answered by starting and timed for each launch, then done
  };
  Kind kind = open;
  BenchSetup setup;
  std::vector<BenchKernel> kernels;
  int candidate = -1;
  std::vector<int> candidates;
  int rounds = 0;
};

/// From the worker.
struct Report {
  enum Kind {
    hello,    ///< first of all; `protocol`
    opened,   ///< ready
    vetted,   ///< `candidate`, `vetting`
    starting, ///< `candidate` is about to be launched
    timed,    ///< `candidate`, `ms`
    done,     ///< of a time order
    failed,   ///< `detail`; the worker ends
  };
  Kind kind = hello;
  int protocol = 0;
  int candidate = -1;
  Vetting vetting;
  double ms = 0;
  std::string detail;
};

/// With the newline.
std::string line_of(const Order&);
std::string line_of(const Report&);
/// Nothing where a line is none of ours.
std::optional<Order> parse_order(const std::string& line);
std::optional<Report> parse_report(const std::string& line);

} // namespace sagebwd::tuner
