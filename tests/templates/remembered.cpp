//===- remembered.cpp - Kernels that an earlier run of the tests compiled ---===//

#include "tests/templates/remembered.h"
#include "cache/key.h"
#include "cache/whole_file.h"
#include "generator/emit.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/nvrtc/ptxas_report.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

namespace fs = std::filesystem;

namespace sagebwd::test {

namespace {

std::string folder() {
  const char* given = std::getenv("SAGEBWD_TEST_KERNELS");
  return given ? given : SAGEBWD_BINARY_DIR "/test-kernels";
}

/// Registers and spills are read from the log each time, for that is the product's to do.
std::optional<Compiled> read(std::string log, std::string ptx) {
  const std::optional<nvrtc::PtxasReport> report = nvrtc::parse_ptxas_report(log);
  if (!report)
    return std::nullopt;
  return Compiled{std::move(log), std::move(ptx), report->registers, report->spill_bytes};
}

/// The SHA-256 of what follows, the log's length, log and PTX.
std::optional<Compiled> recall(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string digest, rest;
  if (!std::getline(in, digest))
    return std::nullopt;
  std::ostringstream text;
  text << in.rdbuf();
  rest = text.str();
  if (digest != sha256_hex(rest))
    return std::nullopt;
  const size_t line = rest.find('\n');
  const size_t log = std::stoul(rest.substr(0, line));
  return read(rest.substr(line + 1, log), rest.substr(line + 1 + log));
}

void remember(const fs::path& file, const Compiled& compiled) {
  std::error_code error; // a folder that cannot be had costs time alone
  fs::create_directories(file.parent_path(), error);
  const std::string rest = std::to_string(compiled.log.size()) + "\n" + compiled.log + compiled.ptx;
  const std::string digest = sha256_hex(rest) + "\n";
  write_output(file.string(), {&digest, &rest});
}

/// One line per kernel for ./run nvrtc, written at once, as tests run side by side.
void report(std::string_view name, std::string_view arch, const Compiled& compiled) {
  if (const char* file = std::getenv("SAGEBWD_COMPILE_REPORT"))
    std::ofstream(file, std::ios::app) << std::string(arch) + "\t" + std::string(name) + "\t" +
                                              std::to_string(compiled.registers) + "\t" +
                                              std::to_string(compiled.spill_bytes) + "\n"
                                       << std::flush;
}

} // namespace

Compiled compile(std::string_view name, std::string_view source, std::string_view arch,
                 bool want_ptx, const std::vector<std::string>& options) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::string all_options;
  for (const auto* list : {&Nvrtc::options(), &options})
    for (const std::string& option : *list)
      all_options += option + "\n";
  const CacheKey key = make_key({{"compiler", nvrtc.identity()},
                                 {"name", std::string(name)},
                                 {"source", std::string(source)},
                                 {"arch", std::string(arch)},
                                 {"ptx", want_ptx ? "yes" : "no"},
                                 {"options", all_options}});
  const fs::path file = fs::path(folder()) / key.digest;
  if (!folder().empty())
    if (std::optional<Compiled> known = recall(file))
      return *known;
  Compilation made = nvrtc.compile(name, source, arch, want_ptx, options);
  Compiled compiled = {std::move(made.log), std::move(made.ptx), made.registers, made.spill_bytes};
  if (!folder().empty())
    remember(file, compiled);
  return compiled;
}

Compiled compile(const KernelSpec& kernel, bool want_ptx) {
  const KernelSource source = emit(kernel);
  const Compiled compiled =
      compile(source.name, source.text, kernel.arch.name, want_ptx, source.options);
  report(source.name, kernel.arch.name, compiled);
  return compiled;
}

} // namespace sagebwd::test
