//===- cache_explain.cpp - 'sagebwd cache explain' -------------------------===//
#include "cache/explain.h"
#include "runtime/generate.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"
#include "tools/cache.h"
#include "tools/spec_options.h"

#include <cstdlib>
#include <set>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

const char* word_for(Explanation::Verdict verdict) {
  switch (verdict) {
  case Explanation::present:
    return "present";
  case Explanation::other_compiler:
    return "other compiler";
  case Explanation::bad:
    return "bad";
  case Explanation::differs:
  case Explanation::nothing:
    return "absent";
  }
  return "";
}

class Explain : public Command {
public:
  Explain()
      : Command("cache explain", "why a kernel is, or is not, in the cache",
                "Takes what 'build' takes. For each kernel: the layer that has it, or the nearest\n"
                "kernel that is kept and the field of its key that differs. Compiles nothing, and\n"
                "opens NVRTC only under SAGEBWD_RECOMPILE=1. The exit code is 0 whatever is kept.\n"
                "\n"
                "examples:\n"
                "  sagebwd cache explain --arch sm_90a --head-dim 64\n"
                "  sagebwd cache explain --arch sm_80 --causal top-left --json\n") {
    options.list("arch", "ARCH,..", archs_, "architectures");
    spec_.declare(options, /*lists=*/true);
  }

  ExitCode run() override {
    const std::vector<KernelSpec> wanted = kernels();
    Layers layers = user_layers();
    std::vector<KeptItem> kept;
    visit_items(layers, "reading", [&](const KeptName&, KeptItem item, std::string) {
      kept.push_back(std::move(item));
    });
    if (settings().recompile)
      compiler_ = Nvrtc::instance().identity();
    for (const KernelSpec& kernel : wanted) {
      const CacheKey key = key_of(generate(kernel), kernel);
      explained_.push_back({kernel, key.digest, explain(key, kept, compiler_)});
    }
    json ? print_as_json(layers.failures) : print_as_text();
    return report_failures("cache explain", layers.failures);
  }

private:
  struct Explained {
    KernelSpec kernel;
    std::string digest;
    Explanation explanation;
  };
  std::vector<KernelSpec> kernels() const;
  void print_as_json(const std::vector<std::string>& failures) const;
  void print_as_text() const;

  SpecOptions spec_;
  std::vector<std::string> archs_{"sm_80"};
  std::string compiler_;
  std::vector<Explained> explained_;
};

std::vector<KernelSpec> Explain::kernels() const {
  std::vector<KernelSpec> kernels;
  std::set<std::string> seen; // some kernels serve both passes, or several specs
  for (const Arch& arch : parse_archs(archs_))
    for (const AttentionSpec& spec : spec_.all(options))
      for (const KernelSpec& kernel : distinct_kernels(resolved(spec, arch), arch))
        if (seen.insert(std::string(arch.name) + " " + kernel_name(kernel)).second)
          kernels.push_back(kernel);
  return kernels;
}

json::Array json_of(const std::vector<FieldDifference>& fields) {
  json::Array array;
  for (const FieldDifference& field : fields)
    array.push_back(
        json::Object{{"field", field.label}, {"wanted", field.wanted}, {"kept", field.kept}});
  return array;
}

void Explain::print_as_json(const std::vector<std::string>& failures) const {
  json::Array array;
  for (const Explained& e : explained_) {
    json::Object object{{"name", kernel_name(e.kernel)},
                        {"arch", std::string(e.kernel.arch.name)},
                        {"pass", std::string(to_string(e.kernel.pass))},
                        {"digest", e.digest},
                        {"verdict", word_for(e.explanation.verdict)},
                        {"differs", json_of(e.explanation.differences)},
                        {"following", json_of(e.explanation.following)},
                        {"text", to_string(e.explanation)}};
    if (!e.explanation.place.empty()) {
      object["layer"] = e.explanation.in_pack ? "pack" : "directory";
      object["place"] = e.explanation.place;
      object["nearest"] = e.explanation.nearest;
    }
    if (!e.explanation.problem.empty())
      object["problem"] = e.explanation.problem;
    array.push_back(std::move(object));
  }
  print_json(json::Object{{"kernels", std::move(array)}, {"failures", json::Array(failures)}});
}

void Explain::print_as_text() const {
  size_t present = 0;
  for (const Explained& e : explained_) {
    present += e.explanation.verdict == Explanation::present;
    printf("%s (%s)\n  %s\n", kernel_name(e.kernel).c_str(),
           std::string(e.kernel.arch.name).c_str(), to_string(e.explanation).c_str());
  }
  printf("%zu of %zu kernels are in the cache\n", present, explained_.size());
}

} // namespace

std::unique_ptr<Command> make_cache_explain() { return std::make_unique<Explain>(); }

} // namespace sagebwd::tools
