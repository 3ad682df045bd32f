//===- bench.cpp - Other attentions and ours beside each other -------------===//
//
// PyTorch's attentions are in Python, and so is the benchmark (python/sagebwd/benchmark). This
// command checks what was typed and becomes that Python program.
//
//===----------------------------------------------------------------------===//
#include "tools/command.h"
#include "tools/python_command.h"
#include "tools/spec_options.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>

namespace sagebwd::tools {

namespace {

class Bench : public Command {
public:
  Bench()
      : Command("bench", "compare with PyTorch's and other attentions on this GPU",
                "Runs PyTorch's attentions (cuDNN, FlashAttention-2, memory-efficient),\n"
                "FlashAttention-3 and 4 where they are installed, and sagebwd in each precision.\n"
                "A table says how long each takes for the forward and for forward + backward,\n"
                "how much memory it takes, and how large its errors are against FP64. The GPU,\n"
                "its clocks and all versions stand above the table, so that the text can be sent\n"
                "as a report. An attention that cannot run is listed with the reason.\n"
                "PyTorch is needed: this command starts 'python -m sagebwd bench' in the Python\n"
                "that lies beside it, or else in the one on the PATH.\n"
                "\n"
                "examples:\n"
                "  sagebwd bench\n"
                "  sagebwd bench --seq-len 16384 --heads 32 --heads-kv 8 --causal top-left\n"
                "  sagebwd bench --models gemma-3-12b,flux-1 --precision gradients16\n"
                "  sagebwd bench --head-dim 256 --deterministic yes --backends fa2,sagebwd\n"
                "  sagebwd bench --intervals documents --seq-len 16384\n"
                "  sagebwd bench --models all --json > here.json\n"
                "  sagebwd bench --list-models\n") {
    options.text("models", "NAME,..", text_, "shapes of well-known models, or all");
    options.flag("list-models", flag_, "list the models and their shapes");
    problem_.declare(options);
    spec_.declare(options, /*lists=*/false,
                  {"spec", "precision", "deterministic", "packed", "numerics", "sparse_q", "linear",
                   "intervals", "mask", "score", "max_logits"});
    std::vector<std::string> precisions = words_of<Precision>();
    options.list("precision", "NAME,..", precisions_, "ours to measure (default all)");
    options.offer(std::move(precisions));
    options.word("deterministic", "KIND", one_of("deterministic", {"both", "yes", "no"}),
                 "yes: only those that give the same bits in every run, no: only the others "
                 "(default both)");
    options.offer({"both", "yes", "no"});
    options.list("backends", "NAME,..", backends_,
                 "cudnn, fa2, efficient, flex, fa3, fa4, sagebwd (default all; flex only with "
                 "--intervals)");
    options.offer({"cudnn", "fa2", "efficient", "flex", "fa3", "fa4", "sagebwd"});
    options.word("intervals", "NAME", one_of("intervals", {"documents", "prefix", "window"}),
                 "a mask told by intervals, and then a causal one: documents, prefix, window");
    options.offer({"documents", "prefix", "window"});
    options.flag("sinks", flag_, "add a logit per head to the softmax");
    options.word("layout", "KIND", one_of("layout", {"bhsd", "bshd"}),
                 "of tensors in memory: bhsd or bshd (default bhsd)");
    options.offer({"bhsd", "bshd"});
    options.integer("rounds", rounds_, 1, 1000, "timings of each, at most");
    options.integer("seed", seed_, 0, 1 << 30, "of the random inputs");
    options.integer("gpu", gpu_, 0, 1023, "the GPU, numbered from 0");
    options.text("plot", "FILE", text_, "write a picture of the times, by matplotlib");
  }

  bool warns_of_variables() const override { return false; } // Python does
  ExitCode run() override { become_python("bench", arguments); }

private:
  /// Refuses other words. Words go to Python as they were typed.
  static std::function<void(const std::string&)> one_of(const std::string& option,
                                                        std::vector<std::string> known) {
    return [=](const std::string& given) {
      if (std::find(known.begin(), known.end(), given) == known.end())
        throw wrong_value(option, given, llvm::join(known, ", ") + suggestion(given, known));
    };
  }

  SpecOptions spec_;
  ProblemOptions problem_{{1, 16, 0, 8192, 0}};
  std::vector<std::string> precisions_, backends_;
  std::string text_;
  bool flag_ = false;
  int rounds_ = 15, seed_ = 0, gpu_ = 0;
};

} // namespace

std::unique_ptr<Command> make_bench() { return std::make_unique<Bench>(); }

} // namespace sagebwd::tools
