//===- module_errors.h - The library's errors as Python exceptions ---------===//
#pragma once

#include "generator/spec.h"
#include "runtime/error.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

namespace sagebwd::python {

namespace py = pybind11;

/// The Python exception type that mirrors `Error`; made by the first call, alive for good.
template <typename Error>
py::object& exception_type(const char* name = "", PyObject* base = nullptr) {
  static py::gil_safe_call_once_and_store<py::object> storage;
  return storage
      .call_once_and_store_result([&] {
        return py::reinterpret_steal<py::object>(PyErr_NewException(name, base, nullptr));
      })
      .get_stored();
}

template <typename Error, typename... Attributes>
void raise(const Error& error, Attributes&&... attributes) {
  const py::object& type = exception_type<Error>();
  py::object instance = type(error.what());
  (py::setattr(instance, attributes.first, py::cast(attributes.second)), ...);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// SpecError is a ValueError, the others are RuntimeErrors. CompileError carries `log` and
/// `numbered_source`, DriverError carries `code`.
inline void bind_errors(py::module_& m) {
  m.attr("SpecError") = exception_type<SpecError>("sagebwd.SpecError", PyExc_ValueError);
  m.attr("LibraryError") = exception_type<LibraryError>("sagebwd.LibraryError", PyExc_RuntimeError);
  m.attr("CompileError") = exception_type<CompileError>("sagebwd.CompileError", PyExc_RuntimeError);
  m.attr("DriverError") = exception_type<DriverError>("sagebwd.DriverError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer)
        std::rethrow_exception(pointer);
    } catch (const SpecError& e) {
      raise(e);
    } catch (const LibraryError& e) {
      raise(e);
    } catch (const CompileError& e) {
      raise(e, std::pair("log", e.log), std::pair("numbered_source", e.numbered_source));
    } catch (const DriverError& e) {
      raise(e, std::pair("code", e.code));
    }
  });
}

} // namespace sagebwd::python
