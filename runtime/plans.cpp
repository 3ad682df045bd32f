//===- plans.cpp - Compare the precisions on this machine's GPU -----------===//
#include "runtime/plans.h"

#include "generator/operation.h"
#include "runtime/on_gpu.h"
#include "runtime/tuner/selection.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// The operation, memory and timings of one precision.
struct Contender {
  Contender(const AttentionSpec& spec, int device, const reference::Inputs& in)
      : attention(spec, device),
        operands(attention, in,
                 {.layout = {}, .workspace_start = std::nullopt, .start = std::nullopt}) {}

  void run() {
    forward_watch.start();
    attention.forward(operands.forward);
    forward_watch.stop();
    backward_watch.start();
    attention.backward(operands.backward);
    backward_watch.stop();
    forward_ms.push_back(forward_watch.milliseconds());
    backward_ms.push_back(backward_watch.milliseconds());
  }

  Attention attention;
  Operands operands;
  driver::Stopwatch forward_watch, backward_watch;
  std::vector<double> forward_ms, backward_ms;
};

std::string name_of(const AttentionSpec& spec) {
  return std::string(to_string(spec.precision)) + ", " + value_text(spec.gradient_kernels);
}

} // namespace

std::string name_of(const PlanFigures& plan) {
  AttentionSpec spec;
  spec.precision = plan.precision, spec.gradient_kernels = plan.gradient_kernels;
  return name_of(spec);
}

std::vector<AttentionSpec> plans_on(const Arch& arch, const AttentionSpec& given,
                                    const Problem& problem, std::vector<std::string>& left_out) {
  std::vector<AttentionSpec> plans;
  const auto add = [&](AttentionSpec spec) {
    const Operation operation = Operation(resolved(spec), arch).for_call(problem);
    operation.distinct_kernels(); // raises if no tile fits one of them
    spec.gradient_kernels = operation.built()->gradient_kernels;
    plans.push_back(spec);
  };
  for (const auto& [precision, word] : Words<Precision>::all) {
    AttentionSpec spec = given;
    spec.precision = precision;
    try {
      add(spec);
    } catch (const SpecError& error) {
      left_out.push_back(std::string(word) + ": " + error.what());
      continue;
    }
    if (given.gradient_kernels != Backward::either)
      continue;
    spec.gradient_kernels =
        plans.back().gradient_kernels == Backward::fused ? Backward::split : Backward::fused;
    try {
      add(spec);
    } catch (const SpecError&) { // there is only one backward
    }
  }
  if (plans.empty())
    throw SpecError("no precision can be compared: " + left_out.front());
  return plans;
}

Problem problem_of_errors(const Problem& p) {
  return {.batch = 1,
          .heads = 1,
          .heads_kv = 1,
          .seq_q = std::min(p.seq_q, kErrorTokens),
          .seq_kv = std::min(p.seq_kv, kErrorTokens)};
}

std::vector<PlanFigures> compare_plans(const PlanRequest& request,
                                       std::vector<std::string>& left_out) {
  constexpr int kWarmUps = 2;
  const driver::DeviceInfo info = driver::device_info(request.device);
  const std::vector<AttentionSpec> specs = plans_on(arch_for_capability(info.major, info.minor),
                                                    request.spec, request.problem, left_out);
  const int plans = static_cast<int>(specs.size()), total = 2 + 3 * plans;
  int done = 0;
  const auto step = [&](const std::string& what) {
    if (request.progress)
      request.progress(what, done++, total);
  };
  const ResolvedSpec spec = resolved(specs.front());
  check(spec, request.problem);
  driver::DeviceScope scope(request.device);

  std::vector<PlanFigures> figures;
  step("FP64 reference");
  const reference::Inputs small = reference::random_inputs(
      problem_of_errors(request.problem), spec->head_dim, spec->dtype, 1, request.seed);
  const reference::Outputs<double> exact = reference::exact(small, *spec);
  for (const AttentionSpec& plan : specs) {
    step("errors of " + name_of(plan));
    Attention attention(plan, request.device);
    const reference::Outputs<float> run = run_on_gpu(attention, request.device, small);
    figures.push_back({.precision = plan.precision,
                       .gradient_kernels = plan.gradient_kernels,
                       .int8_products = which_int8(plan.precision).count(),
                       .forward_ms = 0,
                       .backward_ms = 0,
                       .o = reference::compare(run.o, exact.o),
                       .dq = reference::compare(run.dq, exact.dq),
                       .dk = reference::compare(run.dk, exact.dk),
                       .dv = reference::compare(run.dv, exact.dv)});
  }

  step("inputs");
  const reference::Inputs inputs =
      reference::random_inputs(request.problem, spec->head_dim, spec->dtype, 1, request.seed);
  std::vector<std::unique_ptr<Contender>> contenders;
  for (const AttentionSpec& plan : specs) {
    step("warming up " + name_of(plan));
    contenders.push_back(std::make_unique<Contender>(plan, request.device, inputs));
    for (int i = 0; i < kWarmUps; ++i)
      contenders.back()->run();
    contenders.back()->forward_ms.clear();
    contenders.back()->backward_ms.clear();
  }
  for (int round = 0; round < request.rounds; ++round) {
    if (round * plans % request.rounds < plans)
      step("timing");
    for (const auto& contender : contenders)
      contender->run();
  }
  for (size_t i = 0; i < figures.size(); ++i) {
    figures[i].forward_ms = median_of(contenders[i]->forward_ms);
    figures[i].backward_ms = median_of(contenders[i]->backward_ms);
  }
  return figures;
}

} // namespace sagebwd
