//===- nvrtc.cpp - The run-time compiler ----------------------------------===//

#include "runtime/nvrtc/nvrtc.h"
#include "cache/at_fork.h"
#include "runtime/nvrtc/first_version.h"
#include "runtime/nvrtc/in_use.h"
#include "runtime/nvrtc/library.h"
#include "runtime/nvrtc/ptxas_report.h"
#include "runtime/nvrtc/signals.h"
#include "runtime/parallel_for.h"
#include "runtime/settings.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <chrono>
#include <dlfcn.h>
#include <mutex>

namespace sagebwd {

namespace {

using Program = struct ProgramHandle*; // nvrtcProgram
using Result = int;                    // nvrtcResult
constexpr Result kSuccess = 0;
constexpr Result kCompilationFailed = 6; // NVRTC_ERROR_COMPILATION
constexpr int kOldestMajor = 12;

// The functions of libnvrtc that are used. All are in version 12.0 and later. Each line has a name
// and parameters.
#define SAGEBWD_NVRTC_FUNCTIONS(X)                                                                 \
  X(nvrtcVersion, int*, int*)                                                                      \
  X(nvrtcGetNumSupportedArchs, int*)                                                               \
  X(nvrtcGetSupportedArchs, int*)                                                                  \
  X(nvrtcCreateProgram, Program*, const char*, const char*, int, const char* const*,               \
    const char* const*)                                                                            \
  X(nvrtcDestroyProgram, Program*)                                                                 \
  X(nvrtcCompileProgram, Program, int, const char* const*)                                         \
  X(nvrtcGetCUBINSize, Program, size_t*)                                                           \
  X(nvrtcGetCUBIN, Program, char*)                                                                 \
  X(nvrtcGetPTXSize, Program, size_t*)                                                             \
  X(nvrtcGetPTX, Program, char*)                                                                   \
  X(nvrtcGetProgramLogSize, Program, size_t*)                                                      \
  X(nvrtcGetProgramLog, Program, char*)

/// The first line of a log that says "error", for messages of one line.
std::string first_error(const std::string& log) {
  size_t at = log.find("error");
  if (at == std::string::npos)
    return log.substr(0, log.find('\n'));
  size_t begin = log.rfind('\n', at);
  begin = begin == std::string::npos ? 0 : begin + 1;
  return log.substr(begin, log.find('\n', at) - begin);
}

/// The build number in a PTX comment: "36424714" in "// Compiler Build ID: CL-36424714". If a build
/// says "UNKNOWN" there, the version in "// Cuda compilation tools, release 13.2, V13.2.86":
/// "V13.2.86".
std::string build_of(const std::string& ptx) {
  const auto number_after = [&](std::string_view label) -> std::string {
    const size_t at = ptx.find(label);
    if (at == std::string::npos)
      return "";
    const size_t begin = at + label.size();
    return ptx.substr(begin, ptx.find_first_not_of("0123456789.", begin) - begin);
  };
  if (const std::string build = number_after("Compiler Build ID: CL-"); !build.empty())
    return build;
  const std::string version = number_after(", V");
  return version.empty() ? "unknown" : "V" + version;
}

/// The number of an architecture: 90 for "sm_90a".
int number_of(std::string_view arch) {
  int number = 0;
  for (char c : arch)
    if (c >= '0' && c <= '9')
      number = number * 10 + (c - '0');
  return number;
}

} // namespace

std::string number_lines(std::string_view source) {
  std::string text;
  for (size_t line = 1, begin = 0; begin < source.size(); ++line) {
    size_t end = std::min(source.find('\n', begin), source.size());
    std::string number = std::to_string(line);
    text += std::string(number.size() < 5 ? 5 - number.size() : 0, ' ') + number + "  ";
    text += source.substr(begin, end - begin);
    text += '\n';
    begin = end + 1;
  }
  return text;
}

static ForkSafeMutex& build_mutex() {
  static constinit Single<ForkSafeMutex> mutex;
  return mutex.get([] { return new ForkSafeMutex; });
}

struct Nvrtc::Library {
  std::string path;
  int major = 0, minor = 0;
  std::vector<int> archs; ///< e.g. 75, 80, 90
#define X(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  SAGEBWD_NVRTC_FUNCTIONS(X)
#undef X
  const char* (*nvrtcGetErrorString)(Result) = nullptr;
  /// null before version 12.8: then a compilation cannot be cut short
  Result (*nvrtcSetFlowCallback)(Program, int (*)(void*, void*), void*) = nullptr;

  std::string build; ///< empty until the first compilation; guarded by build_mutex()

  Library();
  std::string name() const {
    return "NVRTC " + std::to_string(major) + "." + std::to_string(minor) + " (" + path + ")";
  }
  /// Raises LibraryError for a failed call: these calls fail only if the library is broken.
  void check(Result, const char* function) const;
  void remember_build(const std::string& ptx);
  std::string text(Program, Result (*size)(Program, size_t*), Result (*get)(Program, char*)) const;

private:
  template <class Function> void resolve(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (!function)
      throw LibraryError(path + " has no " + name + ": it is no NVRTC, or older than 12. Set " +
                         "SAGEBWD_NVRTC to the libnvrtc of CUDA 12 or 13.");
  }
};

Nvrtc::Library::Library() {
  nvrtc::OpenLibrary library = nvrtc::open_first(nvrtc::candidates(settings().nvrtc));
  path = library.path;
#define X(name, ...) resolve(library.handle, #name, name);
  SAGEBWD_NVRTC_FUNCTIONS(X)
#undef X
  resolve(library.handle, "nvrtcGetErrorString", nvrtcGetErrorString);
  nvrtcSetFlowCallback = reinterpret_cast<decltype(nvrtcSetFlowCallback)>(
      ::dlsym(library.handle, "nvrtcSetFlowCallback"));
  nvrtc::keep_signal_handlers(library.handle);

  end_work_at_exit(); // so that work ends before the library's own exit handlers run
  check(nvrtcVersion(&major, &minor), "nvrtcVersion");
  if (major < kOldestMajor)
    throw LibraryError(name() + " is too old: 12 and 13 are supported. Install it with `pip "
                                "install nvidia-cuda-nvrtc`, or set SAGEBWD_NVRTC.");
  int count = 0;
  check(nvrtcGetNumSupportedArchs(&count), "nvrtcGetNumSupportedArchs");
  archs.resize(count);
  check(nvrtcGetSupportedArchs(archs.data()), "nvrtcGetSupportedArchs");
}

void Nvrtc::Library::check(Result result, const char* function) const {
  if (result != kSuccess)
    throw LibraryError(std::string(function) + " of " + name() +
                       " failed: " + nvrtcGetErrorString(result));
}

void Nvrtc::Library::remember_build(const std::string& ptx) {
  std::lock_guard lock(build_mutex());
  if (build.empty())
    build = build_of(ptx);
}

std::string Nvrtc::Library::text(Program program, Result (*size)(Program, size_t*),
                                 Result (*get)(Program, char*)) const {
  size_t bytes = 0;
  if (size(program, &bytes) != kSuccess || bytes == 0)
    return "";
  std::string text(bytes, '\0');
  if (get(program, text.data()) != kSuccess)
    return "";
  return text;
}

namespace {

/// Creates a program and destroys it at the end of the scope.
template <class Library> class ScopedProgram {
public:
  ScopedProgram(const Library& library, std::string_view name, std::string_view source)
      : library_(library) {
    std::string file = std::string(name) + ".cu", text(source);
    library_.check(
        library_.nvrtcCreateProgram(&program_, text.c_str(), file.c_str(), 0, nullptr, nullptr),
        "nvrtcCreateProgram");
  }
  ~ScopedProgram() { library_.nvrtcDestroyProgram(&program_); }
  ScopedProgram(const ScopedProgram&) = delete;
  ScopedProgram& operator=(const ScopedProgram&) = delete;

  Result compile(const std::string& arch, const std::vector<std::string>& more_options = {}) {
    std::string arch_option = "--gpu-architecture=" + arch;
    std::vector<const char*> options = {arch_option.c_str()};
    for (const std::string& option : Nvrtc::options())
      options.push_back(option.c_str());
    for (const std::string& option : more_options)
      options.push_back(option.c_str());
    // From version 13 on, NVRTC may answer from the driver's cache, without the report of ptxas.
    if (library_.major >= 13)
      options.push_back("--no-cache");
    // Whoever waits for an interrupt, it ends early only where the library is being taken down.
    // NVRTC 13.0 crashes in about one of some hundred compilations that are cancelled.
    if (library_.nvrtcSetFlowCallback)
      library_.nvrtcSetFlowCallback(
          program_, [](void*, void*) -> int { return is_cut_short(); }, nullptr);
    const Result result =
        library_.nvrtcCompileProgram(program_, static_cast<int>(options.size()), options.data());
    // In its first compilation NVRTC registered its own exit handlers.
    static constinit Single<const bool> awaited;
    awaited.get([] {
      await_work_at_exit();
      return new const bool(true);
    });
    check_interrupt();
    return result;
  }
  std::string cubin() const {
    return library_.text(program_, library_.nvrtcGetCUBINSize, library_.nvrtcGetCUBIN);
  }
  /// The PTX without the zero byte with which NVRTC ends texts.
  std::string ptx() const {
    return library_.text(program_, library_.nvrtcGetPTXSize, library_.nvrtcGetPTX).c_str();
  }
  std::string log() const {
    return library_.text(program_, library_.nvrtcGetProgramLogSize, library_.nvrtcGetProgramLog)
        .c_str();
  }

private:
  const nvrtc::InUse in_use_; // made first, destroyed last
  const Library& library_;
  Program program_ = nullptr;
};

} // namespace

Nvrtc& Nvrtc::instance() {
  static constinit Single<Nvrtc> nvrtc; // a fork waits while the library is being opened
  return nvrtc.get([] { return new Nvrtc; });
}

/// The library is never freed, because threads may still compile while the process ends.
Nvrtc::Nvrtc() : library_(new Library) {}

const std::string& Nvrtc::path() const { return library_->path; }
int Nvrtc::version_major() const { return library_->major; }
int Nvrtc::version_minor() const { return library_->minor; }

std::string Nvrtc::identity() {
  auto build = [&] {
    std::lock_guard lock(build_mutex());
    return library_->build;
  };
  if (build().empty()) {
    ScopedProgram empty(*library_, "empty", "");
    library_->check(empty.compile("compute_" + std::to_string(library_->archs.front())),
                    "nvrtcCompileProgram");
    library_->remember_build(empty.ptx());
  }
  return "nvrtc " + std::to_string(version_major()) + "." + std::to_string(version_minor()) +
         " build " + build();
}

std::vector<std::string> Nvrtc::supported_archs() const {
  std::vector<std::string> names;
  for (int arch : library_->archs)
    names.push_back("sm_" + std::to_string(arch));
  return names;
}

const std::vector<std::string>& Nvrtc::options() {
  // Every numeric mode is set explicitly, so that NVRTC's defaults are not a part of the numerics.
  static constinit Single<const std::vector<std::string>> options;
  return options.get([] {
    return new const std::vector<std::string>{
        "--std=c++17",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--fmad=true",
        "--ptxas-options=-v",
        // Otherwise NVRTC treats generic lambdas in device code as host functions.
        "--device-as-default-execution-space",
    };
  });
}

std::string Nvrtc::why_not(std::string_view arch) const {
  const int first = nvrtc::first_version(arch);
  const int version = 1000 * version_major() + 10 * version_minor();
  const std::vector<int>& known = library_->archs;
  if (std::find(known.begin(), known.end(), number_of(arch)) != known.end() && version >= first)
    return "";
  return library_->name() + " cannot compile for " + std::string(arch) +
         (version < first ? ", which needs NVRTC " + std::to_string(first / 1000) + "." +
                                std::to_string(first % 1000 / 10) + " or newer"
                          : "; it knows " + llvm::join(supported_archs(), ", ")) +
         ". Install a newer one with `pip install nvidia-cuda-nvrtc`, or set SAGEBWD_NVRTC.";
}

Compilation Nvrtc::compile(std::string_view name, std::string_view source, std::string_view arch,
                           bool want_ptx, const std::vector<std::string>& more_options) {
  if (const std::string why = why_not(arch); !why.empty())
    throw LibraryError(why);

  auto start = std::chrono::steady_clock::now();
  ScopedProgram program(*library_, name, source);
  Result result = program.compile(std::string(arch), more_options);
  Compilation compilation;
  compilation.log = program.log();

  auto fail = [&](const std::string& what) {
    throw CompileError(library_->name() + " did not compile " + std::string(name) + " for " +
                           std::string(arch) + ": " + what,
                       compilation.log, number_lines(source));
  };
  if (compilation.log.find("failed to open libnvrtc-builtins") != std::string::npos)
    throw LibraryError(
        library_->name() + " lacks its libnvrtc-builtins, which belongs into the " +
        "same folder. Reinstall it, or set SAGEBWD_NVRTC. Its log: " + compilation.log);
  if (result == kCompilationFailed)
    fail(first_error(compilation.log));
  if (result != kSuccess)
    fail(library_->nvrtcGetErrorString(result));
  compilation.cubin = program.cubin();
  if (compilation.cubin.empty())
    fail("it made no cubin; name a real architecture such as sm_90a");

  std::string ptx = program.ptx();
  if (ptx.empty() && want_ptx) { // NVRTC keeps PTX only for virtual architectures
    ScopedProgram again(*library_, name, source);
    if (again.compile("compute_" + std::string(arch.substr(arch.find('_') + 1))) != kSuccess)
      fail("its PTX cannot be had");
    ptx = again.ptx();
  }
  if (!ptx.empty())
    library_->remember_build(ptx);
  if (want_ptx)
    compilation.ptx = std::move(ptx);

  std::optional<nvrtc::PtxasReport> report = nvrtc::parse_ptxas_report(compilation.log);
  if (!report)
    fail("its log holds no report of ptxas, so spills cannot be excluded");
  compilation.registers = report->registers;
  compilation.spill_bytes = report->spill_bytes;
  compilation.static_shared_bytes = report->static_shared_bytes;
  compilation.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return compilation;
}

} // namespace sagebwd
