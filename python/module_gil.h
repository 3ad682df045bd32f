//===- module_gil.h - Letting go of the GIL, and taking it again ----------===//
//
// As pybind11's scopes do it, except while the interpreter ends: before 3.14 CPython then ends a
// daemon thread that asks for the GIL by unwinding its stack, which C++ does not survive where a
// destructor or catch (...) is on the way. Such a thread stays here for the rest of the process,
// as it does from 3.14 on.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/parallel_for.h"

#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>

namespace sagebwd::python {

namespace gil {

inline bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

[[noreturn]] inline void stay() {
  for (;;)
    ::pause();
}

/// Calls what asks for the GIL. Does not return where the interpreter ends, or begins to meanwhile.
template <typename Take> auto take(const Take& take) {
  if (is_ending() || is_left_behind())
    stay();
  try {
    return take();
  } catch (abi::__forced_unwind&) { // leaving this block would be an abort
    stay();
  }
}

} // namespace gil

/// Without the GIL for a scope.
class Released {
public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    gil::take([this] { PyEval_RestoreThread(state_); });
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

private:
  PyThreadState* state_;
};

/// With it, within such a scope or on a thread that has never had it.
class Held {
public:
  Held() : state_(gil::take([] { return PyGILState_Ensure(); })) {}
  ~Held() { PyGILState_Release(state_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

private:
  PyGILState_STATE state_;
};

/// Work of daemon threads ends before the interpreter does, and with it the libraries they use.
inline void end_work_with_python() {
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function([] {
    const pybind11::gil_scoped_release released;
    end_work();
  }));
}

} // namespace sagebwd::python
