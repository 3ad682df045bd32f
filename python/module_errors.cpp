//===- module_errors.cpp - The library's errors as Python exceptions -------===//

#include "cache/pack.h"
#include "generator/spec.h"
#include "python/module.h"
#include "runtime/error.h"
#include "runtime/tuner/trials.h"

namespace sagebwd::python {

py::str path_text(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

namespace {

/// Sets what an exception has beside its text.
void add_attributes(py::object&, const std::exception&) {}
void add_attributes(py::object& exception, const DriverError& e) {
  exception.attr("code") = e.code;
}
void add_attributes(py::object& exception, const CompileError& e) {
  exception.attr("log") = e.log;
  exception.attr("numbered_source") = e.numbered_source;
}

/// The Python exception type that mirrors `Error`; set once, at import, and alive for good.
template <typename Error> PyObject* exception_type = nullptr;

template <typename Error> void bind_error(py::module_& m, const char* name, PyObject* base) {
  PyObject*& type = exception_type<Error>;
  if (!type)
    type = PyErr_NewException((std::string("sagebwd.") + name).c_str(), base, nullptr);
  m.attr(name) = py::reinterpret_borrow<py::object>(type);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer)
        std::rethrow_exception(pointer);
    } catch (const Error& e) {
      py::object exception = py::handle(exception_type<Error>)(path_text(e.what()));
      add_attributes(exception, e);
      PyErr_SetObject(exception_type<Error>, exception.ptr());
    }
  });
}

} // namespace

void bind_errors(py::module_& m) {
  bind_error<SpecError>(m, "SpecError", PyExc_ValueError);
  bind_error<LibraryError>(m, "LibraryError", PyExc_RuntimeError);
  bind_error<OfflineError>(m, "OfflineError", PyExc_RuntimeError);
  bind_error<PackError>(m, "PackError", PyExc_RuntimeError);
  bind_error<CompileError>(m, "CompileError", PyExc_RuntimeError);
  bind_error<DriverError>(m, "DriverError", PyExc_RuntimeError);
  bind_error<TuneError>(m, "TuneError", PyExc_RuntimeError);
}

} // namespace sagebwd::python
