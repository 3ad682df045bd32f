//===- module.cpp - sagebwd._core ------------------------------------------===//
//
// The thin layer between the C++ library and the Python package. Importing it loads no CUDA
// library, needs no GPU and, until an array is passed, no NumPy. Whatever compiles, launches or
// computes runs without the GIL.
//
//===----------------------------------------------------------------------===//
#include "python/module.h"
#include "generator/emit.h"
#include "generator/fastest.h"
#include "generator/operation.h"
#include "python/module_interrupt.h"
#include "python/module_jax.h"

#include "cache/whole_file.h"
#include "runtime/attention.h"
#include "runtime/diagnosis.h"
#include "runtime/driver/driver.h"
#include "runtime/generate.h"
#include "runtime/kernels.h"
#include "runtime/log.h"
#include "runtime/nvrtc/library.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"
#include "runtime/version.h"

#include <pybind11/operators.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace pybind11::literals;
using namespace sagebwd;

namespace {

template <typename T> py::object python_value(const T& value) {
  if constexpr (Worded<T>)
    return py::cast(to_string(value));
  else
    return py::cast(value);
}

AttentionSpec spec_given(const py::kwargs& options) {
  AttentionSpec given;
  for (const auto& [name, value] : options) {
    const auto word = py::cast<std::string>(py::str(value));
    const bool is_bool = py::isinstance<py::bool_>(value);
    if (!set_field(given, py::cast<std::string>(name),
                   is_bool ? (py::cast<bool>(value) ? "yes" : "no") : word))
      throw py::type_error("Spec() got an unexpected keyword argument '" +
                           py::cast<std::string>(name) + "'");
  }
  return given;
}

void bind_spec(py::module_& m) {
  py::class_<ResolvedSpec> spec(m, "Spec", "The resolved numerics of one attention operation.");
  spec.def(py::init([](const py::kwargs& options) { return resolved(spec_given(options)); }))
      .def(py::init([](const std::string& line) { return resolved(parse_spec(line)); }))
      .def(py::self == py::self)
      .def("__hash__", [](const ResolvedSpec& s) { return py::hash(py::str(to_string(*s))); })
      .def("__str__", [](const ResolvedSpec& s) { return to_string(*s); })
      .def("__repr__",
           [](const ResolvedSpec& s) { return "sagebwd.Spec('" + to_string(*s) + "')"; })
      .def(py::pickle([](const ResolvedSpec& s) { return to_string(*s); },
                      [](const std::string& text) { return resolved(parse_spec(text)); }));
  py::dict fields; // by name: the default, and what it decides
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T& usual) {
    spec.def_property_readonly(
        std::string(label.name).c_str(), [name = label.name](const ResolvedSpec& s) {
          py::object found;
          visit_fields(*s, [&]<typename Value>(const Label& other, const Value& value) {
            if (other.name == name)
              found = python_value(value);
          });
          return found;
        });
    fields[py::str(std::string(label.name))] = py::make_tuple(python_value(usual), label.help);
  });
  m.attr("spec_fields") = fields;
  m.attr("least_softmax_scale") = kLeastSoftmaxScale;
  m.attr("usual_head_dims") =
      py::tuple(py::cast(std::vector<int>(std::begin(kUsualHeadDims), std::end(kUsualHeadDims))));
  m.attr("widths") = py::tuple(py::cast(std::vector<int>(std::begin(kWidths), std::end(kWidths))));
  py::list precisions;
  for (const auto& [precision, word] : Words<Precision>::all)
    precisions.append(word);
  m.attr("precisions") = py::tuple(precisions);
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
  // (precision, dp_sums) of options on a GPU, of whose sums of dP those in `options` are kept.
  m.def("fastest_precision", [](int major, int minor, const std::string& gpu, bool keeps_dp_sums,
                                const py::kwargs& options) {
    const FastestPrecision found = fastest_precision(
        spec_given(options), arch_for_capability(major, minor), gpu, keeps_dp_sums);
    return py::make_tuple(value_text(found.precision), value_text(found.dp_sums));
  });
  using Texts = std::map<std::string, std::string>;
  const auto kernels = [](const ResolvedSpec& spec, const std::string& arch, bool backward,
                          const Texts& tiles) {
    return Operation(spec, find_arch(arch), python::tiles_of_text(tiles))
        .distinct_kernels(backward);
  };
  const auto emit = [kernels](const ResolvedSpec& spec, const std::string& arch, bool backward,
                              const Texts& tiles) {
    py::list sources;
    for (const KernelSpec& kernel : kernels(spec, arch, backward, tiles)) {
      KernelSource source = generate(kernel);
      sources.append(py::dict("name"_a = source.name, "kind"_a = to_string(kernel.kind),
                              "pass"_a = to_string(kernel.pass), "tile"_a = to_string(kernel.tile),
                              "text"_a = source.text, "threads"_a = source.threads,
                              "shared_bytes"_a = source.shared_bytes));
    }
    return sources;
  };
  const auto build = [kernels](const ResolvedSpec& spec, const std::string& arch, bool backward,
                               const Texts& tiles) {
    const auto built = python::interruptibly(
        [&] { return build_operation(kernels(spec, arch, backward, tiles), spec); });
    py::list figures;
    for (const auto& kernel : built)
      figures.append(py::dict(
          "name"_a = kernel->entry.kernel_name, "pass"_a = to_string(kernel->spec.pass),
          "cached"_a = kernel->cached, "compile_ms"_a = kernel->entry.compile_ms,
          "registers"_a = kernel->entry.registers, "spill_bytes"_a = kernel->entry.spill_bytes,
          "shared_bytes"_a = kernel->entry.shared_bytes));
    return figures;
  };
  // `tiles`: those that are not the default ones, by the names of their kernels.
  m.def("emit", emit, "spec"_a, "arch"_a, "backward"_a, "tiles"_a = Texts());
  m.def("build", build, "spec"_a, "arch"_a, "backward"_a, "tiles"_a = Texts());
}

/// Says what this machine has, and of each part that it has not the reason.
void bind_environment(py::module_& m) {
  m.def("driver", [] {
    std::string missing;
    {
      const python::Released released;
      missing = driver::unavailable();
    }
    py::list devices, names;
    for (int i = 0; missing.empty() && i < driver::device_count(); ++i) {
      const driver::DeviceInfo info = driver::device_info(i);
      devices.append(py::make_tuple(info.major, info.minor));
      names.append(py::bytes(info.name)); // may be no UTF-8
    }
    return py::dict("missing"_a = missing, "devices"_a = devices, "names"_a = names);
  });
  m.def("nvrtc", [] {
    std::string missing, identity;
    try {
      const python::Released released;
      identity = Nvrtc::instance().identity();
    } catch (const LibraryError& e) {
      missing = e.what();
    }
    return py::dict("missing"_a = python::path_text(missing), "identity"_a = identity);
  });
  m.def("suggest_nvrtc", [](const std::string& file) {
    nvrtc::suggest(file, "the wheels that this Python imports from");
  });
  m.def(
      "write_output",
      [](const std::string& path, const std::string& text) { return write_output(path, {&text}); },
      py::call_guard<python::Released>(),
      "Makes or replaces a file, whole or not at all; why it could not, or nothing.");
  m.def("cache", [] {
    CacheStore& store = user_store();
    py::dict counters;
    for (const auto& [name, value] : listed(store.counters()))
      counters[name] = value;
    py::list packs;
    for (const std::string& path : store.options().packs)
      packs.append(python::path_text(path));
    return py::dict("directory"_a = python::path_text(store.directory()),
                    "disabled_reason"_a = python::path_text(store.disabled_reason()),
                    "byte_limit"_a = store.options().byte_limit, "packs"_a = packs,
                    "offline"_a = settings().offline, "counters"_a = counters);
  });
  m.def("jax_targets", [] {
    std::vector<std::tuple<std::string, std::string, py::capsule>> targets;
    for (const auto& [name, platform, function] : python::jax_targets())
      targets.emplace_back(name, platform, py::capsule(function));
    return targets;
  });
  m.def(
      "diagnose",
      [](std::vector<std::pair<std::string, std::string>> parts,
         const std::vector<std::array<std::string, 3>>& missing) {
        CallersParts caller{std::move(parts), {}};
        for (const auto& [what, needed_for, remedy] : missing)
          caller.missing.push_back({what, needed_for, remedy});
        const Diagnosis diagnosis = diagnose(caller);
        const python::Held held;
        return py::make_tuple(diagnosis.json, python::path_text(diagnosis.text), diagnosis.sound);
      },
      py::call_guard<python::Released>());
}

} // namespace

#if PYBIND11_VERSION_HEX >= 0x020D0000
PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
#else // the distributions' versions
PYBIND11_MODULE(_core, m) {
#endif
  m.doc() = "The C++ library of sagebwd. Internal: use the package's own functions.";
  m.attr("__version__") = version();
  python::end_work_with_python();
  // For log_to_python(): where it is first imported while another thread forks, the child waits for
  // that import for ever.
  py::module_::import("logging");
  keep_log_lines();
  make_tables(); // under the GIL, which os.fork() takes
  python::bind_errors(m);
  bind_spec(m);
  bind_kernels(m);
  bind_environment(m);
  python::bind_reference(m);
  python::bind_attention(m);
  python::bind_expressions(m);
  python::bind_front(m);
  python::bind_tuning(m);
  python::bind_prebuild(m);
}
