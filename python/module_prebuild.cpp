//===- module_prebuild.cpp - Packs from Python -----------------------------===//

#include "python/module.h"
#include "python/module_interrupt.h"
#include "runtime/prebuild.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sagebwd::python {

namespace {

py::dict prebuild_pack(const std::string& out,
                       const std::vector<std::pair<ResolvedSpec, std::string>>& specs,
                       bool backward, const std::vector<std::string>& record_files,
                       const py::object& progress) {
  std::vector<WantedOperation> operations;
  for (const auto& [spec, arch] : specs)
    operations.push_back({*spec, find_arch(arch), /*forward=*/true, backward});
  std::vector<TuningRecord> given;
  for (const std::string& text : record_files)
    for (TuningRecord& record : records_of_text(text))
      given.push_back(std::move(record));
  PrebuildRequest request;
  request.output = out;
  request.records = records_of(operations, given);
  request.kernels = kernels_of(operations, given);
  if (!given.empty() && request.records.empty())
    throw SpecError("none of the " + std::to_string(given.size()) +
                    " tuning records is of the operations asked for");
  request.progress = [&](const BuiltKernel& kernel, size_t done, size_t total) {
    const Held held;
    if (!progress.is_none())
      progress(kernel.entry.kernel_name, kernel.entry.arch, done, total);
  };
  const PrebuildResult result = interruptibly([&] { return prebuild(request); });
  size_t resumed = 0;
  int lowest_driver = 0;
  for (const auto& kernel : result.kernels) {
    resumed += kernel->cached;
    lowest_driver = std::max(lowest_driver, kernel->entry.lowest_driver);
  }
  using namespace pybind11::literals;
  return py::dict(
      "out"_a = path_text(out), "bytes"_a = result.pack_bytes, "kernels"_a = result.kernels.size(),
      "compiled"_a = result.kernels.size() - resumed, "resumed"_a = resumed,
      "records"_a = result.records, "records_left_out"_a = given.size() - result.records,
      "compiler"_a = result.kernels.empty() ? "" : result.kernels.front()->entry.compiler,
      "lowest_driver"_a = lowest_driver, "threads"_a = result.threads);
}

} // namespace

void bind_prebuild(py::module_& m) { m.def("prebuild", prebuild_pack); }

} // namespace sagebwd::python
