//===- module_tuning.cpp - The tuner from Python ---------------------------===//
//
// Records cross this line as their files' text, which the package reads as JSON.
//
//===----------------------------------------------------------------------===//

#include "generator/operation.h"
#include "python/module.h"
#include "python/module_interrupt.h"
#include "runtime/plans.h"
#include "runtime/tuner/tile_choice.h"
#include "runtime/tuner/worker/command.h"
#include "runtime/tuner/worker/gpu_bench.h"

#include <algorithm>
#include <string>
#include <vector>

namespace sagebwd::python {

std::vector<TuningRecord> records_of_text(const std::string& text) {
  std::string why;
  auto records = parse_records(text, &why);
  if (!records)
    throw SpecError("these are no tuning records: " + why);
  return std::move(*records);
}

namespace {

TuneRequest tune_request(const ResolvedSpec& spec, const Problem& problem, int device,
                         const std::vector<std::string>& kernels) {
  TuneRequest request;
  request.spec = *spec;
  request.problem = problem;
  request.device = device;
  request.kernels.clear();
  for (const std::string& name : kernels)
    request.kernels.push_back(parse_tiled_kernel(name));
  return request;
}

py::list tune_kernels(const ResolvedSpec& spec, const Problem& problem, int device,
                      const std::vector<std::string>& kernels,
                      const std::vector<std::string>& tiles, bool force, int rounds,
                      const py::object& progress) {
  TuneRequest request = tune_request(spec, problem, device, kernels);
  for (const std::string& tile : tiles)
    request.only.push_back(parse_tile(tile));
  request.force = force;
  request.limits.rounds = rounds;
  request.progress = [&](const TuneProgress& p) {
    if (p.stage == "compiling") // the command line's
      return;
    const Held held;
    if (!progress.is_none())
      progress(std::string(to_string(p.kernel)), p.stage, p.tile, p.done, p.total);
  };
  using namespace pybind11::literals;
  py::list results;
  for (const Tuned& kernel : interruptibly([&] { return tune(request); }))
    results.append(py::dict("kernel"_a = std::string(to_string(kernel.kernel)),
                            "record"_a = serialize(kernel.record), "fresh"_a = kernel.fresh,
                            "kept"_a = kernel.kept));
  return results;
}

/// (kernel, digest of the record's key, tile) of what calls of a problem's size run with here, of
/// kernels that have records.
std::vector<std::array<std::string, 3>> tiles_in_use(const ResolvedSpec& spec,
                                                     const Problem& problem, int device,
                                                     const std::vector<std::string>& kernels) {
  const TuneRequest request = tune_request(spec, problem, device, kernels);
  const TuneSurroundings around = surroundings_of(device);
  const Operation operation = Operation(spec, around.gpu.arch).for_call(problem);
  std::vector<std::array<std::string, 3>> result;
  for (KernelKind kind : request.kernels) {
    if (!includes(operation.tunable_kernels(), kind))
      continue;
    const Bucket bucket = bucket_of(kind, request.problem, around.gpu.sm_count);
    result.push_back({std::string(to_string(kind)),
                      record_key(kind, spec, around.gpu, bucket).digest,
                      to_string(chosen_tile(TuneMode::use, kind, request, around))});
  }
  return result;
}

/// A dict for each plan, in their order, and a line for each precision that is left out.
py::tuple compare_plans(const ResolvedSpec& spec, const Problem& problem, int device, int rounds,
                        const py::object& progress) {
  PlanRequest request;
  request.spec = *spec;
  request.problem = problem;
  request.device = device;
  request.rounds = rounds;
  if (!progress.is_none())
    request.progress = [&](const std::string& what, int done, int total) {
      const Held held;
      progress(what, done, total);
    };
  using namespace pybind11::literals;
  py::list rows;
  std::vector<std::string> left_out;
  for (const PlanFigures& plan :
       interruptibly([&] { return sagebwd::compare_plans(request, left_out); }))
    rows.append(py::dict("precision"_a = std::string(to_string(plan.precision)),
                         "gradient_kernels"_a = value_text(plan.gradient_kernels),
                         "int8_products"_a = plan.int8_products, "forward_ms"_a = plan.forward_ms,
                         "backward_ms"_a = plan.backward_ms,
                         "errors"_a = py::dict("O"_a = plan.o.rel_l2, "dQ"_a = plan.dq.rel_l2,
                                               "dK"_a = plan.dk.rel_l2, "dV"_a = plan.dv.rel_l2)));
  return py::make_tuple(rows, left_out);
}

} // namespace

void bind_tuning(py::module_& m) {
  using WithoutGil = py::call_guard<Released>;

  m.def("tune", tune_kernels);
  m.def("compare_plans", compare_plans);
  m.def("tiles_in_use", tiles_in_use, WithoutGil());
  m.def(
      "tuning_records", [] { return user_records().exported(user_records().all()); }, WithoutGil(),
      "The text of a file that import_tuning_records reads.");
  m.def(
      "import_tuning_records",
      [](const std::string& text, bool overwrite) {
        const Records::Merged merged = user_records().merge(records_of_text(text), overwrite);
        return std::array<size_t, 3>{merged.added, merged.kept, merged.replaced};
      },
      WithoutGil());
  m.def("set_tune_worker", set_tune_worker);
  m.def("tune_worker_main", tune_worker_main);
}

} // namespace sagebwd::python
