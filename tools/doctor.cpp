//===- doctor.cpp - What this machine has, and what is missing for what ----===//
#include "cache/store.h"
#include "generator/spec.h"
#include "runtime/driver/driver.h"
#include "runtime/driver_needs.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/tuner/mode.h"
#include "tools/command.h"
#include "tools/console.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// Something this machine lacks.
struct Missing {
  std::string what, needed_for, remedy;
};

/// What NVRTC can do, or why it cannot be opened.
struct CompilerState {
  std::string path, identity, error;
  int version_major = 0, version_minor = 0;
  std::vector<std::string> archs;

  bool supports(const Arch& arch) const {
    // NVRTC lists "sm_90", which covers sm_90a.
    std::string base(arch.name);
    if (!base.empty() && base.back() == 'a')
      base.pop_back();
    return std::find(archs.begin(), archs.end(), base) != archs.end();
  }
};

CompilerState look_for_compiler() {
  CompilerState state;
  try {
    Nvrtc& nvrtc = Nvrtc::instance();
    state.path = nvrtc.path();
    state.identity = nvrtc.identity();
    state.version_major = nvrtc.version_major();
    state.version_minor = nvrtc.version_minor();
    state.archs = nvrtc.supported_archs();
  } catch (const std::exception& error) {
    state.error = error.what();
  }
  return state;
}

/// A GPU, and the architecture its kernels are built for.
struct Gpu {
  driver::DeviceInfo info;
  std::string arch, error;
};

std::vector<Gpu> look_for_gpus() {
  std::vector<Gpu> gpus;
  if (!driver::unavailable().empty())
    return gpus;
  for (int ordinal = 0; ordinal < driver::device_count(); ++ordinal) {
    Gpu gpu{driver::device_info(ordinal), "", ""};
    try {
      gpu.arch = arch_for_capability(gpu.info.major, gpu.info.minor).name;
    } catch (const SpecError& error) {
      gpu.error = error.what();
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

/// Entries on disk and their bytes.
struct CacheUse {
  size_t files = 0;
  uintmax_t bytes = 0;
};

CacheUse measure(const std::string& directory) {
  namespace fs = std::filesystem;
  CacheUse use;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error))
    if (it->is_regular_file(error)) {
      ++use.files;
      use.bytes += it->file_size(error);
    }
  return use;
}

/// A pack that SAGEBWD_CACHE_PACKS names.
struct PackState {
  std::string path, error;
  PackSummary summary;
};

std::vector<PackState> look_at_packs() {
  std::vector<PackState> packs;
  for (const std::string& path : user_store().options().packs) {
    PackState state;
    state.path = path;
    try {
      state.summary = summarize(*Pack::open(path));
    } catch (const PackError& error) {
      state.error = error.what();
    }
    packs.push_back(std::move(state));
  }
  return packs;
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && std::string(value) == "1";
}

/// ", at most 1024 MiB of kernels"
std::string limit_text() {
  const uint64_t limit = user_store().options().byte_limit;
  return limit ? format(", at most %.0f MiB of kernels", static_cast<double>(limit) / (1 << 20))
               : ", without a limit";
}

/// What is worth knowing about an architecture, beyond whether it compiles.
std::string note_for(const Arch& arch) {
  if (arch.name == "sm_103")
    return "emulates s8 mma: each becomes several instructions";
  return "";
}

class Doctor : public Command {
public:
  Doctor()
      : Command(
            "doctor", "what this machine has, and what is missing for what",
            "Looks for the run-time compiler (NVRTC), the CUDA driver, GPUs, the cache directory\n"
            "and packs, and kernels that this driver is too old for. Finding something missing is "
            "not a failure. Neither Python nor PyTorch\n"
            "is needed.\n"
            "\n"
            "examples:\n"
            "  sagebwd doctor\n"
            "  sagebwd doctor --json\n") {}

  ExitCode run() override {
    compiler_ = look_for_compiler();
    gpus_ = look_for_gpus();
    packs_ = look_at_packs();
    collect_missing();
    json ? print_as_json() : print_as_text();
    return kDone;
  }

private:
  void collect_missing();
  void collect_kernels_too_new();
  void print_as_json() const;
  void print_as_text() const;

  CompilerState compiler_;
  std::vector<Gpu> gpus_;
  std::vector<PackState> packs_;
  std::string tuning_; ///< the mode
  std::vector<Missing> missing_;
};

void Doctor::collect_missing() {
  if (!compiler_.error.empty())
    missing_.push_back({"NVRTC, CUDA's run-time compiler",
                        "compiling kernels (build, and the first use of each kernel)",
                        "pip install nvidia-cuda-nvrtc, or install a CUDA toolkit 12.8 or newer, "
                        "or set SAGEBWD_NVRTC to libnvrtc.so"});
  if (!driver::unavailable().empty()) {
    missing_.push_back({"a CUDA driver with a GPU",
                        "running kernels (verify, trace --device cuda, attention itself)",
                        "install NVIDIA's driver on a machine with a GPU; emit, build and "
                        "trace --device cpu work without"});
  } else {
    int driver_major = driver::driver_version() / 1000;
    if (compiler_.error.empty() && compiler_.version_major > driver_major)
      missing_.push_back(
          {format("a driver for CUDA %d (this one is for CUDA %d)", compiler_.version_major,
                  driver_major),
           "loading what this NVRTC compiles",
           format("update the driver, or pip install nvidia-cuda-nvrtc-cu%d and point "
                  "SAGEBWD_NVRTC at its libnvrtc.so.%d",
                  driver_major, driver_major)});
  }
  const CacheStore& store = user_store();
  if (!store.disabled_reason().empty())
    missing_.push_back({"a cache directory: " + store.disabled_reason(),
                        "keeping compiled kernels between processes",
                        "set SAGEBWD_CACHE_DIR to a directory of your own"});
  for (const PackState& pack : packs_)
    if (!pack.error.empty())
      missing_.push_back({"a usable pack: " + pack.error, "any kernel that is not in the directory",
                          "repair it, or take it out of SAGEBWD_CACHE_PACKS"});
  try {
    tuning_ = to_string(tune_mode());
  } catch (const SpecError& error) {
    tuning_ = "?";
    missing_.push_back({"a tuning mode: " + std::string(error.what()), "running kernels",
                        "set SAGEBWD_TUNE to one of them, or unset it"});
  }
  collect_kernels_too_new();
}

void Doctor::collect_kernels_too_new() {
  std::vector<std::string> archs; // of this machine's GPUs: other kernels are for others
  for (const Gpu& gpu : gpus_)
    archs.push_back(gpu.arch);
  if (archs.empty())
    return;
  auto check = [&](const DriverNeeds& needs, const std::string& place, const char* remedy) {
    std::string warning = driver_warning(needs, place, archs, driver::driver_version());
    if (!warning.empty())
      missing_.push_back({"a newer driver: " + warning, "loading those kernels", remedy});
  };
  for (const PackState& pack : packs_)
    check(pack.summary.kernels_by_driver, pack.path,
          "update the driver, or build the pack with the NVRTC of this driver's CUDA version");
  check(driver_needs(user_store().directory()), user_store().directory(),
        "update the driver; or point SAGEBWD_NVRTC at an NVRTC of its CUDA version and run "
        "'sagebwd build --recompile'");
}

void Doctor::print_as_json() const {
  json::Object nvrtc{{"found", compiler_.error.empty()}};
  if (compiler_.error.empty()) {
    nvrtc["path"] = compiler_.path;
    nvrtc["identity"] = compiler_.identity;
    nvrtc["architectures"] = json::Array(compiler_.archs);
  } else {
    nvrtc["error"] = compiler_.error;
  }

  const std::string& no_driver = driver::unavailable();
  json::Object driver_object{{"found", no_driver.empty()}};
  if (no_driver.empty())
    driver_object["cuda_version"] = driver::driver_version();
  else
    driver_object["error"] = no_driver;

  json::Array gpus;
  for (const Gpu& gpu : gpus_) {
    json::Object object{{"name", gpu.info.name},
                        {"capability", format("%d.%d", gpu.info.major, gpu.info.minor)},
                        {"sm_count", gpu.info.sm_count},
                        {"memory_bytes", static_cast<int64_t>(gpu.info.memory_bytes)},
                        {"supported", gpu.error.empty()}};
    object[gpu.error.empty() ? "arch" : "error"] = gpu.error.empty() ? gpu.arch : gpu.error;
    gpus.push_back(std::move(object));
  }

  const CacheStore& store = user_store();
  CacheUse use = measure(store.directory());
  json::Object cache{{"directory", store.directory()},
                     {"usable", store.disabled_reason().empty()},
                     {"files", static_cast<int64_t>(use.files)},
                     {"bytes", static_cast<int64_t>(use.bytes)},
                     {"byte_limit", static_cast<int64_t>(store.options().byte_limit)},
                     {"offline", is_set("SAGEBWD_OFFLINE")}};
  if (!store.disabled_reason().empty())
    cache["error"] = store.disabled_reason();

  json::Array packs;
  for (const PackState& pack : packs_) {
    json::Object object{{"path", pack.path}, {"usable", pack.error.empty()}};
    if (pack.error.empty()) {
      object["kernels"] = static_cast<int64_t>(pack.summary.kernels);
      object["records"] = static_cast<int64_t>(pack.summary.records);
      object["architectures"] = json::Array(pack.summary.archs);
      object["lowest_driver"] = pack.summary.lowest_driver;
    } else {
      object["error"] = pack.error;
    }
    packs.push_back(std::move(object));
  }
  cache["packs"] = std::move(packs);

  json::Array archs;
  for (const Arch& arch : all_archs()) {
    json::Object object{{"name", std::string(arch.name)}, {"compiles", compiler_.supports(arch)}};
    if (std::string note = note_for(arch); !note.empty())
      object["note"] = note;
    archs.push_back(std::move(object));
  }

  json::Array missing;
  for (const Missing& item : missing_)
    missing.push_back(json::Object{
        {"what", item.what}, {"needed_for", item.needed_for}, {"remedy", item.remedy}});

  print_json(json::Object{{"version", SAGEBWD_VERSION},
                          {"can_compile", compiler_.error.empty()},
                          {"can_run", !gpus_.empty()},
                          {"nvrtc", std::move(nvrtc)},
                          {"driver", std::move(driver_object)},
                          {"gpus", std::move(gpus)},
                          {"cache", std::move(cache)},
                          {"tuning", tuning_},
                          {"architectures", std::move(archs)},
                          {"missing", std::move(missing)}});
}

void Doctor::print_as_text() const {
  if (compiler_.error.empty())
    printf("nvrtc   %s, %s\n", compiler_.identity.c_str(), compiler_.path.c_str());
  else
    printf("nvrtc   not found\n%s\n", compiler_.error.c_str());

  if (driver::unavailable().empty())
    printf("driver  CUDA %s\n", driver::version_text(driver::driver_version()).c_str());
  else
    printf("driver  not usable: %s\n", driver::unavailable().c_str());

  for (size_t i = 0; i < gpus_.size(); ++i) {
    const driver::DeviceInfo& info = gpus_[i].info;
    const std::string& verdict = gpus_[i].error.empty() ? gpus_[i].arch : gpus_[i].error;
    printf("gpu %zu   %s, %d SMs, %.1f GiB, %s\n", i, info.name.c_str(), info.sm_count,
           static_cast<double>(info.memory_bytes) / (1 << 30), verdict.c_str());
  }

  const CacheStore& store = user_store();
  CacheUse use = measure(store.directory());
  if (store.disabled_reason().empty())
    printf("cache   %s: %zu files, %.1f MiB%s\n", store.directory().c_str(), use.files,
           static_cast<double>(use.bytes) / (1 << 20), limit_text().c_str());
  else
    printf("cache   not used: %s\n", store.disabled_reason().c_str());
  for (const PackState& pack : packs_)
    if (pack.error.empty())
      printf("pack    %s: %zu kernels, %zu tuning records, CUDA %s or newer\n", pack.path.c_str(),
             pack.summary.kernels, pack.summary.records,
             driver::version_text(pack.summary.lowest_driver).c_str());
    else
      printf("pack    not usable: %s\n", pack.error.c_str());
  if (is_set("SAGEBWD_OFFLINE"))
    puts("offline SAGEBWD_OFFLINE=1: nothing is compiled");
  printf("tuning  %s\n", tuning_.c_str());

  printf("archs  ");
  for (const Arch& arch : all_archs())
    printf(" %s%s", std::string(arch.name).c_str(), compiler_.supports(arch) ? "" : " (no)");
  putchar('\n');
  for (const Arch& arch : all_archs())
    if (std::string note = note_for(arch); !note.empty())
      printf("        %s %s\n", std::string(arch.name).c_str(), note.c_str());

  if (missing_.empty())
    puts("\nNothing is missing.");
  for (const Missing& item : missing_)
    printf("\nmissing     %s\nneeded for  %s\nremedy      %s\n", item.what.c_str(),
           item.needed_for.c_str(), item.remedy.c_str());
}

} // namespace

std::unique_ptr<Command> make_doctor() { return std::make_unique<Doctor>(); }

} // namespace sagebwd::tools
