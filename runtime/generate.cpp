//===- generate.cpp - Generate a kernel's source --------------------------===//

#include "runtime/generate.h"
#include "generator/emit.h"

#include <fstream>
#include <sstream>

namespace sagebwd {

TemplateSource templates_in(std::string folder) {
  return [folder = std::move(folder)](std::string_view path) {
    std::ifstream file(folder + "/" + std::string(path));
    std::ostringstream text;
    if (!(text << file.rdbuf()))
      throw SpecError("cannot read template '" + std::string(path) +
                      "' in SAGEBWD_TEMPLATE_DIR = '" + folder + "'");
    return text.str();
  };
}

KernelSource with_bounded_waits(KernelSource source) {
  if (source.text.find("wait_for_phase(") == std::string::npos)
    return source;
  source.text = "#define SAGEBWD_BOUNDED_WAITS \"" + source.name +
                "\"\n#define SAGEBWD_ARRIVALS_OFFSET " + std::to_string(source.shared_bytes) +
                "\n" + source.text;
  constexpr int kArrivalsBytes = 16 * 4; // the size of the array in ptx/bounded_wait.cuh
  source.shared_bytes += kArrivalsBytes;
  return source;
}

KernelSource generate_with(const Settings& settings, const KernelSpec& kernel) {
  const std::string& folder = settings.template_dir;
  KernelSource source = folder.empty() ? emit(kernel) : emit(kernel, templates_in(folder));
  return settings.debug_waits ? with_bounded_waits(std::move(source)) : source;
}

KernelSource generate(const KernelSpec& kernel) { return generate_with(settings(), kernel); }

} // namespace sagebwd
