//===- worker.cpp - The process that runs candidates -------------------------===//

#include "runtime/tuner/worker.h"

#include "runtime/tuner/protocol.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <map>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace sagebwd::tuner {
namespace {

/// Launches of each candidate before its timings count: the first is slow, clocks rise.
constexpr int kWarmupRounds = 2;

class Line {
public:
  explicit Line(int socket) : socket_(socket) {}

  /// False where the tuner is gone.
  bool say(const Report& report) {
    const std::string text = line_of(report);
    for (size_t done = 0; done < text.size();) {
      const ssize_t count = ::send(socket_, text.data() + done, text.size() - done, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR)
        continue;
      if (count <= 0)
        return false;
      done += static_cast<size_t>(count);
    }
    return true;
  }
  /// Nothing where the tuner is gone, or says what no tuner of ours says.
  std::optional<Order> hear() {
    size_t end;
    while ((end = received_.find('\n', searched_)) == std::string::npos) {
      searched_ = received_.size();
      char buffer[65536];
      const ssize_t count = ::recv(socket_, buffer, sizeof(buffer), 0);
      if (count < 0 && errno == EINTR)
        continue;
      if (count <= 0 || received_.size() > kLongestLine)
        return std::nullopt;
      received_.append(buffer, static_cast<size_t>(count));
    }
    std::optional<Order> order = parse_order(received_.substr(0, end));
    received_.erase(0, end + 1);
    searched_ = 0;
    return order;
  }

private:
  int socket_;
  std::string received_;
  size_t searched_ = 0; ///< of `received_`, without a newline
};

Report about(Report::Kind kind, int candidate) {
  Report report;
  report.kind = kind;
  report.candidate = candidate;
  return report;
}

void time_all(Bench& bench, const std::map<int, BenchKernel>& kernels, const Order& order,
              Line& line) {
  for (int round = -kWarmupRounds; round < order.rounds; ++round)
    for (int candidate : order.candidates) {
      line.say(about(Report::starting, candidate));
      Report report = about(Report::timed, candidate);
      report.ms = bench.time_ms(kernels.at(candidate));
      if (round >= 0)
        line.say(report);
    }
  line.say(about(Report::done, -1));
}

} // namespace

int run_worker(Bench& bench, int socket) {
  // A candidate that never returns must not outlive a tuner that was killed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::fflush(stdout);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);

  Line line(socket);
  Report hello = about(Report::hello, -1);
  hello.protocol = kProtocol;
  line.say(hello);
  std::map<int, BenchKernel> kernels;
  try {
    while (std::optional<Order> order = line.hear())
      switch (order->kind) {
      case Order::open:
        bench.open(order->setup);
        line.say(about(Report::opened, -1));
        break;
      case Order::add:
        kernels[order->candidate] = std::move(order->kernel);
        break;
      case Order::vet: {
        Report report = about(Report::vetted, order->candidate);
        report.vetting = bench.vet(kernels.at(order->candidate));
        line.say(report);
        break;
      }
      case Order::time:
        time_all(bench, kernels, *order, line);
        break;
      }
    return 0;
  } catch (const std::exception& error) {
    Report report = about(Report::failed, -1);
    report.detail = error.what();
    line.say(report);
    return 1;
  }
}

} // namespace sagebwd::tuner
