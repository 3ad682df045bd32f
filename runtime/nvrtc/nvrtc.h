//===- nvrtc.h - The run-time compiler, opened on first use ---------------===//
#pragma once

#include "runtime/error.h"

#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// The result of one compilation.
struct Compilation {
  std::string cubin;
  std::string ptx; ///< empty unless the caller wanted it
  std::string log; ///< NVRTC's program log, which contains the report of ptxas
  int registers = 0;
  int spill_bytes = 0; ///< bytes of spill stores and loads together
  int static_shared_bytes = 0;
  double compile_ms = 0;
};

/// The lines of a compiler log that no shipped kernel may have: spills, and warnings and advisories
/// (C75xx) of ptxas except C7519. A sound kernel has none.
std::vector<std::string> compile_warnings(const std::string& log);

/// The log without the routine report of ptxas (registers, stack, its compile time).
std::string without_report(const std::string& log);

/// The source with a number before each line, so that people can match it with a log.
std::string number_lines(std::string_view source);

/// Calls libnvrtc, which dlopen() loads with RTLD_LOCAL. Thread-safe.
class Nvrtc {
public:
  /// Opens the library on the first call. Raises LibraryError, which lists every place that was
  /// searched. The order: SAGEBWD_NVRTC (if it is set, nothing else is searched), a libnvrtc that
  /// the process has loaded already, the file of nvrtc::suggest(), pip wheels beside this library,
  /// beside the running executable, in VIRTUAL_ENV or in CONDA_PREFIX, CUDA_HOME or CUDA_PATH, the
  /// system.
  static Nvrtc& instance();

  const std::string& path() const; ///< the path of the library file
  int version_major() const;
  int version_minor() const;
  /// The library's version and build, e.g. "nvrtc 13.0 build 36424714". The build number is read
  /// once, from an empty compilation.
  std::string identity();
  std::vector<std::string> supported_archs() const; ///< e.g. {"sm_75", ...}

  /// The options with which every kernel is compiled, without the architecture.
  static const std::vector<std::string>& options();

  /// Why this NVRTC cannot compile for an architecture, with the first version that can and how to
  /// get it; empty if it can.
  std::string why_not(std::string_view arch) const;

  /// Compiles to a cubin for a real architecture ("sm_90a"). Spills and ptxas warnings are only
  /// reported in the result. Raises CompileError with the log and the numbered source, or
  /// LibraryError if this NVRTC is too old for the architecture.
  Compilation compile(std::string_view name, std::string_view source, std::string_view arch,
                      bool want_ptx = false, const std::vector<std::string>& more_options = {});

private:
  Nvrtc();
  struct Library;
  Library* library_;
};

} // namespace sagebwd
