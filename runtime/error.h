//===- error.h - Errors at run time ---------------------------------------===//
//
// This header declares the errors of the runtime. Errors in specs and arguments are SpecError
// (generator/spec.h).
//
//===----------------------------------------------------------------------===//
#pragma once

#include <stdexcept>
#include <string>

namespace sagebwd {

/// A library that is loaded at run time (libcuda, libnvrtc) is missing, too old, or cannot be used
/// in a forked process. The message says which places were searched and what to do.
class LibraryError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

/// SAGEBWD_OFFLINE=1 forbids compiling, and a kernel is in no layer of the cache. The message says
/// which places were searched, and which command builds the kernel. A single kernel's spec is
/// narrower than its operation's, so that only of_operation() can name the whole command.
class OfflineError : public std::runtime_error {
public:
  OfflineError(std::string missing, const std::string& command = "sagebwd prebuild")
      : std::runtime_error(missing + ". Where NVRTC is, run: " + command +
                           "; then name the file in SAGEBWD_CACHE_PACKS"),
        missing(std::move(missing)) {}
  std::string missing; ///< the missing kernel and the searched places, without the command
};

/// NVRTC refused a kernel or compiled it with spills. Such an error is a defect of this library, so
/// the message contains everything that a report needs.
class CompileError : public std::runtime_error {
public:
  CompileError(const std::string& what, std::string log, std::string numbered_source)
      : std::runtime_error(what), log(std::move(log)), numbered_source(std::move(numbered_source)) {
  }
  std::string log;             ///< NVRTC's program log
  std::string numbered_source; ///< the generated source with line numbers
};

/// A CUDA driver call failed. The message has the name of the call and the driver's error name and
/// text.
class DriverError : public std::runtime_error {
public:
  DriverError(const std::string& what, int code) : std::runtime_error(what), code(code) {}
  int code; ///< CUresult
};

} // namespace sagebwd
