//===- module_errors.h - The library's errors as Python exceptions ---------===//
#pragma once

#include "cache/pack.h"
#include "generator/spec.h"
#include "runtime/error.h"

#include <pybind11/pybind11.h>

namespace sagebwd::python {

namespace py = pybind11;

/// Text that may hold a path, which need not be UTF-8: as os.fsdecode() gives it.
inline py::str path_text(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

/// The Python exception type that mirrors `Error`; set once, at import, and alive for good.
template <typename Error> inline PyObject* exception_type = nullptr;

template <typename Error> void bind_error(py::module_& m, const char* name, PyObject* base) {
  if (!exception_type<Error>)
    exception_type<Error> =
        PyErr_NewException((std::string("sagebwd.") + name).c_str(), base, nullptr);
  m.attr(name) = py::reinterpret_borrow<py::object>(exception_type<Error>);
}

template <typename Error, typename... Attributes>
void raise(const Error& error, Attributes&&... attributes) {
  py::handle type = exception_type<Error>;
  py::object instance = type(path_text(error.what()));
  (py::setattr(instance, attributes.first, py::cast(attributes.second)), ...);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// SpecError is a ValueError, the others are RuntimeErrors. CompileError carries `log` and
/// `numbered_source`, DriverError carries `code`.
inline void bind_errors(py::module_& m) {
  bind_error<SpecError>(m, "SpecError", PyExc_ValueError);
  bind_error<LibraryError>(m, "LibraryError", PyExc_RuntimeError);
  bind_error<OfflineError>(m, "OfflineError", PyExc_RuntimeError);
  bind_error<PackError>(m, "PackError", PyExc_RuntimeError);
  bind_error<CompileError>(m, "CompileError", PyExc_RuntimeError);
  bind_error<DriverError>(m, "DriverError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer)
        std::rethrow_exception(pointer);
    } catch (const SpecError& e) {
      raise(e);
    } catch (const LibraryError& e) {
      raise(e);
    } catch (const OfflineError& e) {
      raise(e);
    } catch (const PackError& e) {
      raise(e);
    } catch (const CompileError& e) {
      raise(e, std::pair("log", e.log), std::pair("numbered_source", e.numbered_source));
    } catch (const DriverError& e) {
      raise(e, std::pair("code", e.code));
    }
  });
}

} // namespace sagebwd::python
