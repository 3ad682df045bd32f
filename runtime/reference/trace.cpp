//===- trace.cpp - The errors of the emulation against exact attention ----===//
#include "runtime/compile_width.h"
#include "runtime/parallel_for.h"
#include "runtime/reference/head.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

namespace sagebwd::reference {
namespace {

/// The sums for the figures; sums of parts of a tensor can be added.
struct ErrorSums {
  double x_x = 0, x_r = 0, r_r = 0, difference = 0, signed_difference = 0, magnitude = 0;

  template <typename T> void add(const std::vector<T>& x, const std::vector<double>& reference) {
    if (x.size() != reference.size())
      throw SpecError("cannot compare " + std::to_string(x.size()) + " values with " +
                      std::to_string(reference.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const double a = x[i], r = reference[i];
      x_x += a * a;
      x_r += a * r;
      r_r += r * r;
      difference += (a - r) * (a - r);
      signed_difference += a - r;
      magnitude += std::abs(r);
    }
  }
  void add(const ErrorSums& other) {
    x_x += other.x_x;
    x_r += other.x_r;
    r_r += other.r_r;
    difference += other.difference;
    signed_difference += other.signed_difference;
    magnitude += other.magnitude;
  }
  ErrorFigures figures() const {
    if (x_x == 0 && r_r == 0) // both are all zero, such as dS of a single key
      return {1, 0, 0};
    const double cosine = x_x == 0 || r_r == 0 ? 0 : x_r / (std::sqrt(x_x) * std::sqrt(r_r));
    const double rel_l2 = std::sqrt(difference) / std::sqrt(r_r);
    return {cosine, rel_l2, magnitude == 0 ? rel_l2 : signed_difference / magnitude};
  }
};

constexpr std::array<const char*, 8> kTensors = {"delta", "P", "dP", "dS", "O", "dQ", "dK", "dV"};

std::string short_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

void require_memory(double needed) {
  const auto available = static_cast<double>(available_memory().value_or(UINT64_MAX));
  if (constexpr double kGiB = 1 << 30; needed > available)
    throw SpecError("this takes about " + short_text(needed / kGiB) + " GiB of memory and " +
                    short_text(available / kGiB) +
                    " GiB are free: shorten the sequences or take fewer heads");
}

/// Bytes of q, k, v and dO in FP32.
double bytes_of_inputs(const Problem& p, int head_dim) {
  const double queries = static_cast<double>(p.heads) * static_cast<double>(p.seq_q);
  const double keys = static_cast<double>(p.heads_kv) * static_cast<double>(p.seq_kv);
  return static_cast<double>(p.batch) * head_dim * (queries + keys) * 8;
}

} // namespace

template <typename T>
ErrorFigures compare(const std::vector<T>& x, const std::vector<double>& reference) {
  ErrorSums sums;
  sums.add(x, reference);
  return sums.figures();
}
template ErrorFigures compare(const std::vector<float>&, const std::vector<double>&);
template ErrorFigures compare(const std::vector<double>&, const std::vector<double>&);

void check_size_of_inputs(const Problem& p, int head_dim) {
  visit_fields(p, [](const Label& label, int64_t value) {
    if (value < 0)
      throw SpecError(std::string(label.name) + " = " + std::to_string(value) +
                      " is not supported: sizes are at least 0");
  });
  require_memory(bytes_of_inputs(p, head_dim));
}

void check_size_of_mask(const Problem& p) {
  require_memory(static_cast<double>(p.batch) * static_cast<double>(p.heads) *
                 static_cast<double>(p.seq_q) * static_cast<double>(p.seq_kv));
}

void check_size(const Problem& p, int head_dim) {
  const double heads = static_cast<double>(p.batch) * static_cast<double>(p.heads);
  const double of_keys = static_cast<double>(p.seq_kv) * head_dim;
  const double of_queries = static_cast<double>(p.seq_q) * head_dim;
  const double work = heads * of_queries * static_cast<double>(p.seq_kv);
  if (constexpr double kMostWork = 1e13; work > kMostWork)
    throw SpecError("batch x heads x queries x keys x head dimension is " + short_text(work) +
                    ", and this CPU reference takes up to " + short_text(kMostWork) +
                    " (minutes): shorten the sequences or take fewer heads");
  const double threads = std::min<double>(heads, usable_cores());
  // Each thread has a head's keys in FP64 and in copies of each kind, some copies of its queries,
  // and some rows of eight matrices.
  const double of_thread =
      of_keys * 100 + of_queries * 16 + static_cast<double>(p.seq_kv) * 128 * 64;
  // These are dK and dV of every head in FP32 and in FP64, and the inputs.
  require_memory(bytes_of_inputs(p, head_dim) + heads * of_keys * 24 + threads * of_thread);
}

std::vector<TraceRow> trace(const Inputs& in, const AttentionSpec& spec, const ProductPlan& plan) {
  check(in, spec);
  check_size(in.problem, in.head_dim);
  if (in.dout.empty())
    throw SpecError("a trace covers the backward pass: the inputs need dout");
  const Problem& p = in.problem;
  const int64_t heads = p.batch * p.heads;
  std::vector<std::array<ErrorSums, kTensors.size()>> of_head(heads);

  // Both computations run panel by panel in step, so that no M x N matrix exists as a whole.
  std::vector<std::vector<double>> exact_dk(heads), exact_dv(heads);
  std::vector<std::vector<float>> dk(heads), dv(heads);
  parallel_for(heads, usable_cores(), [&](int64_t head) {
    const Head inputs = head_of(in, spec, head);
    auto exact = exact_head(inputs);
    auto emulated = emulated_head(inputs, spec, plan, false);
    auto& sums = of_head[head];
    for (int64_t first = 0; first < p.seq_q; first += spec.group_q) {
      check_interrupt();
      const int64_t rows = std::min<int64_t>(spec.group_q, p.seq_q - first);
      const Panel<double> r = exact->panel(first, rows);
      const Panel<float> x = emulated->panel(first, rows);
      sums[0].add(x.delta, r.delta);
      sums[1].add(x.p, r.p);
      sums[2].add(x.dp, r.dp);
      sums[3].add(x.ds, r.ds);
      sums[4].add(x.o, r.o);
      sums[5].add(x.dq, r.dq);
    }
    exact_dk[head] = std::move(exact->dk);
    exact_dv[head] = std::move(exact->dv);
    dk[head] = std::move(emulated->dk);
    dv[head] = std::move(emulated->dv);
  });
  std::array<ErrorSums, kTensors.size()> all{};
  for (const auto& sums : of_head)
    for (size_t i = 0; i < all.size(); ++i)
      all[i].add(sums[i]);
  const float scale = head_of(in, spec, 0).softmax_scale;
  all[6].add(sum_over_groups<float>(p, dk, scale), sum_over_groups<double>(p, exact_dk, scale));
  all[7].add(sum_over_groups<float>(p, dv, 1), sum_over_groups<double>(p, exact_dv, 1));

  std::vector<TraceRow> rows;
  for (size_t i = 0; i < all.size(); ++i)
    rows.push_back({kTensors[i], all[i].figures()});
  return rows;
}

} // namespace sagebwd::reference
