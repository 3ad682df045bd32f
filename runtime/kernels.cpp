//===- kernels.cpp - From a KernelSpec to machine code ---------------------===//

#include "runtime/kernels.h"
#include "runtime/kernel_builder.h"
#include "runtime/nvrtc/nvrtc.h"

#include <cstdlib>
#include <string_view>

namespace sagebwd {

namespace {

/// Of the key and of what an entry promises. Raise it when either changes its meaning.
constexpr const char* kSchema = "sagebwd kernel 1";

std::string joined_options(const KernelSource& source) {
  std::string text;
  for (const std::string& option : Nvrtc::options())
    text += (text.empty() ? "" : " ") + option;
  for (const std::string& option : source.options)
    text += " " + option;
  return text;
}

/// Bytes of spill stores and loads a thread may have. Kernels are laid out to have none with the
/// NVRTC this is tested with; another version's ptxas may need a few, which costs too little to
/// refuse the kernel for. Every listing shows them.
constexpr int kTolerableSpillBytes = 128;

bool spills_allowed() {
  const char* value = std::getenv("SAGEBWD_ALLOW_SPILLS");
  return value && std::string_view(value) == "1";
}

/// Never destroyed: threads may still build while the process ends.
KernelBuilder& builder() {
  static KernelBuilder& builder = *new KernelBuilder(user_store(), emit, compile_with_nvrtc);
  return builder;
}

} // namespace

KernelBuilder::Compiled compile_with_nvrtc(const KernelSource& source, const KernelSpec& spec) {
  Nvrtc& nvrtc = Nvrtc::instance();
  Compilation compilation =
      nvrtc.compile(source.name, source.text, spec.arch.name, false, source.options);
  std::vector<std::string> warnings = compile_warnings(compilation.log);
  if (compilation.spill_bytes <= kTolerableSpillBytes)
    std::erase_if(warnings,
                  [](const std::string& w) { return w.find("C75") == std::string::npos; });
  if (!warnings.empty() && !spills_allowed()) {
    std::string what = source.name + " compiles for " + std::string(spec.arch.name) +
                       ", but is not usable: a defect of its tile configuration (" +
                       to_string(spec.tile) + "). Please report it with this text; " +
                       "SAGEBWD_ALLOW_SPILLS=1 runs it all the same.";
    for (const std::string& warning : warnings)
      what += "\n  " + warning;
    throw CompileError(what, compilation.log, number_lines(source.text));
  }

  CacheEntry entry;
  entry.kernel_name = source.name;
  entry.arch = spec.arch.name;
  entry.compiler = nvrtc.identity();
  entry.source_digest = sha256_hex(source.text);
  entry.options = joined_options(source);
  entry.registers = compilation.registers;
  entry.spill_bytes = compilation.spill_bytes;
  entry.shared_bytes = compilation.static_shared_bytes + source.shared_bytes;
  entry.compile_ms = compilation.compile_ms;
  entry.cubin = std::move(compilation.cubin);
  return {std::move(entry), /*keep=*/warnings.empty()};
}

CacheStore& user_store() {
  static CacheStore& store = *new CacheStore;
  return store;
}

CacheKey key_of(const KernelSource& source, const KernelSpec& spec) {
  return make_key({{"schema", kSchema},
                   {"source", source.text},
                   {"options", joined_options(source)},
                   {"arch", std::string(spec.arch.name)}});
}

std::shared_ptr<const BuiltKernel> build(const KernelSpec& spec) { return builder().build(spec); }

std::vector<std::shared_ptr<const BuiltKernel>> build_all(const std::vector<KernelSpec>& specs) {
  return builder().build_all(specs);
}

} // namespace sagebwd
