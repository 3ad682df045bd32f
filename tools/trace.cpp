//===- trace.cpp - The error of every intermediate tensor ------------------===//
#include "runtime/on_gpu.h"
#include "runtime/parallel_for.h"
#include "runtime/reference/reference.h"
#include "tools/command.h"
#include "tools/input_options.h"
#include "tools/random_expressions.h"
#include "tools/random_intervals.h"
#include "tools/spec_options.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringExtras.h"

#include <map>
#include <optional>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;
using reference::ProductPlan;

/// Reads --precision if it lists products; returns nothing if it names a precision.
std::optional<ProductPlan> parse_products(const std::string& given) {
  if (llvm::is_contained(words_of<Precision>(), given))
    return std::nullopt;
  ProductPlan plan{false, false, false, false, false, false};
  if (given == "none")
    return plan;
  llvm::SmallVector<llvm::StringRef> names;
  llvm::StringRef(given).split(names, ',');
  for (const llvm::StringRef name : names) {
    const auto product =
        llvm::find_if(reference::kProducts, [&](const auto& known) { return name == known.first; });
    if (product == std::end(reference::kProducts))
      throw UsageError("--precision names '" + name.str() + "'; it takes " +
                       known_words<Precision>(" or ") +
                       ", or INT8 products: s (S = Q K^T in both passes), pv, dv, dp, dq and dk, "
                       "or none. --precision s,pv,dv,dq,dk is six-of-seven" +
                       (llvm::is_contained(words_of<Precision>(), name)
                            ? "; a precision stands alone, and a list has products only"
                            : suggestion(given, words_of<Precision>())));
    plan.*product->second = true;
  }
  return plan;
}

std::string to_string(const ProductPlan& plan) {
  const std::string text = llvm::join(names_of(plan), ",");
  return text.empty() ? "none" : text;
}

class Trace : public Command {
public:
  Trace()
      : Command("trace", "print the error of every intermediate tensor against FP64",
                "Draws q, k, v and dO, rounds them to the dtype, and compares delta, P, dP, dS,\n"
                "O, dQ, dK and dV with FP64 by cosine similarity and relative L2 error. On the\n"
                "CPU they come from the emulation, which quantises bit for bit as the kernels do\n"
                "on every GPU. With --device cuda the kernels compute O, dQ, dK and dV.\n"
                "\n" +
                    help_of_inputs() +
                    "\n"
                    "examples:\n"
                    "  sagebwd trace --seq-len 1024 --sigma 3 --granularity block --json\n"
                    "  sagebwd trace --precision s,pv,dv,dp,dq,dk     # dP in INT8 as well\n"
                    "  sagebwd trace --key-offset 20 --no-smooth-k\n"
                    "  sagebwd trace --inputs heavy-channels --causal top-left --no-rotate\n"
                    "  sagebwd trace --block-size 128x64 --density 0.03\n"
                    "  sagebwd trace --inputs sink --causal top-left --seq-len 4096 --heads 4\n"),
        spec_({}, {"precision",
                   "; or, on the CPU, a list of INT8 products: s, pv, dv, dp, dq, dk, or none",
                   [this](const std::string& given) {
                     products_ = parse_products(given);
                     return products_.has_value();
                   }}) {
    options.word(
        "device", "DEVICE",
        [this](const std::string& given) {
          if (given != "cpu" && given != "cuda")
            throw UsageError("--device is '" + given + "'; it is cpu or cuda");
          on_gpu_ = given == "cuda";
        },
        "cpu for the emulation, cuda for the kernels (default cpu)");
    options.offer({"cpu", "cuda"});
    options.integer("gpu", gpu_, 0, 1023, "which GPU, for --device cuda");
    problem_.declare(options);
    spec_.declare(options, /*lists=*/false, {"linear"});
    options.also("plan", "precision");
    density_.declare(options, "0.1");
    inputs_.declare(options, /*lists=*/false);
    options.number("sigma", sigma_, 0, 1e4, "standard deviation of gaussian q and k");
    options.number("key-offset", key_offset_, -1e4, 1e4,
                   "offset of every gaussian key, with signs that alternate over the channels");
    options.integer("seed", seed_, 0, std::numeric_limits<int64_t>::max(),
                    "seed of the random inputs");
  }

  ExitCode run() override;

private:
  ProblemOptions problem_{{1, 4, 0, 4096, 0}}; // as in Python, and in the tables of errors
  SpecOptions spec_;
  DensityOption density_;
  InputOptions inputs_;
  std::optional<ProductPlan> products_; ///< if --precision lists them
  double sigma_ = 1, key_offset_ = 0;
  uint64_t seed_ = 0;
  int gpu_ = 0;
  bool on_gpu_ = false;
};

/// Puts the kernels' outputs in place of the emulation's.
void replace_outputs(std::vector<reference::TraceRow>& rows, const reference::Inputs& inputs,
                     const AttentionSpec& spec, int gpu) {
  Attention attention(spec, gpu);
  const reference::Outputs<float> run = run_on_gpu(attention, gpu, inputs);
  const reference::Outputs<double> exact = reference::exact(inputs, spec);
  const std::map<std::string, reference::ErrorFigures> figures = {
      {"O", reference::compare(run.o, exact.o)},
      {"dQ", reference::compare(run.dq, exact.dq)},
      {"dK", reference::compare(run.dk, exact.dk)},
      {"dV", reference::compare(run.dv, exact.dv)}};
  for (reference::TraceRow& row : rows)
    if (auto found = figures.find(row.tensor); found != figures.end())
      row.figures = found->second;
}

ExitCode Trace::run() {
  const ResolvedSpec spec = resolved(spec_.one(options));
  const Problem problem = problem_.problem();
  check(spec, problem);
  if (spec->dq_sums != AttentionSpec().dq_sums && !on_gpu_)
    throw UsageError("--dq-sums " + value_text(spec->dq_sums) +
                     " is not emulated: on the CPU sums of dQ are "
                     "FP32. Leave it out, or use --device cuda");
  if (spec->packed)
    throw UsageError(
        "--packed: packed sequences have lengths, for which trace has no option. Trace "
        "one sequence, without --packed");
  if (spec->max_logits)
    throw UsageError("--max-logits: trace prints no largest scores, which are those of S. Leave it "
                     "out; attention(..., return_max_logits=True) gives them in Python");
  if (options.given("gpu") && !on_gpu_)
    throw UsageError("--gpu is for --device cuda");
  const ProductPlan kernels_plan = reference::plan_of(spec->precision);
  const ProductPlan plan = products_.value_or(kernels_plan);
  const bool lone_v = spec->smooth_v && !plan.pv; // what is subtracted before no quantisation
  if (lone_v || (spec->smooth_q && !plan.s))
    throw UsageError(std::string(lone_v ? "--smooth-v" : "--smooth-q") + " with --precision " +
                     to_string(plan) + ", which quantises no " + (lone_v ? "values" : "queries") +
                     ": leave it out, or add " + (lone_v ? "pv" : "s") + " to the products");
  if (on_gpu_) {
    if (to_string(plan) != to_string(kernels_plan))
      throw UsageError("--precision " + to_string(plan) + " has no kernels: they compute " +
                       known_words<Precision>(" or ") + ". Name one of them, or use --device cpu");
    require_gpu(gpu_, "--device cuda");
    require_packs();
  }
  reference::check_size(problem, spec->head_dim);
  const reference::InputKind kind{inputs_.all().front(), sigma_, key_offset_};
  reference::Inputs inputs =
      reference::named_inputs(kind, problem, spec->head_dim, spec->dtype, seed_);
  double density = density_.given();
  const bool has_lists = is_sparse(*spec) && !hides_anywhere(*spec);
  if (has_intervals(*spec))
    add_random_intervals(*spec, seed_, inputs);
  add_random_expressions(*spec, seed_, inputs);
  if (has_lists) {
    constexpr double kUsualDensity = 0.1;
    density = density ? density : kUsualDensity;
    inputs.listed = reference::random_lists(*spec, problem, density, seed_);
  } else if (options.given("density")) {
    throw UsageError("--density is the part of the blocks that lists have: give --block-size too");
  }

  std::vector<reference::TraceRow> rows;
  {
    Progress progress("tracing " +
                      counted(static_cast<uint64_t>(problem.batch * problem.heads), "head"));
    const ScopedWatch watch([&] { progress.tick(); });
    rows = reference::trace(inputs, spec, plan);
    if (on_gpu_)
      replace_outputs(rows, inputs, spec, gpu_);
  }
  const auto is_nothing = [](const auto& row) {
    return row.tensor == "O" && row.figures.rel_l2 == 0;
  };
  if (is_sparse(*spec) && std::any_of(rows.begin(), rows.end(), is_nothing))
    throw SpecError("no query sees a key, so that O is zeros: give ",
                    has_lists ? "a larger --density or --seq-len" : "a larger --seq-len",
                    ", or another --seed");
  Table table;
  for (const auto& [tensor, figures] : rows) {
    Cell cells[] = {number("cosine", "cosine", 6, figures.cosine),
                    number("rel_l2", "rel. L2", 5, figures.rel_l2),
                    number("bias", "bias", 6, figures.bias)};
    if (std::isinf(figures.rel_l2)) // the exact tensor is all zeros, and the other is not
      for (Cell& cell : cells)
        cell.value = nullptr, cell.text = "exact 0";
    table.add({{"tensor", "tensor", tensor}, cells[0], cells[1], cells[2]});
  }
  const std::string line = sagebwd::to_string(*spec), products = to_string(plan);
  std::string without_precision = line; // which the list of products replaces
  if (const std::string word = " " + value_text(spec->precision); products_)
    without_precision.erase(line.find(word), word.size());
  json::Object facts = json_of(problem);
  facts["tensors"] = table.json_by("tensor");
  facts["device"] = on_gpu_ ? "cuda" : "cpu";
  facts["spec"] = line;
  facts["precision"] = products_ ? products : value_text(spec->precision);
  facts["products"] = products;
  const std::string name(sagebwd::to_string(kind.distribution));
  facts["inputs"] = name;
  facts["sigma"] = sigma_;
  facts["key_offset"] = key_offset_;
  facts["seed"] = seed_;
  if (has_lists)
    facts["density"] = density;
  const bool gaussian = kind.distribution == reference::Distribution::gaussian;
  const std::string drawn = name + (gaussian ? format(" of sigma %g", sigma_) : "") +
                            (has_lists ? format(", density %g", density) : "");
  const std::string title = format(
      "%s, INT8 products %s, inputs %s, seed %zu, %s", without_precision.c_str(), products.c_str(),
      drawn.c_str(), size_t{seed_}, on_gpu_ ? "O dQ dK dV from the GPU" : "emulated on the CPU");
  return finish(std::move(facts), [&] {
    puts(title.c_str());
    table.print();
  });
}

} // namespace

std::unique_ptr<Command> make_trace() { return std::make_unique<Trace>(); }

} // namespace sagebwd::tools
