//===- verify_case.cpp - One random problem, and its verdict ---------------===//
#include "tools/verify_case.h"

#include "runtime/reference/mixture.h"
#include "tools/console.h"
#include "tools/distance.h"
#include "tools/random_expressions.h"
#include "tools/random_intervals.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <cmath>

namespace sagebwd::tools {

namespace {

/// Most multiply-adds per product, so that the FP64 reference of a case takes about a second.
constexpr int64_t kMaxWork = int64_t{1} << 27;

/// Lengths at which kernels tend to go wrong (one, a few, around whole tiles), and any others.
int64_t draw_length(Random& random, int64_t max_len) {
  const int64_t kind = random.between(0, 7);
  const int64_t length = kind == 0   ? 1
                         : kind == 1 ? random.between(2, 63)
                         : kind <= 3 ? 64 * random.between(1, 8) + random.between(-1, 1)
                                     : random.between(1, max_len);
  return std::min(length, max_len);
}

/// How far kernels may differ from the emulation: FP32 sums in another order change some roundings
/// to integers.
constexpr double kSlack = 4e-3;
/// Beside what the emulation of linear attention leaves out.
constexpr double kSlackOfMixtures = 1.4e-2;

bool is_gaussian(const VerifyCase& drawn) {
  return drawn.inputs == reference::Distribution::gaussian;
}

bool has_expression(const VerifyCase& drawn) {
  return !drawn.spec.mask.empty() || has_score(drawn.spec);
}

/// An absolute bound, whatever the emulation's error: 1.5 times the error of `block`, the coarsest
/// granularity, on gaussian inputs of this sigma. Problems of few tokens have no such bound,
/// because dS mostly cancels there; neither have other kinds of inputs, or intervals and
/// expressions, with which a query may see few keys.
double cap_of(const VerifyCase& drawn) {
  if (std::min(drawn.problem.seq_q, drawn.problem.seq_kv) < 64 || !is_gaussian(drawn) ||
      has_intervals(drawn.spec) || has_expression(drawn))
    return INFINITY;
  // sigma, and the error of dQ and dK under `block` at 4096 tokens: the largest of the four.
  constexpr std::pair<double, double> kMeasured[] = {
      {1, .0574}, {3, .0787}, {5, .2044}, {8, .4828}};
  double error = kMeasured[0].second;
  for (size_t i = 1; i < std::size(kMeasured); ++i) {
    auto [sigma0, error0] = kMeasured[i - 1];
    auto [sigma1, error1] = kMeasured[i];
    if (drawn.sigma > sigma0)
      error = std::lerp(error0, error1, (drawn.sigma - sigma0) / (sigma1 - sigma0));
  }
  return 1.5 * error;
}

/// Whether lists of blocks are drawn, which do not follow from intervals or a mask.
bool has_lists(const VerifyCase& drawn) {
  return is_sparse(drawn.spec) && !hides_anywhere(drawn.spec);
}

reference::Inputs inputs_of(const VerifyCase& drawn) {
  reference::Inputs inputs =
      reference::named_inputs({drawn.inputs, drawn.sigma}, drawn.problem, drawn.spec.head_dim,
                              drawn.spec.dtype, drawn.seed);
  if (has_intervals(drawn.spec))
    add_random_intervals(drawn.spec, drawn.seed ^ 0x1d7e, inputs);
  else if (has_lists(drawn))
    inputs.listed =
        reference::random_lists(drawn.spec, drawn.problem, drawn.density, drawn.seed ^ 0xb10c);
  add_random_expressions(drawn.spec, drawn.seed ^ 0xe7b2, inputs);
  const auto of_queries = [&](uint64_t seed) {
    Random random(drawn.seed ^ seed);
    const Problem& problem = drawn.problem;
    std::vector<float> values(problem.batch * problem.heads * problem.seq_q);
    for (float& value : values)
      value = static_cast<float>(random.between(-1000, 1000)) / 1000;
    return values;
  };
  if (drawn.dlse)
    inputs.dlse = of_queries(0xd15e);
  if (is_mixed(drawn.spec)) {
    inputs.of_rest = drawn.of_rest;
    inputs.shares = of_queries(0xa1fa);
    // About as large as lse of standard scores; or from 0 to 1.
    const float size = std::log(static_cast<float>(drawn.problem.seq_kv)) + 1;
    for (float& value : inputs.shares)
      value = drawn.of_rest ? size * value : (value + 1) / 2;
  }
  return inputs;
}

Verdict judge(std::string tensor, double slack, double cap, const std::vector<float>& run,
              const std::vector<float>& emulated, const std::vector<double>& exact, double terms) {
  Verdict verdict;
  verdict.tensor = std::move(tensor);
  verdict.finite = run.size() == exact.size() &&
                   std::all_of(run.begin(), run.end(), [](float x) { return std::isfinite(x); });
  if (!verdict.finite) {
    verdict.rel_l2 = INFINITY;
    return verdict;
  }
  // Zeros on both sides are right.
  double scale = std::max({norm(exact), terms / 16, 1e-30});
  verdict.rel_l2 = distance(run, exact).error / scale;
  verdict.to_emulation = distance(run, emulated).error / scale;
  verdict.bound = std::min(distance(emulated, exact).error / scale + slack, cap);
  return verdict;
}

/// Compares log-sum-exps. A query without keys must have -inf, exactly where FP64 has it.
Verdict judge_lse(double cap, std::vector<float> run, std::vector<float> emulated,
                  std::vector<double> exact) {
  bool agree = run.size() == exact.size();
  for (size_t i = 0; agree && i < exact.size(); ++i) {
    if (exact[i] != -INFINITY)
      continue;
    agree = run[i] == -INFINITY;
    run[i] = emulated[i] = 0;
    exact[i] = 0;
  }
  // Near zero the absolute error of a log-sum-exp counts.
  double count = std::sqrt(static_cast<double>(exact.size()));
  Verdict verdict = judge("lse", kSlack, cap, run, emulated, exact, 16 * count);
  verdict.finite = verdict.finite && agree;
  return verdict;
}

/// Compares the largest score of each head. -inf and NaN must be where the emulation has them. The
/// means of keys and the first key's scores are sums in FP32, in another order than the
/// emulation's, and score functions are computed with fast instructions. The kernels' may be larger
/// by two steps of a score's INT32 sum: a channel is no larger than its token is long.
Verdict judge_max_logits(const AttentionSpec& spec, const reference::Inputs& inputs,
                         const std::vector<float>& run, const std::vector<float>& emulated) {
  const int d = inputs.head_dim;
  const double scale = inputs.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(d)));
  const double headroom =
      2 * std::abs(scale) * longest_token(inputs.q, d) / 127 * longest_token(inputs.k, d) / 127;
  Verdict verdict;
  verdict.tensor = "max logits";
  verdict.bound = has_score(spec) ? 2e-3 : 2e-5;
  verdict.finite = run.size() == emulated.size();
  for (size_t i = 0; verdict.finite && i < run.size(); ++i) {
    if (run[i] == emulated[i] || (std::isnan(run[i]) && std::isnan(emulated[i])))
      continue;
    const double above = double{run[i]} - emulated[i];
    const double error = std::max(-above, above - headroom) / (1 + std::abs(emulated[i]));
    verdict.finite = std::isfinite(error);
    verdict.rel_l2 = std::max(verdict.rel_l2, error);
  }
  verdict.to_emulation = verdict.rel_l2;
  return verdict;
}

/// The size of dP and of delta, whose difference dS is a multiple of. dO and O of a query have any
/// direction, so that delta, their product, is by chance far smaller in problems of few queries.
double terms_of_ds(const reference::Inputs& in, const reference::Outputs<double>& exact) {
  const auto d = static_cast<size_t>(in.head_dim);
  double sum = 0;
  for (size_t row = 0; row < in.dout.size() / d; ++row) {
    double of_dout = 0, of_o = 0;
    for (size_t i = row * d; i < (row + 1) * d; ++i) {
      of_dout += std::pow(in.dout[i], 2);
      of_o += std::pow(exact.o[i], 2);
    }
    sum += of_dout * of_o / static_cast<double>(d);
  }
  return std::max(norm(exact.delta), std::sqrt(sum));
}

/// The size of what gradients of shares are differences of: dO times outputs of about 1; with
/// of_rest times the slope of the share.
double terms_of_shares(const reference::Inputs& in, const std::vector<double>& lse) {
  double sum = 0;
  for (size_t i = 0; i < in.dout.size(); ++i) {
    const size_t row = i / in.head_dim;
    const double x = lse[row] - in.shares[row];
    const double slope = in.of_rest ? 1 / (2 + std::exp(x) + std::exp(-x)) : 1;
    sum += std::pow(slope * in.dout[i], 2);
  }
  return std::sqrt(sum);
}

} // namespace

std::string to_string(const VerifyCase& drawn) {
  const std::string inputs = is_gaussian(drawn) ? format("sigma %g", drawn.sigma)
                                                : std::string(sagebwd::to_string(drawn.inputs));
  const std::string density =
      has_lists(drawn) ? format(" density %g", drawn.density) : std::string();
  return format("%s %s %s+%td %s%s%s%s seed %zu", sagebwd::to_string(drawn.spec).c_str(),
                line_of(drawn.problem).c_str(), drawn.layout.bshd ? "bshd" : "bhsd",
                drawn.layout.padding, inputs.c_str(), density.c_str(), drawn.dlse ? " dlse" : "",
                drawn.of_rest ? " rest" : "", drawn.seed);
}

AttentionSpec perhaps_with_mask(uint64_t seed, const AttentionSpec& spec) {
  constexpr int64_t kLists = 4, kIntervals = 6, kExpressions = 5;
  Random random(seed ^ 0x115757);
  const bool lists = random.one_in(kLists), intervals = !lists && random.one_in(kIntervals);
  if (!lists && !intervals && !random.one_in(kExpressions))
    return spec;
  std::vector<AttentionSpec> possible;
  const auto try_out = [&](AttentionSpec with) {
    try {
      resolved(with);
      possible.push_back(with);
    } catch (const SpecError&) { // others may do
    }
  };
  AttentionSpec with = spec;
  if (lists)
    for (int queries : kSparseBlocks)
      for (int keys : kSparseBlocks) {
        with.sparse_q = queries, with.sparse_kv = keys;
        try_out(with);
      }
  else if (!intervals)
    try_out(with_expression(random, spec));
  else
    for (int columns : kIntervalColumns) {
      with.intervals = columns;
      try_out(with);
    }
  return possible.empty() ? spec : possible[random.between(0, possible.size() - 1)];
}

VerifyCase draw(uint64_t seed, const AttentionSpec& spec, int64_t max_len,
                const std::vector<reference::Distribution>& inputs, double density) {
  Random random(seed);
  VerifyCase drawn;
  drawn.spec = spec;
  drawn.seed = seed;
  Problem& problem = drawn.problem;
  problem.seq_q = draw_length(random, max_len);
  problem.seq_kv = random.one_in(2) ? problem.seq_q : draw_length(random, max_len);
  problem.batch = random.between(1, 3);
  problem.heads_kv = random.between(1, 3);
  problem.heads = problem.heads_kv * random.between(1, 4);
  auto too_much = [&] {
    return problem.batch * problem.heads * problem.seq_q * problem.seq_kv * spec.head_dim >
           kMaxWork;
  };
  if (too_much())
    problem.batch = 1;
  if (too_much())
    problem.heads /= problem.heads_kv, problem.heads_kv = 1;
  drawn.layout.bshd = random.one_of({false, true});
  drawn.layout.padding = random.one_of<int64_t>({0, 0, 8, 64});
  drawn.sigma = random.one_of({0.1, 0.5, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0});
  drawn.dlse = random.one_in(8);
  drawn.inputs = inputs[random.between(0, inputs.size() - 1)];
  if (!is_gaussian(drawn))
    drawn.sigma = 1;
  if (is_mixed(spec))
    drawn.of_rest = random.one_in(2);
  if (has_lists(drawn))
    drawn.density = density != 0 ? density : random.one_of({0.03, 0.1, 0.3, 0.7, 1.0});
  return drawn;
}

std::vector<Verdict> check_on_gpu(Attention& operation, int device, const VerifyCase& drawn,
                                  Faults& faults) {
  const reference::Inputs inputs = inputs_of(drawn);
  const auto run = run_on_gpu(operation, device, inputs, {drawn.layout}, &faults);
  const bool mixed = is_mixed(drawn.spec);
  const reference::Outputs<double> exact =
      mixed ? reference::exact_mixture(inputs, drawn.spec) : reference::exact(inputs, drawn.spec);
  const reference::Outputs<float> emulated = emulate_like(drawn.spec, inputs, run);
  const double cap = cap_of(drawn);
  const double tau = 1 / std::sqrt(static_cast<double>(inputs.head_dim));
  // Terms of linear attention are as large and cancel too, of one key to nothing; the emulation
  // does not have their roundings to bf16, so that errors count relative to them. A query that sees
  // one key, which is not computed separately, has V's rounding in O and so in delta, and its dS
  // consists of nothing else. That is half a percent of dP: a sixteenth of what dS may err by.
  const double weight = mixed ? 16 : drawn.spec.sink_keys > 0 ? 1 : 2;
  const double deltas = weight * tau * terms_of_ds(inputs, exact);
  const double slack = mixed ? kSlackOfMixtures : kSlack;
  std::vector<Verdict> verdicts = {judge("O", slack, cap, run.o, emulated.o, exact.o, 0),
                                   judge_lse(cap, run.lse, emulated.lse, exact.lse),
                                   judge("dQ", slack, cap, run.dq, emulated.dq, exact.dq,
                                         deltas * longest_token(inputs.k, inputs.head_dim)),
                                   judge("dK", slack, cap, run.dk, emulated.dk, exact.dk,
                                         deltas * longest_token(inputs.q, inputs.head_dim)),
                                   judge("dV", slack, cap, run.dv, emulated.dv, exact.dv, 0)};
  if (drawn.spec.max_logits)
    verdicts.push_back(judge_max_logits(drawn.spec, inputs, run.max_logits, emulated.max_logits));
  if (mixed) // a difference of products of dO, too
    verdicts.push_back(judge("dalpha", slack, cap, run.dshares, emulated.dshares, exact.dshares,
                             weight * terms_of_shares(inputs, exact.lse)));
  return verdicts;
}

void Coverage::add(const VerifyCase& drawn) {
  const Problem& problem = drawn.problem;
  seq_q_.insert(problem.seq_q);
  seq_kv_.insert(problem.seq_kv);
  groups_.insert(problem.heads / problem.heads_kv);
  inputs_.emplace(sagebwd::to_string(drawn.inputs));
  if (is_gaussian(drawn))
    sigmas_.insert(drawn.sigma);
  counts_["cases"] += 1;
  counts_["unequal_lengths"] += problem.seq_q != problem.seq_kv;
  counts_["no_multiple_of_64"] += problem.seq_q % 64 != 0 || problem.seq_kv % 64 != 0;
  counts_["bshd"] += drawn.layout.bshd;
  counts_["padded_strides"] += drawn.layout.padding != 0;
  counts_["dlse"] += drawn.dlse;
  counts_["lists"] += has_lists(drawn);
  counts_["intervals"] += has_intervals(drawn.spec);
  counts_["expressions"] += has_expression(drawn);
  counts_["linear"] += is_mixed(drawn.spec);
}

std::string Coverage::as_text() const {
  const auto count = [&](const char* name) { return counts_.at(name); };
  std::string inputs = llvm::join(inputs_, ", ");
  if (!sigmas_.empty())
    inputs += format(" of sigma %g..%g", *sigmas_.begin(), *sigmas_.rbegin());
  return format("queries %td..%td, keys %td..%td, %td with M != N, %td no multiple of 64, "
                "%td BSHD, %td padded strides, %td with dLSE, %td with lists of blocks, %td with "
                "intervals, %td with expressions, GQA groups to %td, inputs %s",
                *seq_q_.begin(), *seq_q_.rbegin(), *seq_kv_.begin(), *seq_kv_.rbegin(),
                count("unequal_lengths"), count("no_multiple_of_64"), count("bshd"),
                count("padded_strides"), count("dlse"), count("lists"), count("intervals"),
                count("expressions"), *groups_.rbegin(), inputs.c_str());
}

llvm::json::Value Coverage::as_json() const {
  llvm::json::Object facts;
  for (const auto& [name, count] : counts_)
    facts[name] = count;
  facts["seq_q"] = llvm::json::Array{*seq_q_.begin(), *seq_q_.rbegin()};
  facts["seq_kv"] = llvm::json::Array{*seq_kv_.begin(), *seq_kv_.rbegin()};
  facts["distinct_seq_q"] = static_cast<int64_t>(seq_q_.size());
  facts["distinct_seq_kv"] = static_cast<int64_t>(seq_kv_.size());
  facts["sigmas"] = llvm::json::Array(sigmas_);
  facts["inputs"] = llvm::json::Array(inputs_);
  facts["gqa_groups"] = llvm::json::Array(groups_);
  return facts;
}

} // namespace sagebwd::tools
