//===- trials.cpp - Compare candidate tiles in worker processes -----------===//

#include "runtime/tuner/trials.h"

#include "runtime/tuner/selection.h"
#include "runtime/tuner/worker/cubins.h"
#include "runtime/tuner/worker/process.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

namespace sagebwd::tuner {
namespace {

using Milliseconds = std::chrono::milliseconds;

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2g", value);
  return text;
}

class Trials {
public:
  Trials(const std::vector<std::string>& command, const BenchSetup& setup,
         std::vector<Candidate>& candidates, const TrialLimits& limits,
         const TrialProgress& progress)
      : command_(command), exact_(setup.exact), limits_(limits), progress_(progress),
        vet_ms_(candidates.size(), 0) {
    open_.setup = setup;
    for (BenchKernel& kernel : open_.setup.operation)
      cubins_.add(kernel);
    for (Candidate& candidate : candidates)
      if (candidate.tried.outcome.empty()) {
        cubins_.add(candidate.kernel);
        open_.kernels.push_back(candidate.kernel);
        field_.push_back(&candidate.tried);
      }
  }

  void run() {
    vet_all();
    while (!time_all()) // if a candidate drops out, the others compete again
      for (TriedTile* tried : field_)
        tried->ms.clear();
    for (int index : alive()) {
      TriedTile& tried = *field_[index];
      tried.outcome = "timed";
      tried.median_ms = median_of(tried.ms);
      tried.mad_ms = mad_of(tried.ms);
    }
  }

private:
  std::vector<int> alive() const {
    std::vector<int> indices;
    for (size_t i = 0; i < field_.size(); ++i)
      if (field_[i]->outcome.empty())
        indices.push_back(static_cast<int>(i));
    return indices;
  }

  void start();
  void vet_all();
  /// Times all candidates. Returns false if a candidate has dropped out.
  bool time_all();
  int rounds_for(const std::vector<int>& indices) const;
  /// Drops a candidate; its worker is lost, too.
  void drop(int index, const std::string& outcome, const std::string& detail);
  /// Drops it with the outcome that tells how the worker failed.
  void drop(int index, Heard, const Report&, Milliseconds limit);
  void report(const char* stage, int index, int done, int total) const {
    if (progress_)
      progress_(stage, field_[index]->tile, done, total);
  }

  const std::vector<std::string>& command_;
  const bool exact_;
  Order open_;
  Cubins cubins_;
  /// The tiles that take part; orders and reports use indices into this.
  std::vector<TriedTile*> field_;
  const TrialLimits& limits_;
  const TrialProgress& progress_;
  std::vector<double> vet_ms_;

  std::unique_ptr<WorkerProcess> worker_;
  bool untouched_ = false; ///< the worker has run only the default tile
};

void Trials::start() {
  // A start may fail once by chance, for example because memory is short; the second failure is an
  // error.
  std::string why;
  for (int attempt = 0; attempt < 2; ++attempt) {
    worker_ = std::make_unique<WorkerProcess>(command_, cubins_.descriptor());
    untouched_ = true;
    Report hello, opened;
    Heard heard = worker_->hear(hello, limits_.open);
    if (heard == Heard::line && hello.kind == Report::hello && hello.protocol != kProtocol)
      throw TuneError(
          "the tuner's worker '" + llvm::join(command_, " ") + "' is of another version: it " +
          "speaks protocol " + std::to_string(hello.protocol) + ", this library " +
          std::to_string(kProtocol) + ". Name this version's with SAGEBWD_TUNE_WORKER.");
    const bool greeted = heard == Heard::line && hello.kind == Report::hello;
    if (greeted) {
      worker_->send(open_, limits_.open);
      heard = worker_->hear(opened, limits_.open);
      if (heard == Heard::line && opened.kind == Report::opened)
        return;
    }
    if (heard == Heard::line && opened.kind == Report::failed)
      why = opened.detail;
    else if (heard == Heard::nothing)
      why = "it did nothing within " + std::to_string(limits_.open.count()) + " ms";
    else
      why = (heard == Heard::gone ? "it " : "it talked nonsense and ") + worker_->end();
    worker_.reset();
    if (heard == Heard::nothing)
      break; // after a timeout, waiting again would take too long
  }
  throw TuneError("nothing can be tuned: the tuner's worker '" + llvm::join(command_, " ") +
                  "' does not start: " + why);
}

void Trials::drop(int index, const std::string& outcome, const std::string& detail) {
  worker_.reset();
  TriedTile& tried = *field_[index];
  tried.outcome = outcome;
  tried.detail = detail;
  tried.ms.clear();
  if (index == 0)
    throw TuneError("the default tile, " + tried.tile + ", dropped out itself (" + outcome +
                    "): " + detail);
}

void Trials::drop(int index, Heard heard, const Report& report, Milliseconds limit) {
  if (heard == Heard::line && report.kind == Report::failed)
    return drop(index, "failed", report.detail);
  const std::string ended = worker_->end();
  switch (heard) {
  case Heard::gone:
    return drop(index, "crashed", "its worker " + ended);
  case Heard::nothing:
    return drop(index, "hung", "nothing came within " + std::to_string(limit.count()) + " ms");
  default:
    return drop(index, "garbled", "its worker said what no worker says");
  }
}

void Trials::vet_all() {
  std::vector<int> queue = alive();
  const int total = static_cast<int>(queue.size());
  // The first limit is that of the default tile; its duration sets the limit of the others.
  Milliseconds limit = limits_.open;
  for (int done = 0; done < total;) {
    const int index = queue[done];
    Order order;
    order.kind = Order::vet;
    order.candidate = index;
    Report answer;
    Heard heard = Heard::gone;
    if (!worker_)
      start();
    const bool asked = worker_->send(order, limits_.open);
    const auto start = std::chrono::steady_clock::now();
    if (asked)
      heard = worker_->hear(answer, limit);
    else
      heard = worker_->hear(answer, Milliseconds(0)); // sent before it ended
    ++done;
    const bool sound =
        heard == Heard::line && answer.kind == Report::vetted && answer.candidate == index;
    // If an earlier candidate of this worker may have caused the failure, the candidate is tried
    // once more in a fresh worker. A hang is not tried again, because it takes long.
    const bool first_in_worker = untouched_;
    untouched_ = false;
    if (!first_in_worker && heard != Heard::nothing && !(sound && answer.vetting.wrong.empty())) {
      worker_.reset();
      --done;
      continue;
    }
    report("vetting", index, done, total);
    if (!sound) {
      drop(index, heard, answer, limit);
    } else if (!answer.vetting.wrong.empty()) {
      drop(index, "wrong", answer.vetting.wrong);
    } else if (exact_ && !answer.vetting.identical) {
      TriedTile& tried = *field_[index];
      tried.outcome = "inexact";
      tried.detail = "not the default's bits (rel. L2 " + short_number(answer.vetting.rel_l2) +
                     "): summed in another order, which deterministic=off allows";
    }
    vet_ms_[index] = answer.vetting.ms;
    if (index == 0) {
      const auto took = std::chrono::steady_clock::now() - start;
      limit = std::max(limits_.vet, std::chrono::duration_cast<Milliseconds>(10 * took));
    }
  }
}

int Trials::rounds_for(const std::vector<int>& indices) const {
  double round_ms = 0;
  for (int index : indices)
    // Milliseconds, including 0.2 for the write that evicts the L2 cache.
    round_ms += vet_ms_[index] + 0.2;
  const double fit = static_cast<double>(limits_.timing.count()) / std::max(round_ms, 1e-3);
  const int most = std::max(limits_.rounds, kFewestRounds);
  return fit >= most ? most : std::max(kFewestRounds, static_cast<int>(fit));
}

bool Trials::time_all() {
  const std::vector<int> indices = alive();
  Order order;
  order.kind = Order::time;
  order.candidates = indices;
  order.rounds = rounds_for(indices);
  const int total = order.rounds * static_cast<int>(indices.size());
  int running = indices.front(), done = 0;
  if (!worker_)
    start();
  const bool sent = worker_->send(order, limits_.open);
  while (true) {
    const auto limit =
        limits_.launch + Milliseconds(static_cast<int64_t>(std::ceil(20 * vet_ms_[running])));
    Report answer;
    const Heard heard = worker_->hear(answer, sent ? limit : Milliseconds(0));
    const bool known = includes(indices, answer.candidate);
    if (heard == Heard::line && answer.kind == Report::starting && known) {
      running = answer.candidate;
    } else if (heard == Heard::line && answer.kind == Report::timed && known &&
               answer.candidate == running && answer.ms > 0) {
      field_[running]->ms.push_back(answer.ms);
      report("timing", running, ++done, total);
    } else if (heard == Heard::line && answer.kind == Report::done && done == total) {
      return true;
    } else {
      drop(running, heard, answer, limit);
      return false;
    }
  }
}

} // namespace

void run_trials(const std::vector<std::string>& worker, const BenchSetup& setup,
                std::vector<Candidate>& candidates, const TrialLimits& limits,
                const TrialProgress& progress) {
  if (candidates.empty() || !candidates.front().tried.outcome.empty())
    throw TuneError("there is no default to compare with");
  Trials(worker, setup, candidates, limits, progress).run();
}

} // namespace sagebwd::tuner
