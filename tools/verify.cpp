//===- verify.cpp - Random problems on the GPU against FP64 ----------------===//
#include "runtime/driver/driver.h"
#include "tools/command.h"
#include "tools/input_options.h"
#include "tools/spec_options.h"
#include "tools/verify_front.h"

#include <algorithm>
#include <map>
#include <set>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// The worst case of one tensor: the one that uses most of its bound.
struct Worst {
  Verdict verdict;
  double to_emulation = 0; ///< the largest of all cases
  std::string where;
};

/// The usual words, and every word of the other enumerations except those that few specs can have.
SpecWords kinds_of_specs() {
  SpecWords words = usual_words();
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T&) {
    if constexpr (Worded<T>)
      if (const std::string name(label.name); !label.quiet && words[name].empty())
        for (const auto& [value, word] : Words<T>::all)
          words[name].emplace_back(word);
  });
  return words;
}

/// Adds eight variants: without smoothing, without rotation, without both, and with larger groups,
/// and without the mean of V.
void add_variants(std::vector<AttentionSpec>& specs) {
  std::vector<AttentionSpec> variants;
  for (const AttentionSpec& base : specs) {
    if (base.granularity != AttentionSpec().granularity ||
        base.precision != AttentionSpec().precision)
      continue;
    AttentionSpec variant = base;
    const size_t kind = variants.size() % 4;
    variant.smooth_k = kind == 1 || kind == 2;
    variant.rotate = kind == 0 || kind == 2;
    variant.smooth_v = kind == 3;
    if (kind == 2)
      variant.group_kv = 128;
    variants.push_back(variant);
  }
  specs.insert(specs.end(), variants.begin(), variants.end());
}

class Verify : public Command {
public:
  Verify()
      : Command("verify", "check random problems on the GPU against FP64",
                "Draws lengths, strides, heads, inputs and seeds, runs forward and backward, and\n"
                "compares O, dQ, dK and dV with FP64 on the CPU. A tensor is wrong if it holds a\n"
                "non-finite value, if its error exceeds that of the emulation of the same problem\n"
                "by more than 0.004 of the tensor's norm, or if a kernel wrote outside it. The\n"
                "same queries and keys go through norm and RoPE (front Q, front K) and back, and\n"
                "have to be as near to FP64 as one rounding is. The exit code is 1 if any tensor\n"
                "is wrong. A GPU is needed.\n"
                "\n" +
                    help_of_inputs() +
                    "\n"
                    "examples:\n"
                    "  sagebwd verify\n"
                    "  sagebwd verify --cases 1000 --seed 7 --json\n"
                    "  sagebwd verify --inputs sink,qk-norm,massive-tokens --causal top-left\n"
                    "  sagebwd verify --head-dim 64 --causal top-left --granularity row,block\n"
                    "  sagebwd verify --block-size 64x64\n"
                    "  sagebwd verify --causal top-left --intervals 1,2\n"
                    "  sagebwd verify --score '30.0 * tanh(s / 30.0)'\n"
                    "  sagebwd verify --spec 'd64 sparse_q=128 sparse_kv=64 linear=complement'\n") {
    options.integer("cases", cases_, 1, 1000000, "number of problems");
    options.integer("seed", seed_, 0, std::numeric_limits<int64_t>::max(),
                    "seed of the first problem");
    inputs_.declare(options, /*lists=*/true);
    options.integer("max-len", max_len_, 1, 1 << 16, "longest sequence");
    options.integer("gpu", gpu_, 0, 1023, "which GPU");
    spec_.declare(
        options, /*lists=*/true, {},
        "a quarter of the problems draw theirs, an eighth intervals, and an eighth a mask or a "
        "score function; 0x0: none");
    density_.declare(options, "drawn for each problem");
    options.flag("quiet", quiet_, "print no line per case");
  }

  ExitCode run() override {
    std::vector<AttentionSpec> specs = spec_.all_with_lists(options);
    const bool draws_masks = !options.given("block-size") && !options.given("spec") &&
                             !options.given("intervals") && !options.given("mask") &&
                             !options.given("score");
    if (specs == combinations(kinds_of_specs()))
      add_variants(specs);
    require_gpu(gpu_, "this command");
    require_packs();
    // One operation per spec, so that its kernels are loaded once.
    std::map<std::string, std::unique_ptr<Attention>> operations;
    Progress progress("verifying", static_cast<size_t>(cases_));
    for (int64_t i = 0; i < cases_; ++i) {
      const AttentionSpec& named = specs[i % specs.size()];
      const AttentionSpec spec = draws_masks ? perhaps_with_mask(seed_ + i, named) : named;
      VerifyCase drawn =
          draw(seed_ + i, *resolved(spec), max_len_, inputs_.all(), density_.given());
      std::unique_ptr<Attention>& operation = operations[to_string(drawn.spec)];
      if (!operation)
        operation = std::make_unique<Attention>(drawn.spec, gpu_);
      Faults faults;
      std::vector<Verdict> verdicts = check_on_gpu(*operation, gpu_, drawn, faults);
      for (Verdict& verdict : check_front_on_gpu(gpu_, drawn, faults))
        verdicts.push_back(std::move(verdict));
      record(drawn, verdicts, faults);
      progress.advance(to_string(drawn));
    }
    return report();
  }

private:
  void record(const VerifyCase& drawn, const std::vector<Verdict>& verdicts, const Faults& faults) {
    ++done_;
    specs_.insert(to_string(drawn.spec));
    coverage_.add(drawn);
    std::string errors, complaint;
    for (const Verdict& verdict : verdicts) {
      errors += format(" %s %.4f", verdict.tensor.c_str(), verdict.rel_l2);
      Worst& worst = worst_[verdict.tensor]; // at first NaN, which no comparison accepts
      if (!(verdict.used() <= worst.verdict.used()))
        worst = {verdict, worst.to_emulation, to_string(drawn)};
      worst.to_emulation = std::max(worst.to_emulation, verdict.to_emulation);
      if (!verdict.right())
        complaint += format(" %s %.4f > %.4f%s", verdict.tensor.c_str(), verdict.rel_l2,
                            verdict.bound, verdict.finite ? "" : " (non-finite)");
    }
    for (const std::string& fault : faults)
      complaint += " " + fault + ";";
    if (!complaint.empty())
      wrong_.push_back(to_string(drawn) + ":" + complaint);
    if (!json && !quiet_)
      printf("%s  %s %s\n", complaint.empty() ? "ok   " : "WRONG", to_string(drawn).c_str(),
             (complaint.empty() ? errors : complaint).c_str());
  }

  ExitCode report() const {
    Table table;
    for (const auto& [tensor, worst] : worst_)
      table.add({{"tensor", "tensor", tensor},
                 number("worst_rel_l2", "rel. L2", 5, worst.verdict.rel_l2),
                 number("bound", "bound", 5, worst.verdict.bound),
                 {"", "of bound", format("%.0f%%", 100 * worst.verdict.used())},
                 number("worst_to_emulation", "to emulation", 5, worst.to_emulation),
                 {"case", "worst case", worst.where}});
    const std::string gpu = driver::device_info(gpu_).name;
    finish(json::Object{{"cases", done_},
                        {"wrong", wrong_.size()},
                        {"failures", json::Array(wrong_)},
                        {"specs", specs_.size()},
                        {"gpu", gpu},
                        {"first_seed", seed_},
                        {"coverage", coverage_.as_json()},
                        {"tensors", table.json_by("tensor")}},
           [&] {
             printf("\n%s over %s on %s, seeds %zu to %zu\n", counted(done_, "case").c_str(),
                    counted(specs_.size(), "spec").c_str(), gpu.c_str(), seed_, seed_ + done_ - 1);
             printf("covered: %s\n\n", coverage_.as_text().c_str());
             table.print();
             printf("%zu of %td wrong\n", wrong_.size(), done_);
             for (const std::string& what : wrong_)
               printf("  %s\n", what.c_str());
           });
    return wrong_.empty() ? kDone : kFailed;
  }

  SpecOptions spec_{kinds_of_specs()};
  DensityOption density_;
  /// Zeros next to small numbers have revealed faults before.
  InputOptions inputs_{{reference::Distribution::gaussian, reference::Distribution::padded}};
  int64_t cases_ = 100, max_len_ = 1024;
  uint64_t seed_ = 0;
  int gpu_ = 0;
  bool quiet_ = false;

  std::map<std::string, Worst> worst_;
  std::set<std::string> specs_;
  std::vector<std::string> wrong_;
  Coverage coverage_;
  int64_t done_ = 0;
};

} // namespace

std::unique_ptr<Command> make_verify() { return std::make_unique<Verify>(); }

} // namespace sagebwd::tools
