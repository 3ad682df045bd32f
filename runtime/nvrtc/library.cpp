//===- library.cpp - Find libnvrtc ----------------------------------------===//

#include "runtime/nvrtc/library.h"
#include "cache/at_fork.h"
#include "runtime/error.h"
#include "runtime/settings.h"

#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <glob.h>
#include <link.h>
#include <mutex>

namespace fs = std::filesystem;

namespace sagebwd::nvrtc {

namespace {

/// The sonames, newest first. NVRTC 12.8 is the first version that supports every architecture of
/// the library's list.
constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

std::vector<std::string> glob_all(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t result = {};
  if (::glob(pattern.c_str(), 0, nullptr, &result) == 0)
    paths.assign(result.gl_pathv, result.gl_pathv + result.gl_pathc);
  ::globfree(&result);
  return paths;
}

/// The folder of the shared library or executable that this code is linked into.
fs::path own_folder() {
  Dl_info info;
  if (!::dladdr(reinterpret_cast<void*>(&own_folder), &info) || !info.dli_fname)
    return {};
  std::error_code error;
  return fs::weakly_canonical(info.dli_fname, error).parent_path();
}

fs::path executable_prefix() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
}

class Places {
public:
  void add(Candidate::Kind kind, std::string name, std::string origin) {
    list_.push_back({kind, std::move(name), std::move(origin)});
  }
  void folder(const std::string& path, const std::string& origin) {
    for (const char* soname : kSonames)
      add(Candidate::file, path + "/" + soname, origin);
  }
  /// Adds the places in a folder of Python packages.
  void site_packages(const std::string& path, const std::string& origin) {
    folder(path + "/nvidia/cu13/lib", origin);
    folder(path + "/nvidia/cuda_nvrtc/lib", origin);
  }
  /// Adds the places in a Python installation or virtual environment.
  void python_prefix(const std::string& prefix, const std::string& origin) {
    bool found = false;
    for (const char* pattern : {"/lib*/python3*/site-packages", "/lib*/python3*/dist-packages"})
      for (const std::string& path : glob_all(prefix + pattern)) {
        site_packages(path, origin);
        found = true;
      }
    if (!found)
      add(Candidate::file, prefix + "/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.*",
          origin);
  }
  void toolkit(const std::string& root, const std::string& origin) {
    folder(root + "/lib64", origin);
    folder(root + "/lib", origin);
  }
  std::vector<Candidate> take() { return std::move(list_); }

private:
  std::vector<Candidate> list_;
};

/// Loads the builtins of libnvrtc. CUDA 13's wheels have no RUNPATH, so libnvrtc finds its builtins
/// only if the process has loaded them already.
void open_builtins(const fs::path& folder) {
  for (const std::string& path : glob_all((folder / "libnvrtc-builtins.so.[0-9]*").string()))
    ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_name)
    return "";
  std::error_code error;
  fs::path path = fs::canonical(map->l_name, error);
  return error ? map->l_name : path.string();
}

void* open(const Candidate& candidate, std::string& why) {
  if (candidate.kind == Candidate::file) {
    std::error_code error;
    if (!fs::exists(candidate.name, error)) {
      why = "no such file";
      return nullptr;
    }
    open_builtins(fs::path(candidate.name).parent_path());
  }
  int flags = RTLD_NOW | RTLD_LOCAL | (candidate.kind == Candidate::loaded ? RTLD_NOLOAD : 0);
  void* handle = ::dlopen(candidate.name.c_str(), flags);
  if (!handle) {
    const char* message = ::dlerror();
    why = candidate.kind == Candidate::loaded ? "not loaded" : message ? message : "not found";
  }
  return handle;
}

/// The arguments of the last call of suggest().
struct Suggestion {
  ForkSafeMutex mutex;
  std::string file, origin;
};
Suggestion& suggestion() {
  static constinit Single<Suggestion> suggestion;
  return suggestion.get([] { return new Suggestion; });
}

} // namespace

void suggest(const std::string& file, const std::string& origin) {
  Suggestion& s = suggestion();
  const std::lock_guard lock(s.mutex);
  s.file = file, s.origin = origin;
}

std::vector<Candidate> candidates(const std::string& given) {
  Places places;
  if (!given.empty()) {
    std::error_code error;
    if (fs::is_directory(given, error))
      places.folder(given, "SAGEBWD_NVRTC");
    else
      places.add(Candidate::file, given, "SAGEBWD_NVRTC");
    return places.take();
  }

  for (const char* soname : kSonames)
    places.add(Candidate::loaded, soname, "in this process");
  {
    Suggestion& s = suggestion();
    const std::lock_guard lock(s.mutex);
    if (!s.file.empty())
      places.add(Candidate::file, s.file, s.origin);
  }

  // If this library is site-packages/sagebwd/_core.so, NVRTC is in site-packages/nvidia.
  if (fs::path folder = own_folder(); !folder.empty())
    places.site_packages(folder.parent_path().string(), "beside this library");
  if (fs::path prefix = executable_prefix(); !prefix.empty()) {
    places.python_prefix(prefix.string(), "beside the executable");
    places.python_prefix((prefix / "venv").string(), "beside the executable");
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (std::string prefix = environment_variable(name); !prefix.empty()) {
      places.python_prefix(prefix, name);
      places.folder(prefix + "/lib", name);
    }

  for (const char* name : {"CUDA_HOME", "CUDA_PATH"})
    if (std::string root = environment_variable(name); !root.empty())
      places.toolkit(root, name);

  for (const char* soname : kSonames)
    places.add(Candidate::search, soname, "the dynamic linker");
  places.toolkit("/usr/local/cuda", "the system");
  std::vector<std::string> toolkits = glob_all("/usr/local/cuda-1[2-9]*");
  for (auto root = toolkits.rbegin(); root != toolkits.rend(); ++root)
    places.toolkit(*root, "the system");
  return places.take();
}

OpenLibrary open_first(const std::vector<Candidate>& places) {
  std::string tried;
  for (const Candidate& candidate : places) {
    std::string why;
    if (void* handle = open(candidate, why)) {
      OpenLibrary library{handle, path_of(handle)};
      open_builtins(fs::path(library.path).parent_path());
      return library;
    }
    tried += "\n  " + candidate.name + " (" + candidate.origin + "): " + why;
  }
  // The remedy is last, where the tail of a log has it.
  if (!places.empty() && places.front().origin == "SAGEBWD_NVRTC")
    throw LibraryError("SAGEBWD_NVRTC names no libnvrtc (CUDA's run-time compiler, 12 or 13), and "
                       "a kernel has to be compiled. Tried:" +
                       tried + "\nRemedy: correct SAGEBWD_NVRTC, or unset it.");
  throw LibraryError("libnvrtc (CUDA's run-time compiler, 12 or 13) was not found, and a kernel "
                     "has to be compiled. Tried:" +
                     tried +
                     "\nRemedy: `pip install nvidia-cuda-nvrtc` (for drivers of CUDA 13) or `pip "
                     "install nvidia-cuda-nvrtc-cu12` (for CUDA 12), or set SAGEBWD_NVRTC to the "
                     "library file.");
}

} // namespace sagebwd::nvrtc
