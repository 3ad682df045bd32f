//===- spec_list.cpp - Fuzzes the reader of lists of specs -----------------===//

#include "tests/fuzz/target.h"

#include <set>

// Their sources, so that they are sanitized: the command line is no library.
#include "tools/console.cpp"
#include "tools/options.cpp"
#include "tools/spec_list.cpp"
#include "tools/spec_options.cpp"

using namespace sagebwd;

std::vector<std::string> seeds() {
  return {
      "- arch: [sm_80, sm_90a]\n  head_dim: [64, 128]\n  causal:\n    - none\n    - 'top-left'\n"
      "- {arch: sm_120, smooth_k: false, group_kv: 64, pass: forward} # one\n",
      "[{\"arch\": \"sm_80\", \"dtype\": [\"bf16\"], \"granularity\": \"block\"}]",
      "- ? arch\n  : \"sm\\x38\\u0030\"\n- arch: !!str sm_80\n- arch: |\n   sm_80\n",
      "%YAML 1.2\n---\n- &x {arch: *x}\n- arch: >-\n   sm_80\n..."};
}

unsigned first_random() { return 6; }
std::string resealed(std::string input) { return input; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const std::vector<WantedOperation> operations = tools::parse_spec_list(text, "specs.yaml");
    require(!operations.empty());
    static std::set<std::string> known; // most inputs have operations of others before them
    for (const WantedOperation& operation : operations)
      if (known.insert(std::string(operation.arch.name) + to_string(operation.spec)).second)
        require(!kernels_of({operation}).empty());
  } catch (const tools::UsageError& error) {
    require(std::string(error.what()).rfind("specs.yaml", 0) == 0);
  }
  return 0;
}
