//===- module.cpp - sagebwd._core ------------------------------------------===//
//
// The thin layer between the C++ library and the Python package. Importing it loads no CUDA
// library, needs no GPU and, until an array is passed, no NumPy. Whatever compiles, launches or
// computes runs without the GIL.
//
//===----------------------------------------------------------------------===//
#include "python/module_attention.h"
#include "python/module_errors.h"
#include "python/module_interrupt.h"
#include "python/module_prebuild.h"
#include "python/module_reference.h"
#include "python/module_tuning.h"

#include "runtime/diagnosis.h"
#include "runtime/driver/driver.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"

#include <algorithm>

namespace py = pybind11;
using namespace pybind11::literals;
using namespace sagebwd;

namespace {

void bind_spec(py::module_& m) {
  py::class_<AttentionSpec>(m, "Spec", "The resolved numerics of one attention operation.")
      .def(py::init([](int head_dim, const std::string& dtype, const std::string& causal,
                       const std::string& granularity, const std::string& precision, bool smooth_k,
                       bool rotate, bool deterministic, int group_q, int group_kv,
                       const std::string& arch) {
             const AttentionSpec spec = {head_dim,
                                         parse_dtype(dtype),
                                         parse_causal(causal),
                                         parse_granularity(granularity),
                                         parse_precision(precision),
                                         smooth_k,
                                         rotate,
                                         deterministic,
                                         group_q,
                                         group_kv};
             return arch.empty() ? resolved(spec) : resolved(spec, find_arch(arch));
           }),
           "head_dim"_a = 128, "dtype"_a = "bf16", "causal"_a = "none", "granularity"_a = "row",
           "precision"_a = "six-of-seven", "smooth_k"_a = true, "rotate"_a = true,
           "deterministic"_a = true, "group_q"_a = 0, "group_kv"_a = 0, "arch"_a = "")
      .def_readonly("head_dim", &AttentionSpec::head_dim)
      .def_property_readonly("dtype", [](const AttentionSpec& s) { return to_string(s.dtype); })
      .def_property_readonly("causal", [](const AttentionSpec& s) { return to_string(s.causal); })
      .def_property_readonly("granularity",
                             [](const AttentionSpec& s) { return to_string(s.granularity); })
      .def_property_readonly("precision",
                             [](const AttentionSpec& s) { return to_string(s.precision); })
      .def_readonly("smooth_k", &AttentionSpec::smooth_k)
      .def_readonly("rotate", &AttentionSpec::rotate)
      .def_readonly("deterministic", &AttentionSpec::deterministic)
      .def_readonly("group_q", &AttentionSpec::group_q)
      .def_readonly("group_kv", &AttentionSpec::group_kv)
      .def("__eq__", [](const AttentionSpec& a, const AttentionSpec& b) { return a == b; })
      .def("__hash__", [](const AttentionSpec& s) { return py::hash(py::str(to_string(s))); })
      .def("__str__", [](const AttentionSpec& s) { return to_string(s); })
      .def("__repr__", [](const AttentionSpec& s) { return "<Spec " + to_string(s) + ">"; });
}

/// The kernels of both passes, or of the forward alone, in launch order; each once, also where both
/// passes launch it.
std::vector<KernelSpec> kernels_for(const AttentionSpec& spec, const Arch& arch, bool backward) {
  std::vector<KernelSpec> kernels = kernels_of(Pass::forward, spec, arch);
  if (backward)
    for (KernelSpec& kernel : kernels_of(Pass::backward, spec, arch))
      if (std::none_of(kernels.begin(), kernels.end(), [&](const KernelSpec& other) {
            return kernel_name(other) == kernel_name(kernel);
          }))
        kernels.push_back(std::move(kernel));
  return kernels;
}

void bind_kernels(py::module_& m) {
  m.def("archs", [] {
    py::list names;
    for (const Arch& arch : all_archs())
      names.append(arch.name);
    return names;
  });
  m.def("arch_for_capability",
        [](int major, int minor) { return arch_for_capability(major, minor).name; });
  m.def(
      "emit",
      [](const AttentionSpec& spec, const std::string& arch, bool backward) {
        py::list sources;
        for (const KernelSpec& kernel : kernels_for(spec, find_arch(arch), backward)) {
          KernelSource source = emit(kernel);
          sources.append(py::dict("name"_a = source.name, "kind"_a = to_string(kernel.kind),
                                  "pass"_a = to_string(kernel.pass),
                                  "tile"_a = to_string(kernel.tile), "text"_a = source.text,
                                  "threads"_a = source.threads,
                                  "shared_bytes"_a = source.shared_bytes));
        }
        return sources;
      },
      "spec"_a, "arch"_a, "backward"_a = true);
  m.def(
      "build",
      [](const AttentionSpec& spec, const std::string& arch, bool backward) {
        std::vector<std::shared_ptr<const BuiltKernel>> built;
        {
          const python::Interruptible interruptible;
          py::gil_scoped_release released;
          built = build_operation(kernels_for(spec, find_arch(arch), backward), spec);
        }
        py::list figures;
        for (const auto& kernel : built)
          figures.append(py::dict(
              "name"_a = kernel->entry.kernel_name, "pass"_a = to_string(kernel->spec.pass),
              "cached"_a = kernel->cached, "compile_ms"_a = kernel->entry.compile_ms,
              "registers"_a = kernel->entry.registers, "spill_bytes"_a = kernel->entry.spill_bytes,
              "shared_bytes"_a = kernel->entry.shared_bytes));
        return figures;
      },
      "spec"_a, "arch"_a, "backward"_a = true);
}

/// What this machine has, each part with the reason where it has not.
void bind_environment(py::module_& m) {
  m.def("driver", [] {
    std::string missing;
    {
      py::gil_scoped_release released;
      missing = driver::unavailable();
    }
    py::dict result("missing"_a = missing, "version"_a = py::none(), "devices"_a = py::list());
    if (!missing.empty())
      return result;
    result["version"] = driver::driver_version();
    py::list devices;
    for (int i = 0; i < driver::device_count(); ++i) {
      driver::DeviceInfo info = driver::device_info(i);
      devices.append(py::dict("name"_a = info.name, "major"_a = info.major, "minor"_a = info.minor,
                              "sm_count"_a = info.sm_count, "memory_bytes"_a = info.memory_bytes));
    }
    result["devices"] = devices;
    return result;
  });
  m.def("nvrtc", [] {
    py::dict result("missing"_a = "", "path"_a = py::none(), "identity"_a = py::none());
    try {
      Nvrtc* nvrtc;
      std::string identity;
      {
        py::gil_scoped_release released;
        nvrtc = &Nvrtc::instance();
        identity = nvrtc->identity();
      }
      result["path"] = nvrtc->path();
      result["identity"] = identity;
      result["archs"] = nvrtc->supported_archs();
    } catch (const LibraryError& e) {
      result["missing"] = e.what();
    }
    return result;
  });
  m.def("cache", [] {
    CacheStore& store = user_store();
    py::dict counters;
    for (const auto& [name, value] : listed(store.counters()))
      counters[name] = value;
    return py::dict("directory"_a = store.directory(),
                    "disabled_reason"_a = store.disabled_reason(),
                    "byte_limit"_a = store.options().byte_limit, "packs"_a = store.options().packs,
                    "offline"_a = settings().offline, "counters"_a = counters);
  });
  m.def(
      "diagnose",
      [](const std::string& version, std::vector<std::pair<std::string, std::string>> parts,
         const std::vector<std::array<std::string, 3>>& missing) {
        CallersParts caller{std::move(parts), {}};
        for (const auto& [what, needed_for, remedy] : missing)
          caller.missing.push_back({what, needed_for, remedy});
        const Diagnosis diagnosis = diagnose(version, caller);
        return std::tuple(diagnosis.json, diagnosis.text, diagnosis.sound);
      },
      "version"_a, "parts"_a, "missing"_a, py::call_guard<py::gil_scoped_release>());
}

} // namespace

#if PYBIND11_VERSION_HEX >= 0x020D0000
PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
#else // the distributions' versions
PYBIND11_MODULE(_core, m) {
#endif
  m.doc() = "The C++ library of sagebwd. Internal: use the package's own functions.";
  python::bind_errors(m);
  bind_spec(m);
  bind_kernels(m);
  bind_environment(m);
  python::bind_reference(m);
  python::bind_attention(m);
  python::bind_tuning(m);
  python::bind_prebuild(m);
}
