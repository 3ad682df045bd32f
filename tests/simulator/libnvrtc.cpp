//===- libnvrtc.cpp - A run-time compiler for the CPU -----------------------===//
//
// The generated text is compiled by the system's C++ compiler, behind prelude.h. Sections from
// templates/ptx/, whose functions are instructions of a GPU, are replaced by the files of the same
// names here. The "cubin" is a shared library for libcuda.cpp.
//
//===----------------------------------------------------------------------===//

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

using Result = int;
constexpr Result kSuccess = 0, kCompilationFailed = 6;
constexpr int kArchs[] = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121};

struct Program {
  std::string source, name, object, log;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A section begins with "//===- PATH - " and ends where the next one begins. Lines keep their
/// numbers.
std::string with_simulated_instructions(std::string text) {
  const std::string begin = "//===- ptx/";
  for (size_t at = 0; (at = text.find(begin, at)) != std::string::npos;) {
    const size_t path = at + std::strlen("//===- ");
    const size_t next = std::min(text.find("\n//===- ", at), text.size());
    std::string include = "#include \"" + text.substr(path, text.find(' ', path) - path) + "\"";
    for (size_t i = at; i < next; ++i)
      if (text[i] == '\n')
        include += '\n';
    text.replace(at, next - at, include);
    at += include.size();
  }
  return text;
}

/// Gives what the host needs of a kernel: a launch with the parameters' address, its dynamic
/// memory.
std::string launcher(const std::string& text) {
  const std::string global = "extern \"C\" __global__ void";
  size_t at = text.find(global);
  if (at == std::string::npos)
    return "";
  const size_t end = text.find("(const __grid_constant__");
  const size_t name = text.find_last_of(" )\n", end) + 1;
  std::string added = "\nextern \"C\" void simulator_launch(const void* params) {\n  Params own;\n"
                      "  __builtin_memcpy(&own, params, sizeof(own));\n  " +
                      text.substr(name, end - name) + "(own);\n}\n";
  // The bounds stand in __launch_bounds__(threads, blocks a multiprocessor).
  const std::string bounds = "__launch_bounds__(";
  if (const size_t from = text.find(bounds, at); from < end)
    added += "extern \"C\" const int simulator_launch_bounds[2] = {" +
             text.substr(from + bounds.size(), text.find(')', from) - from - bounds.size()) +
             "};\n";
  if (text.find("extern __shared__") != std::string::npos)
    added += "thread_local __align__(1024) unsigned char "
             "shared_memory[PLACE_OFFSET + PLACE_BYTES];\n";
  return added;
}

/// Instructions of this CPU that stand for calls of libm, with the same results: a fused
/// multiply-add, a rounding to an integer.
const char* cpu_options() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return " -mavx2 -mfma";
#endif
  return "";
}

/// Hashes the compiler and all that it sees of the simulator and of the CPU. Kernels of others are
/// compiled again.
std::string build_number() {
  size_t hash = std::hash<std::string>()(std::string(SIMULATOR_COMPILER) + cpu_options());
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(SIMULATOR_FOLDER))
    if (entry.path().extension() == ".h" || entry.path().extension() == ".cuh")
      files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files)
    hash = hash * 1000003 + std::hash<std::string>()(read_file(file));
  return std::to_string(hash);
}

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default"))) Result

EXPORTED nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, kSuccess; }
EXPORTED nvrtcGetNumSupportedArchs(int* count) { return *count = std::size(kArchs), kSuccess; }
EXPORTED nvrtcGetSupportedArchs(int* archs) {
  return std::copy(std::begin(kArchs), std::end(kArchs), archs), kSuccess;
}
EXPORTED nvrtcCreateProgram(Program** program, const char* source, const char* name, int,
                            const char* const*, const char* const*) {
  *program = new Program{source, name, {}, {}};
  return kSuccess;
}
EXPORTED nvrtcDestroyProgram(Program** program) { return delete *program, kSuccess; }

EXPORTED nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::string arch;
  for (int i = 0; i < count; ++i)
    for (const char* c = options[i]; std::strstr(options[i], "--gpu-architecture") && *c; ++c)
      if (*c >= '0' && *c <= '9')
        arch += *c;
  std::string folder = fs::temp_directory_path() / "sagebwd-simulated-XXXXXX";
  if (!mkdtemp(folder.data())) {
    program->log = "no folder " + folder + ": " + std::strerror(errno) + "; set TMPDIR";
    return kCompilationFailed;
  }
  const fs::path place = folder;
  std::ofstream(place / program->name)
      << with_simulated_instructions(program->source) << launcher(program->source);
  // Products and sums are joined where the text says so: results are the same on every CPU.
  const std::string command =
      SIMULATOR_COMPILER " -x c++ -std=c++20 -Og -fno-inline-functions-called-once -w -shared "
                         "-fPIC -fno-strict-aliasing -fno-exceptions -ffp-contract=off -pipe" +
      std::string(cpu_options()) +
      " -I '" SIMULATOR_FOLDER "' -include prelude.h -D__CUDA_ARCH__=" + arch + "0 -o '" +
      (place / "object").string() + "' '" + (place / program->name).string() +
      "' -nostdlib -lgcc 2> '" + (place / "log").string() + "'"; // libc and libm are the process's
  const bool done = std::system(command.c_str()) == 0;
  program->object = read_file(place / "object");
  program->log = read_file(place / "log");
  if (done) // there are no registers to run short of
    program->log += "ptxas info    : Used 1 registers\n";
  std::error_code error;
  fs::remove_all(place, error);
  return done ? kSuccess : kCompilationFailed;
}

namespace {

Result copy_text(const std::string& text, char* to) {
  return std::memcpy(to, text.c_str(), text.size() + 1), kSuccess;
}
const std::string& ptx() {
  static const std::string text = "// Compiler Build ID: CL-" + build_number() + "\n";
  return text;
}

} // namespace

EXPORTED nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  return *bytes = program->object.size(), kSuccess;
}
EXPORTED nvrtcGetCUBIN(Program* program, char* to) {
  return std::copy(program->object.begin(), program->object.end(), to), kSuccess;
}
EXPORTED nvrtcGetPTXSize(Program*, size_t* bytes) { return *bytes = ptx().size() + 1, kSuccess; }
EXPORTED nvrtcGetPTX(Program*, char* to) { return copy_text(ptx(), to); }
EXPORTED nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  return *bytes = program->log.size() + 1, kSuccess;
}
EXPORTED nvrtcGetProgramLog(Program* program, char* to) { return copy_text(program->log, to); }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(Result result) {
  return result == kSuccess ? "success" : "the simulator's compiler failed";
}
