//===- worker.cpp - The process that runs candidates ----------------------===//

#include "runtime/tuner/worker/worker.h"

#include "runtime/tuner/worker/cubins.h"
#include "runtime/tuner/worker/line.h"
#include "runtime/tuner/worker/protocol.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <random>
#include <sys/prctl.h>
#include <unistd.h>

namespace sagebwd::tuner {
namespace {

/// The launches of each candidate that are not timed: the first launch is slow, and clock rates
/// rise.
constexpr int kWarmupRounds = 2;

Report about(Report::Kind kind, int candidate) {
  Report report;
  report.kind = kind;
  report.candidate = candidate;
  return report;
}

/// Each round has another order: what runs right before a candidate may change the clock rate at
/// which it runs. In a fixed order equal kernels differed by several per cent.
void time_all(Bench& bench, const std::vector<BenchKernel>& kernels, const Order& order,
              LineSocket& line) {
  std::vector<int> candidates = order.candidates;
  std::mt19937 random; // the same orders in every run
  for (int round = -kWarmupRounds; round < order.rounds; ++round) {
    std::shuffle(candidates.begin(), candidates.end(), random);
    for (int candidate : candidates) {
      line.say(line_of(about(Report::starting, candidate)));
      Report report = about(Report::timed, candidate);
      report.ms = bench.time_ms(kernels.at(static_cast<size_t>(candidate)));
      if (round >= 0)
        line.say(line_of(report));
    }
  }
  line.say(line_of(about(Report::done, -1)));
}

} // namespace

int run_worker(Bench& bench) {
  // A candidate that never returns must not outlive a tuner that was killed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::fflush(stdout);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);

  LineSocket line(kSocket);
  Report hello = about(Report::hello, -1);
  hello.protocol = kProtocol;
  line.say(line_of(hello));
  std::vector<BenchKernel> kernels;
  try {
    std::string text;
    while (line.hear(text) == Heard::line) {
      std::optional<Order> order = parse_order(text);
      if (!order) // not an order of the protocol
        return 1;
      switch (order->kind) {
      case Order::open:
        kernels = std::move(order->kernels);
        for (std::vector<BenchKernel>* list : {&kernels, &order->setup.operation})
          for (BenchKernel& kernel : *list)
            read_cubin(kCubins, kernel);
        bench.open(order->setup);
        line.say(line_of(about(Report::opened, -1)));
        break;
      case Order::vet: {
        Report report = about(Report::vetted, order->candidate);
        report.vetting = bench.vet(kernels.at(static_cast<size_t>(order->candidate)));
        line.say(line_of(report));
        break;
      }
      case Order::time:
        time_all(bench, kernels, *order, line);
        break;
      }
    }
    return 0;
  } catch (const std::exception& error) {
    Report report = about(Report::failed, -1);
    report.detail = error.what();
    line.say(line_of(report));
    return 1;
  }
}

} // namespace sagebwd::tuner
