//===- diagnosis.cpp - The report of the doctor about this machine --------===//

#include "runtime/diagnosis.h"

#include "cache/bounded_json.h"
#include "generator/fastest.h"
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
#include "llvm/Support/raw_ostream.h"

#include <cstdlib>
#include <set>
#include <unistd.h>

namespace sagebwd {
namespace {

namespace json = llvm::json;

using Members = std::initializer_list<json::Object::KV>;
/// An object with {name: true} and both lists of members, or with false, the error and the first
/// list.
json::Object verdict(const char* name, const std::string& error, Members members,
                     Members more = {}) {
  json::Object object(members);
  object[name] = error.empty();
  if (!error.empty())
    object["error"] = utf8(error);
  else
    for (const auto& [key, value] : more)
      object[key] = value;
  return object;
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
      llvm::append_range(packs_, look_at_packs(path, settings_));
    look_at_paths();
    collect_missing();
    tell();
    const bool sound =
        problems_.empty() && unknown_variables().empty() && directory_.error.empty() &&
        llvm::all_of(packs_, [](const PackState& pack) { return pack.error.empty(); }) &&
        (gpus_.empty() || can_run()) && (!settings_.offline || !kept_.empty());
    return {llvm::formatv("{0:2}", json::Value(std::move(json_))), text_, sound};
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
  void tell_compiler();
  void tell_gpus();
  json::Object tell_fastest(const FastestPrecision&);
  void tell_cache();
  json::Array tell_packs();
  void tell_archs();
  void tell();
  /// Adds a line to the text.
  void line(llvm::StringRef label, const auto&... words) {
    llvm::raw_string_ostream text(text_);
    text << label;
    text.indent(label.size() < 8 ? 8 - label.size() : 1);
    ((text << words), ...) << '\n';
  }

  const CallersParts& caller_;
  std::vector<std::string> problems_; ///< of the environment
  Settings settings_;
  CompilerState compiler_;
  bool asked_nvrtc_ = false;
  std::vector<GpuState> gpus_;
  DirectoryState directory_;
  /// Kernels that this version can find need these: those in the directory, computed only if it
  /// matters, and those in the directory and the packs.
  DriverNeeds directory_needs_;
  DriverNeeds kept_;
  std::vector<PackState> packs_;
  std::set<std::string> held_; ///< architectures of kept kernels; computed only offline
  std::vector<Missing> missing_;
  /// The report in both of its forms: whoever tells something puts it into both.
  json::Object json_;
  std::string text_;
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
      generate_with(settings_, kernel);
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
    directory_needs_ = driver_needs(directory_.options.directory, [&](const CacheKey& key) {
      return is_current(key, settings_);
    });
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
  // Only this machine's GPUs count; kernels for other GPUs do not matter here.
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

void Doctor::tell_compiler() {
  const auto& [path, identity, error, major, archs] = compiler_;
  json_["nvrtc"] =
      verdict("found", error, {},
              {{"path", as_json(path)}, {"identity", identity}, {"architectures", as_json(archs)}});
  json_["can_compile"] = error.empty() && !settings_.offline;
  line("nvrtc",
       error.empty() ? identity + ", " + path : (asked_nvrtc_ ? "not found\n" : "") + error);
}

void Doctor::tell_gpus() {
  const std::string& why = driver::unavailable();
  const int version = why.empty() ? driver::driver_version() : 0;
  json_["driver"] = verdict("found", why, {}, {{"cuda_version", version}});
  line("driver", why.empty() ? "CUDA " + driver::version_text(version) : "not usable: " + why);
  json::Array gpus;
  for (const auto& [info, arch, error] : gpus_) {
    const auto gib = static_cast<double>(info.memory_bytes) / (1 << 30);
    line("gpu " + std::to_string(gpus.size()), info.name, ", ", info.sm_count, " SMs, ",
         llvm::formatv("{0:f1} GiB, ", gib), error.empty() ? arch : error);
    json::Object fastest;
    if (error.empty())
      fastest = tell_fastest(fastest_precision(find_arch(arch), info.name));
    const std::string capability = std::to_string(info.major) + "." + std::to_string(info.minor);
    gpus.push_back(verdict("supported", error,
                           {{"name", as_json(info.name)},
                            {"uuid", info.uuid},
                            {"capability", capability},
                            {"sm_count", info.sm_count},
                            {"memory_bytes", as_json(info.memory_bytes)}},
                           {{"arch", arch}, {"fastest_precision", std::move(fastest)}}));
  }
  json_["gpus"] = std::move(gpus);
  json_["can_run"] = can_run();
}

/// Says what precision='fastest' stands for on a GPU, and how one knows.
json::Object Doctor::tell_fastest(const FastestPrecision& fastest) {
  const std::string precision = value_text(fastest.precision);
  line("", "precision='fastest' stands for ", precision,
       fastest.dp_sums == DpSums::fp32 ? "" : " with dp_sums=" + value_text(fastest.dp_sums), ", ",
       fastest.evidence.empty() ? "the default: nobody has measured this GPU" : fastest.evidence);
  return json::Object{{"precision", precision},
                      {"dp_sums", value_text(fastest.dp_sums)},
                      {"evidence", std::string(fastest.evidence)}};
}

void Doctor::tell_cache() {
  const auto& [options, error, files, bytes] = directory_;
  const auto limit = static_cast<double>(options.byte_limit);
  if (error.empty())
    line("cache", options.directory, ": ", files, " file", files == 1 ? "" : "s",
         llvm::formatv(", {0:f1} MiB, ", static_cast<double>(bytes) / (1 << 20)),
         limit == 0 ? "without a limit"
         : limit < 1 << 20
             ? llvm::formatv("at most {0:f0} bytes of kernels", limit).str()
             : llvm::formatv("at most {0:f0} MiB of kernels", limit / (1 << 20)).str());
  else
    line("cache", "not used: ", error);
  json_["cache"] = verdict("usable", error,
                           {{"directory", as_json(options.directory)},
                            {"files", as_json(files)},
                            {"bytes", as_json(bytes)},
                            {"byte_limit", as_json(options.byte_limit)},
                            {"offline", settings_.offline},
                            {"packs", tell_packs()}});
}

json::Array Doctor::tell_packs() {
  json::Array packs;
  for (const auto& [path, error, what, current] : packs_) {
    if (error.empty())
      line("pack", path, ": ", what.kernels, " kernel", what.kernels == 1 ? "" : "s",
           of_version(what.kernels, total(current)), ", ", what.records, " tuning records, CUDA ",
           driver::version_text(what.lowest_driver), " or newer");
    else
      line("pack", "not usable: ", error);
    packs.push_back(verdict("usable", error, {{"path", as_json(path)}},
                            {{"kernels", as_json(what.kernels)},
                             {"current_kernels", as_json(total(current))},
                             {"records", as_json(what.records)},
                             {"architectures", as_json(what.archs)},
                             {"lowest_driver", what.lowest_driver}}));
  }
  return packs;
}

void Doctor::tell_archs() {
  json::Array archs;
  std::string compiled, others;
  std::vector<std::string> notes;
  for (const Arch& arch : all_archs()) {
    const std::string name(arch.name), why = compiler_.why_not(arch);
    const int first = nvrtc::first_version(name);
    json::Object object = verdict("compiles", why, {{"name", name}, {"first_nvrtc", first}});
    if (arch.emulates_int8()) {
      const char* note = "emulates s8 mma: each becomes several instructions";
      object["note"] = note;
      if (has_gpu_of(arch))
        notes.push_back(name + " " + note);
    }
    if (settings_.offline)
      object["kept"] = held_.count(name) > 0;
    archs.push_back(std::move(object));
    if (why.empty())
      compiled += (compiled.empty() ? "" : " ") + name;
    else
      others += (others.empty() ? "" : ", ") + name + " needs NVRTC " + driver::version_text(first);
  }
  json_["architectures"] = std::move(archs);
  if (settings_.offline)
    line("kernels", held_.empty() ? "none" : "of " + llvm::join(held_, " "));
  else
    line("archs", compiler_.error.empty() ? compiled : "none without NVRTC");
  if (!settings_.offline && compiler_.error.empty() && !others.empty())
    line("", "not compiled for here: ", others);
  for (const std::string& note : notes)
    line("", note);
}

void Doctor::tell() {
  line("sagebwd", version());
  for (const auto& [name, value] : caller_.parts)
    line(name, value);
  tell_compiler();
  tell_gpus();
  tell_cache();
  if (settings_.offline)
    line("offline", "SAGEBWD_OFFLINE=1: nothing is compiled");
  line("tuning", to_string(settings_.tune));
  tell_archs();
  json::Object variables;
  for (const SettingVariable& variable : setting_variables())
    if (const char* value = std::getenv(variable.name); value && *value)
      variables[variable.name] = utf8(value);
  json::Array missing;
  for (const auto& [what, needed_for, remedy] : missing_) {
    text_ +=
        "\nmissing     " + what + "\nneeded for  " + needed_for + "\nremedy      " + remedy + "\n";
    missing.push_back(
        json::Object{{"what", utf8(what)}, {"needed_for", needed_for}, {"remedy", remedy}});
  }
  text_ += missing_.empty() ? "\nNothing is missing.\n" : "";
  json_["version"] = version();
  json_["tuning"] = std::string(to_string(settings_.tune));
  json_["variables"] = std::move(variables);
  json_["missing"] = std::move(missing);
  for (const auto& [name, value] : caller_.parts)
    json_[name] = utf8(value);
}

} // namespace

Diagnosis diagnose(const CallersParts& caller) { return Doctor(caller).examine(); }

} // namespace sagebwd
