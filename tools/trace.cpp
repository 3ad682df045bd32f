//===- trace.cpp - The error of every intermediate tensor ------------------===//
#include "runtime/driver/driver.h"
#include "runtime/reference/reference.h"
#include "tools/command.h"
#include "tools/on_gpu.h"
#include "tools/spec_options.h"

#include <algorithm>
#include <map>
#include <optional>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;
using reference::ProductPlan;

/// The products a plan may name, in algorithm.md's order.
struct Product {
  const char* name;
  bool ProductPlan::*int8;
};
constexpr Product kProducts[] = {{"s", &ProductPlan::s},   {"pv", &ProductPlan::pv},
                                 {"dv", &ProductPlan::dv}, {"dp", &ProductPlan::dp},
                                 {"dq", &ProductPlan::dq}, {"dk", &ProductPlan::dk}};

ProductPlan parse_plan(const std::vector<std::string>& names) {
  ProductPlan plan{false, false, false, false, false, false};
  if (names.size() == 1 && names.front() == "none")
    return plan;
  for (const std::string& name : names) {
    auto product = std::find_if(std::begin(kProducts), std::end(kProducts),
                                [&](const Product& known) { return name == known.name; });
    if (product == std::end(kProducts))
      throw UsageError("--plan names '" + name +
                       "'; the products are s (S = Q K^T in both passes), pv, dv, dp, dq and dk, "
                       "or none: --plan s,pv,dv,dq,dk is six-of-seven");
    plan.*product->int8 = true;
  }
  return plan;
}

std::string to_string(const ProductPlan& plan) {
  std::string text;
  for (const Product& product : kProducts)
    if (plan.*product.int8)
      text += (text.empty() ? "" : ",") + std::string(product.name);
  return text.empty() ? "none" : text;
}

/// Some channels of Q and K are far larger than the others, as those of trained models are.
void make_heavy(reference::Inputs& inputs, DType dtype, int channels) {
  constexpr float kFactor = 12;
  for (std::vector<float>* x : {&inputs.q, &inputs.k})
    for (size_t i = 0; i < x->size(); ++i)
      if (static_cast<int>(i % inputs.head_dim) < channels)
        (*x)[i] = reference::round_to(dtype, kFactor * (*x)[i]);
}

/// A constant per channel on every key, as biased key projections give.
void offset_keys(reference::Inputs& inputs, DType dtype, double offset) {
  for (size_t i = 0; i < inputs.k.size(); ++i) {
    double sign = i % inputs.head_dim % 2 ? -1 : 1;
    inputs.k[i] = reference::round_to(dtype, static_cast<float>(inputs.k[i] + sign * offset));
  }
}

class Trace : public Command {
public:
  Trace()
      : Command(
            "trace", "the error of every intermediate tensor against FP64",
            "Draws q, k ~ N(0, sigma^2) and v, dO ~ N(0, 1), rounded to the dtype, and compares\n"
            "delta, P, dP, dS, O, dQ, dK and dV with FP64: cosine similarity and relative L2\n"
            "error. On the CPU the emulation gives them, bit for bit as the kernels quantise;\n"
            "with --device cuda the kernels give O, dQ, dK and dV. Quantisation groups that no\n"
            "option sets are those of --arch's kernels, else of the first GPU's here.\n"
            "\n"
            "examples:\n"
            "  sagebwd trace --device cpu --head-dim 128 --seq-len 1024 --heads 8 --sigma 1 "
            "--granularity row --json\n"
            "  sagebwd trace --plan s,pv,dv,dp,dq,dk          # dP in INT8 as well\n"
            "  sagebwd trace --key-offset 20 --no-smooth-k\n"
            "  sagebwd trace --heavy-channels 4 --no-rotate\n") {
    options.word(
        "device", "DEVICE",
        [this](const std::string& given) {
          if (given != "cpu" && given != "cuda")
            throw UsageError("--device is '" + given + "'; it is cpu or cuda");
          on_gpu_ = given == "cuda";
        },
        "cpu: the emulation; cuda: the kernels (default cpu)");
    options.integer("gpu", gpu_, 0, 1023, "which GPU, for --device cuda");
    options.text("arch", "ARCH", arch_, "whose kernels --device cpu emulates");
    problem_.declare(options);
    spec_.declare(options, /*lists=*/false);
    options.list("plan", "PRODUCT,..", plan_,
                 "INT8 products: s, pv, dv, dp, dq, dk, or none; instead of --precision, CPU only");
    options.number("sigma", sigma_, 0, 1e4, "standard deviation of q and k");
    options.number("key-offset", key_offset_, -1e4, 1e4,
                   "added to every key, with alternating sign over the channels");
    options.integer("heavy-channels", heavy_channels_, 0, 1 << 16,
                    "this many channels of q and k are 12 times as large");
    options.integer("seed", seed_, 0, std::numeric_limits<int64_t>::max(), "of the random inputs");
  }

  ExitCode run() override;

private:
  /// The named one's, else the GPU's; none where there is no GPU that has kernels.
  std::optional<Arch> arch() const {
    if (!arch_.empty())
      return find_arch(arch_);
    try {
      if (driver::unavailable().empty()) {
        const driver::DeviceInfo info = driver::device_info(on_gpu_ ? gpu_ : 0);
        return arch_for_capability(info.major, info.minor);
      }
    } catch (const std::exception&) { // the CPU needs no GPU; --device cuda says what is wrong
    }
    return std::nullopt;
  }

  ProblemOptions problem_;
  SpecOptions spec_;
  std::string arch_;
  std::vector<std::string> plan_;
  double sigma_ = 1, key_offset_ = 0;
  int heavy_channels_ = 0;
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
  ResolvedSpec spec = resolved(spec_.one(options));
  const Problem problem = problem_.problem();
  check(spec, problem);
  const double work = double(problem.batch) * double(problem.heads) * double(problem.seq_q) *
                      double(problem.seq_kv) * spec->head_dim;
  if (constexpr double kMostWork = 1e13; work > kMostWork)
    throw UsageError("batch x heads x queries x keys x head dimension is " + format("%.3g", work) +
                     ", and this CPU reference takes up to 1e13 (minutes): shorten --seq-len or "
                     "trace fewer --heads");
  if (!plan_.empty() && options.given("precision"))
    throw UsageError("--plan and --precision both say which products are INT8: leave one out");
  if (options.given("gpu") && !on_gpu_)
    throw UsageError("--gpu is for --device cuda");
  if (heavy_channels_ > spec->head_dim)
    throw UsageError("--heavy-channels is " + std::to_string(heavy_channels_) + " of " +
                     std::to_string(spec->head_dim) + " channels");
  const ProductPlan kernels_plan = reference::plan_of(spec->precision);
  const ProductPlan plan = plan_.empty() ? kernels_plan : parse_plan(plan_);
  if (on_gpu_) {
    if (!arch_.empty())
      throw UsageError("--arch is for --device cpu: with --device cuda the GPU decides");
    if (to_string(plan) != to_string(kernels_plan))
      throw UsageError("--plan " + to_string(plan) + " has no kernels: they compute --precision " +
                       known_words<Precision>(" or ") + ". Leave --plan out, or use --device cpu");
    require_gpu(gpu_, "--device cuda");
  }
  const std::optional<Arch> arch = this->arch();
  if (arch)
    spec = resolved(spec_.one(options), *arch);
  reference::check_memory(problem, spec->head_dim);
  reference::Inputs inputs =
      reference::random_inputs(problem, spec->head_dim, spec->dtype, sigma_, seed_);
  make_heavy(inputs, spec->dtype, heavy_channels_);
  if (key_offset_ != 0)
    offset_keys(inputs, spec->dtype, key_offset_);

  std::vector<reference::TraceRow> rows = reference::trace(inputs, spec, plan);
  if (on_gpu_)
    replace_outputs(rows, inputs, spec, gpu_);
  Table table;
  for (const auto& [tensor, figures] : rows)
    table.add({{"tensor", "tensor", tensor},
               number("cosine", "cosine", 6, figures.cosine),
               number("rel_l2", "rel. L2", 5, figures.rel_l2)});
  const std::string line = sagebwd::to_string(*spec), products = to_string(plan);
  json::Object facts = json_of(problem);
  facts["tensors"] = table.json_by("tensor");
  facts["device"] = on_gpu_ ? "cuda" : "cpu";
  facts["arch"] = arch ? json::Value(std::string(arch->name)) : json::Value(nullptr);
  facts["spec"] = line;
  facts["plan"] = products;
  facts["sigma"] = sigma_;
  facts["key_offset"] = key_offset_;
  facts["heavy_channels"] = heavy_channels_;
  facts["seed"] = seed_;
  return finish(std::move(facts), [&] {
    const std::string groups =
        !arch ? "no GPU here, so as on any architecture but sm_90a (--arch)"
              : "as on " + std::string(arch->name) + (arch_.empty() ? ", the GPU here" : "");
    printf("%s, INT8 products %s, sigma %g, seed %zu, %s, %s\n", line.c_str(), products.c_str(),
           sigma_, size_t{seed_}, on_gpu_ ? "O dQ dK dV from the GPU" : "emulated on the CPU",
           groups.c_str());
    table.print();
  });
}

} // namespace

std::unique_ptr<Command> make_trace() { return std::make_unique<Trace>(); }

} // namespace sagebwd::tools
