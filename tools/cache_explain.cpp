//===- cache_explain.cpp - 'sagebwd cache explain' -------------------------===//
#include "cache/explain.h"
#include "runtime/generate.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"
#include "tools/cache.h"
#include "tools/operation_options.h"

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

const char* word_for(Explanation::Verdict verdict) {
  return verdict == Explanation::present          ? "present"
         : verdict == Explanation::other_compiler ? "other compiler"
         : verdict == Explanation::bad            ? "bad"
                                                  : "absent";
}

json::Array rows_of(const std::vector<FieldDifference>& fields) {
  json::Array array;
  for (const FieldDifference& field : fields)
    array.push_back(
        json::Object{{"field", field.label}, {"wanted", field.wanted}, {"kept", field.kept}});
  return array;
}

json::Object json_of_explanation(const Explanation& e) {
  json::Object object{{"verdict", word_for(e.verdict)},
                      {"differs", rows_of(e.differences)},
                      {"following", rows_of(e.following)},
                      {"text", to_string(e)}};
  if (!e.item.place.empty()) {
    object["layer"] = e.item.in_pack ? "pack" : "directory";
    object["place"] = e.item.place;
    object["nearest"] = e.item.name;
  }
  if (!e.problem.empty())
    object["problem"] = e.problem;
  return object;
}

class Explain : public CacheCommand {
public:
  Explain()
      : CacheCommand(
            "cache explain", "say why a kernel is in the cache, or why it is not",
            "Takes the options of 'build'. For each kernel it prints where the kernel is, or\n"
            "the most similar kernel that is kept and the field of its key that differs. It\n"
            "compiles nothing, and opens NVRTC only under SAGEBWD_RECOMPILE=1. The exit code\n"
            "is 0, whether or not a kernel is kept.\n"
            "\n"
            "examples:\n"
            "  sagebwd cache explain --arch sm_90a --head-dim 64\n"
            "  sagebwd cache explain --arch sm_80 --causal top-left --json\n"),
        operations_({}, /*without_gpu=*/"sm_80") {
    operations_.declare(options);
  }

  ExitCode run() override {
    const std::vector<OperationKernels> wanted = operations_.operations(options, failures);
    find_items();
    std::vector<KeptItem> kept;
    visit_items("reading", [&](KeptItem item, std::string) { kept.push_back(std::move(item)); });
    const std::string compiler = settings().recompile ? Nvrtc::instance().identity() : "";
    json::Array rows;
    std::string lines;
    size_t present = 0;
    for (const OperationKernels& operation : wanted)
      for (const KernelSpec& kernel : operation.kernels) {
        const CacheKey key = key_of(generate(kernel), kernel);
        const Explanation explanation = explain(key, kept, compiler);
        const std::string name = kernel_name(kernel), arch(kernel.arch.name);
        json::Object row = json_of_explanation(explanation);
        row["name"] = name;
        row["arch"] = arch;
        row["pass"] = std::string(to_string(kernel.pass));
        row["digest"] = key.digest;
        rows.push_back(std::move(row));
        lines += name + " (" + arch + ")\n  " + to_string(explanation) + "\n";
        present += explanation.verdict == Explanation::present;
      }
    const size_t count = rows.size();
    return finish({{"kernels", std::move(rows)}}, [&] {
      printf("%s%zu of %s %s in the cache\n", lines.c_str(), present,
             counted(count, "kernel").c_str(), count == 1 ? "is" : "are");
    });
  }

private:
  OperationOptions operations_;
};

} // namespace

std::unique_ptr<Command> make_cache_explain() { return std::make_unique<Explain>(); }

} // namespace sagebwd::tools
