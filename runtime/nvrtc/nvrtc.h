//===- nvrtc.h - The run-time compiler, opened when it is first needed -----===//
#pragma once

#include "runtime/error.h"

#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// One compilation's result.
struct Compilation {
  std::string cubin;
  std::string ptx; ///< filled where asked for
  std::string log; ///< NVRTC's program log with ptxas' report
  int registers = 0;
  int spill_bytes = 0; ///< stores and loads
  int static_shared_bytes = 0;
  double compile_ms = 0;
};

/// What a compiler log says that no shipped kernel may have: spills, and ptxas' warnings and
/// advisories (C75xx) but C7519. One line each; empty for a sound kernel.
std::vector<std::string> compile_warnings(const std::string& log);

/// The log without ptxas' routine report (registers, stack, its own compile time).
std::string without_report(const std::string& log);

/// A source as a person can match it with a log: each line after its number.
std::string number_lines(std::string_view source);

/// libnvrtc, by dlopen (RTLD_LOCAL). Thread-safe.
class Nvrtc {
public:
  /// Opens it on the first call; LibraryError lists every place that was tried. Order:
  /// SAGEBWD_NVRTC (then nothing else), a libnvrtc already in the process, nvrtc::suggest()'s, pip
  /// wheels beside this library, beside the running executable, in VIRTUAL_ENV or CONDA_PREFIX,
  /// CUDA_HOME / CUDA_PATH, the system.
  static Nvrtc& instance();

  const std::string& path() const; ///< of the library file
  int version_major() const;
  int version_minor() const;
  /// E.g. "nvrtc 13.0 build 36424714": the library really loaded, with its build number, which is
  /// read once from an empty compile.
  std::string identity();
  std::vector<std::string> supported_archs() const; ///< e.g. {"sm_75", ...}

  /// The options every kernel of this library is compiled with, without the architecture.
  static const std::vector<std::string>& options();

  /// Why it cannot compile for an architecture, with the version that can and how to get it; empty:
  /// it can.
  std::string why_not(std::string_view arch) const;

  /// Compiles to a cubin for a real architecture ("sm_90a"). CompileError carries the log and the
  /// numbered source. Spills and ptxas warnings are reported, not refused, here.
  /// LibraryError where this NVRTC is too old for the architecture.
  Compilation compile(std::string_view name, std::string_view source, std::string_view arch,
                      bool want_ptx = false, const std::vector<std::string>& more_options = {});

private:
  Nvrtc();
  struct Library;
  Library* library_;
};

} // namespace sagebwd
