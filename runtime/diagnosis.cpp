//===- diagnosis.cpp - The report of the doctor about this machine --------===//

#include "runtime/diagnosis.h"

#include "cache/bounded_json.h"
#include "generator/kernel.h"
#include "generator/operation.h"
#include "runtime/diagnosis_cache.h"
#include "runtime/diagnosis_gpus.h"
#include "runtime/driver/driver.h"
#include "runtime/generate.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc/first_version.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"
#include "runtime/version.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"

#include <cstdlib>
#include <set>
#include <unistd.h>

namespace sagebwd {
namespace {

namespace json = llvm::json;

/// An object with {name: true}, or with false and the error.
json::Object verdict(const char* name, const std::string& error) {
  json::Object object{{name, error.empty()}};
  if (!error.empty())
    object["error"] = utf8(error);
  return object;
}

/// A remark about an architecture, for the report.
std::string note_for(const Arch& arch) {
  return arch.emulates_int8() ? "emulates s8 mma: each becomes several instructions" : "";
}

size_t total(const DriverNeeds& needs) {
  size_t sum = 0;
  for (const auto& [need, count] : needs)
    sum += count;
  return sum;
}

/// Says how many of a pack's kernels this version can find, unless it can find all.
std::string of_version(size_t kernels, size_t current) {
  if (current == kernels)
    return "";
  return current == 0 ? " of another version"
                      : " (" + std::to_string(current) + " of this version)";
}

class Doctor {
public:
  explicit Doctor(const CallersParts& caller) : caller_(caller) {}

  Diagnosis examine() {
    leave_unknown_variables_to_others(); // the report names them
    settings_ = Settings::from_environment(&problems_);
    if (asked_nvrtc_ = problems_.empty() && !settings_.offline; asked_nvrtc_)
      compiler_ = look_for_compiler();
    else if (settings_.offline)
      compiler_.error = "not looked for: SAGEBWD_OFFLINE=1 forbids compiling";
    else
      compiler_.error = "not looked for: a variable has a value that is not valid (see below)";
    gpus_ = look_for_gpus();
    directory_ = look_at_directory(settings_.store_options());
    for (const std::string& path : settings_.packs)
      llvm::append_range(packs_, look_at_packs(path, settings_.trusted_owners));
    look_at_paths();
    collect_missing();
    Diagnosis diagnosis;
    diagnosis.json = llvm::formatv("{0:2}", as_json());
    diagnosis.text = as_text();
    diagnosis.sound =
        problems_.empty() && unknown_variables().empty() && directory_.error.empty() &&
        llvm::all_of(packs_, [](const PackState& pack) { return pack.error.empty(); }) &&
        (gpus_.empty() || can_run()) && (!settings_.offline || !kept_.empty());
    return diagnosis;
  }

private:
  void miss(std::string what, std::string needed_for, std::string remedy) {
    missing_.push_back({std::move(what), std::move(needed_for), std::move(remedy)});
  }
  bool has_gpu_of(const Arch& arch) const {
    return llvm::any_of(gpus_, [&](const GpuState& gpu) { return gpu.arch == arch.name; });
  }
  bool can_run() const {
    return llvm::any_of(gpus_, [&](const GpuState& gpu) { return runs(gpu, compiler_, kept_); });
  }
  void look_at_paths();
  void collect_missing();
  void collect_kernels_held();
  void collect_kernels_too_new();
  json::Value as_json() const;
  json::Value cache_as_json() const;
  std::string as_text() const;

  const CallersParts& caller_;
  std::vector<std::string> problems_; ///< of the environment
  Settings settings_;
  CompilerState compiler_;
  bool asked_nvrtc_ = false;
  std::vector<GpuState> gpus_;
  DirectoryState directory_;
  /// Of kernels that this version can find: in the directory, computed only if it matters, and in
  /// the directory and the packs.
  DriverNeeds directory_needs_;
  DriverNeeds kept_;
  std::vector<PackState> packs_;
  std::set<std::string> held_; ///< architectures of kept kernels; computed only offline
  std::vector<Missing> missing_;
};

/// Reports variables whose paths lead nowhere, and variables that nothing reads.
void Doctor::look_at_paths() {
  const auto check = [&](const char* name, const std::string& path, bool sound, const char* none) {
    if (!path.empty() && !sound)
      problems_.push_back(std::string(name) + " is '" + path + "', which is " + none);
  };
  const std::string &worker = settings_.tune_worker, &templates = settings_.template_dir;
  check("SAGEBWD_NVRTC", settings_.nvrtc, !asked_nvrtc_ || compiler_.error.empty(), "no NVRTC");
  check("SAGEBWD_TUNE_WORKER", worker, ::access(worker.c_str(), X_OK) == 0, "no program");
  const std::string unread = error_of([&] {
    for (const KernelSpec& kernel :
         Operation(resolved(AttentionSpec()), all_archs()[0]).distinct_kernels())
      generate(kernel);
  });
  check("SAGEBWD_TEMPLATE_DIR", templates, unread.empty(), "no folder of templates");
  const std::string& log = settings_.log;
  const bool file = log != Settings::kStandardError && log != Settings::kNoLog;
  check("SAGEBWD_LOG", log, !file || is_appendable(log), "no file that can be written");
  for (const std::string& name : unknown_variables())
    miss("a known variable: nothing reads " + name + hint_for_variable(name),
         "whatever it is set for", "unset it, or correct it: 'sagebwd doctor --help' lists them");
}

void Doctor::collect_missing() {
  for (const std::string& problem : problems_)
    miss("a usable value: " + problem, "whatever reads that variable", "correct it, or unset it");
  if (!compiler_.error.empty() && asked_nvrtc_)
    miss("NVRTC, CUDA's run-time compiler",
         "compiling kernels (build, and the first use of each kernel)",
         settings_.nvrtc.empty() ? "pip install nvidia-cuda-nvrtc (for drivers of CUDA 13) or "
                                   "nvidia-cuda-nvrtc-cu12 (for CUDA 12), or install a CUDA "
                                   "toolkit 12.8 or newer, or set SAGEBWD_NVRTC to libnvrtc.so"
                                 : "correct SAGEBWD_NVRTC, or unset it");
  llvm::append_range(missing_, missing_for_gpus(gpus_, compiler_));
  if (!directory_.error.empty())
    miss("a cache directory: " + directory_.error, "keeping compiled kernels between processes",
         "set SAGEBWD_CACHE_DIR to a directory of your own");
  for (const PackState& pack : packs_)
    if (!pack.error.empty())
      miss("a usable pack: " + pack.error, "any kernel that is not in the directory",
           "repair it, or take it out of SAGEBWD_CACHE_PACKS");
    else if (pack.summary.kernels > 0 && pack.current.empty())
      miss("kernels of this version of sagebwd in " + pack.path + ": another version built them",
           "loading kernels of this pack", "build it again with this version: 'sagebwd prebuild'");
  for (const std::string& path : settings_.packs) {
    if (llvm::any_of(packs_, [&](const PackState& pack) { return pack.path == path; }))
      continue; // the path is a file, or its error has been reported
    for (const std::string& file : packs_left_out_at(path))
      miss("a name that ends in .pack: '" + file +
               "' is a pack, and of folders only files *.pack "
               "are read",
           "the kernels in it", "its owner renames it to '" + file + ".pack'");
  }
  if (settings_.offline || !gpus_.empty())
    directory_needs_ = driver_needs(directory_.options.directory, is_current);
  kept_ = directory_needs_;
  for (const PackState& pack : packs_)
    for (const auto& [need, count] : pack.current)
      kept_[need] += count;
  if (settings_.offline)
    collect_kernels_held();
  collect_kernels_too_new();
  missing_.insert(missing_.end(), caller_.missing.begin(), caller_.missing.end());
}

/// If nothing can be compiled, the kept kernels are all that can run.
void Doctor::collect_kernels_held() {
  for (const auto& [need, count] : kept_)
    held_.insert(need.first);
  std::set<std::string> wanted;
  for (const GpuState& gpu : gpus_)
    if (gpu.error.empty())
      wanted.insert(gpu.arch);
  if (wanted.empty() && held_.empty())
    wanted.insert("any GPU");
  for (const std::string& arch : wanted)
    if (!held_.count(arch))
      miss("kernels for " + arch + ": neither the directory nor a pack has one of this version",
           "attention under SAGEBWD_OFFLINE=1",
           "name a pack in SAGEBWD_CACHE_PACKS ('sagebwd prebuild' writes them), or in "
           "SAGEBWD_CACHE_DIR a directory that 'sagebwd build' filled");
}

void Doctor::collect_kernels_too_new() {
  // Of this machine's GPUs; kernels for other GPUs do not matter here.
  std::vector<std::string> archs;
  for (const GpuState& gpu : gpus_)
    archs.push_back(gpu.arch);
  if (archs.empty())
    return;
  const auto check = [&](const DriverNeeds& needs, const std::string& place, const char* remedy) {
    std::string warning = driver_warning(needs, place, archs, driver::driver_version());
    if (!warning.empty())
      miss("a newer driver: " + warning, "loading those kernels", remedy);
  };
  for (const PackState& pack : packs_)
    check(pack.current, pack.path,
          "update the driver, or build the pack with the NVRTC of this driver's CUDA version");
  check(directory_needs_, directory_.options.directory,
        "update the driver; or point SAGEBWD_NVRTC at an NVRTC of its CUDA version and run "
        "'sagebwd build --recompile'");
}

json::Value Doctor::cache_as_json() const {
  json::Array packs;
  for (const PackState& pack : packs_) {
    json::Object object = verdict("usable", pack.error);
    object["path"] = utf8(pack.path);
    if (pack.error.empty()) {
      object["kernels"] = static_cast<int64_t>(pack.summary.kernels);
      object["current_kernels"] = static_cast<int64_t>(total(pack.current));
      object["records"] = static_cast<int64_t>(pack.summary.records);
      object["architectures"] = json::Array(pack.summary.archs);
      object["lowest_driver"] = pack.summary.lowest_driver;
    }
    packs.push_back(std::move(object));
  }
  json::Object cache = verdict("usable", directory_.error);
  cache["directory"] = utf8(directory_.options.directory);
  cache["files"] = static_cast<int64_t>(directory_.files);
  cache["bytes"] = static_cast<int64_t>(directory_.bytes);
  cache["byte_limit"] = static_cast<int64_t>(directory_.options.byte_limit);
  cache["offline"] = settings_.offline;
  cache["packs"] = std::move(packs);
  return cache;
}

json::Value Doctor::as_json() const {
  json::Object nvrtc = verdict("found", compiler_.error);
  if (compiler_.error.empty()) {
    nvrtc["path"] = utf8(compiler_.path);
    nvrtc["identity"] = compiler_.identity;
    nvrtc["architectures"] = json::Array(compiler_.archs);
  }
  json::Object found_driver = verdict("found", driver::unavailable());
  if (driver::unavailable().empty())
    found_driver["cuda_version"] = driver::driver_version();
  json::Array gpus;
  for (const GpuState& gpu : gpus_) {
    json::Object object = verdict("supported", gpu.error);
    object["name"] = utf8(gpu.info.name);
    object["uuid"] = gpu.info.uuid;
    object["capability"] = std::to_string(gpu.info.major) + "." + std::to_string(gpu.info.minor);
    object["sm_count"] = gpu.info.sm_count;
    object["memory_bytes"] = static_cast<int64_t>(gpu.info.memory_bytes);
    if (gpu.error.empty())
      object["arch"] = gpu.arch;
    gpus.push_back(std::move(object));
  }
  json::Array archs;
  for (const Arch& arch : all_archs()) {
    json::Object object = verdict("compiles", compiler_.why_not(arch));
    object["name"] = std::string(arch.name);
    object["first_nvrtc"] = nvrtc::first_version(arch.name);
    if (std::string note = note_for(arch); !note.empty())
      object["note"] = note;
    if (settings_.offline)
      object["kept"] = held_.count(std::string(arch.name)) > 0;
    archs.push_back(std::move(object));
  }
  json::Object variables;
  for (const SettingVariable& variable : setting_variables())
    if (const char* value = std::getenv(variable.name); value && *value)
      variables[variable.name] = utf8(value);
  json::Array missing;
  for (const Missing& item : missing_)
    missing.push_back(json::Object{
        {"what", utf8(item.what)}, {"needed_for", item.needed_for}, {"remedy", item.remedy}});
  json::Object report{{"version", version()},
                      {"can_compile", compiler_.error.empty() && !settings_.offline},
                      {"can_run", can_run()},
                      {"nvrtc", std::move(nvrtc)},
                      {"driver", std::move(found_driver)},
                      {"gpus", std::move(gpus)},
                      {"cache", cache_as_json()},
                      {"tuning", std::string(to_string(settings_.tune))},
                      {"variables", std::move(variables)},
                      {"architectures", std::move(archs)},
                      {"missing", std::move(missing)}};
  for (const auto& [name, value] : caller_.parts)
    report[name] = utf8(value);
  return report;
}

std::string Doctor::as_text() const {
  std::string text;
  const auto line = [&](const std::string& label, const auto&... words) {
    text += label + std::string(label.size() < 8 ? 8 - label.size() : 1, ' ');
    ((text += words), ...);
    text += '\n';
  };
  line("sagebwd", version());
  for (const auto& [name, value] : caller_.parts)
    line(name, value);
  if (compiler_.error.empty())
    line("nvrtc", compiler_.identity, ", ", compiler_.path);
  else
    line("nvrtc", asked_nvrtc_ ? "not found\n" : "", compiler_.error);
  const std::string& why = driver::unavailable();
  line("driver", why.empty() ? "CUDA " + driver::version_text(driver::driver_version())
                             : "not usable: " + why);
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const driver::DeviceInfo& info = gpus_[i].info;
    line("gpu " + std::to_string(i), info.name, ", ", std::to_string(info.sm_count), " SMs, ",
         llvm::formatv("{0:f1} GiB, ", static_cast<double>(info.memory_bytes) / (1 << 30)).str(),
         gpus_[i].error.empty() ? gpus_[i].arch : gpus_[i].error);
  }
  if (const auto limit = static_cast<double>(directory_.options.byte_limit);
      directory_.error.empty())
    line("cache", directory_.options.directory, ": ", std::to_string(directory_.files), " file",
         directory_.files == 1 ? "" : "s",
         llvm::formatv(", {0:f1} MiB, ", static_cast<double>(directory_.bytes) / (1 << 20)).str(),
         limit == 0 ? "without a limit"
         : limit < 1 << 20
             ? llvm::formatv("at most {0:f0} bytes of kernels", limit).str()
             : llvm::formatv("at most {0:f0} MiB of kernels", limit / (1 << 20)).str());
  else
    line("cache", "not used: ", directory_.error);
  for (const PackState& pack : packs_)
    if (const PackSummary& what = pack.summary; pack.error.empty())
      line("pack", pack.path, ": ", std::to_string(what.kernels), " kernel",
           what.kernels == 1 ? "" : "s", of_version(what.kernels, total(pack.current)), ", ",
           std::to_string(what.records), " tuning records, CUDA ",
           driver::version_text(what.lowest_driver), " or newer");
    else
      line("pack", "not usable: ", pack.error);
  if (settings_.offline)
    line("offline", "SAGEBWD_OFFLINE=1: nothing is compiled");
  line("tuning", to_string(settings_.tune));
  if (settings_.offline) {
    line("kernels", held_.empty() ? "none" : "of " + llvm::join(held_, " "));
  } else if (!compiler_.error.empty()) {
    line("archs", "none without NVRTC");
  } else {
    std::string archs, others;
    for (const Arch& arch : all_archs())
      if (const std::string name(arch.name); compiler_.why_not(arch).empty())
        archs += (archs.empty() ? "" : " ") + name;
      else
        others += (others.empty() ? "" : ", ") + name + " needs NVRTC " +
                  driver::version_text(nvrtc::first_version(name));
    line("archs", archs);
    if (!others.empty())
      line("", "not compiled for here: ", others);
  }
  for (const Arch& arch : all_archs())
    if (const std::string note = note_for(arch); !note.empty() && has_gpu_of(arch))
      line("", std::string(arch.name), " ", note);

  for (const auto& [what, needed_for, remedy] : missing_)
    text +=
        "\nmissing     " + what + "\nneeded for  " + needed_for + "\nremedy      " + remedy + "\n";
  return missing_.empty() ? text + "\nNothing is missing.\n" : text;
}

} // namespace

Diagnosis diagnose(const CallersParts& caller) { return Doctor(caller).examine(); }

} // namespace sagebwd
