//===- settings.cpp - The environment variables, read once ----------------===//

#include "runtime/settings.h"
#include "cache/at_fork.h"

#include "generator/nearest.h"
#include "generator/spec.h"
#include "runtime/parallel_for.h"

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <pwd.h>
#include <unistd.h>

namespace sagebwd {

std::string environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

namespace {

/// The beginning of every variable of this library.
constexpr std::string_view kPrefix = "SAGEBWD_";

bool parse_switch(const char* name, const std::string& text) {
  if (text == "0" || text == "1")
    return text == "1";
  throw SpecError(std::string(name) + " is '" + text +
                  "'; it takes 1 for yes, and 0 or nothing for no");
}

uint64_t parse_limit(const std::string& text) {
  uint64_t number = 0;
  auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(stop, text.data() + text.size());
  int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (error != std::errc() || shift < 0 || number > (UINT64_MAX >> shift))
    throw SpecError("SAGEBWD_CACHE_LIMIT is '" + text +
                    "'; it takes a number of bytes, with K, M or G if you like, such as 512M, or "
                    "0 for no limit");
  return number << shift;
}

/// An absolute path, because the program may change its folder later. A leading ~ becomes the home
/// folder, because a shell does not expand a ~ in quotes. Raises SpecError, which names the
/// variable.
std::string absolute_path(const char* variable, std::string path) {
  if (path.starts_with("~/")) {
    const std::string home = environment_variable("HOME");
    if (home.empty())
      throw SpecError(std::string(variable) + " has the path '" + path +
                      "', and HOME is not set: write the whole path, or set HOME");
    path = home + path.substr(1);
  }
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.string();
}

std::vector<std::string> parse_packs(const std::string& text) {
  llvm::SmallVector<llvm::StringRef> paths;
  llvm::StringRef(text).split(paths, ':', /*MaxSplit=*/-1, /*KeepEmpty=*/false);
  std::vector<std::string> packs;
  for (llvm::StringRef path : paths)
    packs.push_back(absolute_path("SAGEBWD_CACHE_PACKS", path.str()));
  return packs;
}

/// Parses users by name or number.
std::vector<uint32_t> parse_owners(const std::string& text) {
  std::vector<uint32_t> owners;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of(":,", begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    begin = end + 1;
    uint32_t number = 0;
    const auto [stop, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (name.empty() || error != std::errc() || stop != name.data() + name.size()) {
      const passwd* user = name.empty() ? nullptr : ::getpwnam(name.c_str());
      if (!user)
        throw SpecError("SAGEBWD_TRUSTED_OWNERS is '" + text + "', and '" + name +
                        "' is no user here; it takes names or numbers of users (id -u NAME), "
                        "separated by colons");
      number = user->pw_uid;
    }
    owners.push_back(number);
  }
  return owners;
}

/// The cache directory if SAGEBWD_CACHE_DIR does not name it.
std::string usual_directory() {
  // The XDG base directory specification says that a relative path is invalid and ignored.
  if (std::string path = environment_variable("XDG_CACHE_HOME"); !path.empty() && path[0] == '/')
    return path + "/sagebwd";
  if (std::string path = environment_variable("HOME"); !path.empty() && path[0] == '/')
    return path + "/.cache/sagebwd";
  return "";
}

TuneMode parse_tune_mode(const std::string& text) {
  for (const auto& [mode, word] : Words<TuneMode>::all)
    if (word == text)
      return mode;
  throw SpecError("SAGEBWD_TUNE is '" + text +
                  "': supported are off (default tiles), use (tuned tiles where there is a "
                  "record), tune (tune what has none) and frozen (a missing record is an error)");
}

/// The rank from launchers' variables. Values that are not numbers are ignored, because other
/// programs define them.
std::optional<int> rank_of_process() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"}) {
    int rank = 0;
    if (!llvm::StringRef(environment_variable(name)).getAsInteger(10, rank) && rank >= 0)
      return rank;
  }
  return std::nullopt;
}

std::atomic<bool> told_of_unknown{false};

} // namespace

const std::vector<SettingVariable>& setting_variables() {
  static const std::vector<SettingVariable> variables = {
      {"SAGEBWD_CACHE_DIR", "a folder",
       "the cache directory; by default $XDG_CACHE_HOME/sagebwd or ~/.cache/sagebwd"},
      {"SAGEBWD_CACHE_PACKS", "files or folders, separated by colons",
       "packs, or folders of packs (*.pack), to look in after the directory; nothing is written "
       "there"},
      {"SAGEBWD_TRUSTED_OWNERS", "users, separated by colons",
       "names or numbers of users whose packs and folders of packs are trusted like your own and "
       "root's"},
      {"SAGEBWD_CACHE_LIMIT", "bytes, such as 512M; 0 means no limit",
       "how large the cache directory may get (default 1G)"},
      {"SAGEBWD_OFFLINE", "0 or 1", "never compile; a missing kernel is an error"},
      {"SAGEBWD_RECOMPILE", "0 or 1", "compile again what another NVRTC compiled"},
      {"SAGEBWD_ALLOW_SPILLS", "0 or 1", "run kernels that spill registers; they are not cached"},
      {"SAGEBWD_DEBUG_WAITS", "0 or 1",
       "kernels fail after waiting 10 s for a copy or a warp, and say which"},
      {"SAGEBWD_STATS", "0 or 1", "print the cache's counters on standard error at exit"},
      {"SAGEBWD_LOG", "0, 1 or a file",
       "print a line per kernel, with its source and the seconds, on standard error (1) or into "
       "the file; 0 also omits the line that says that compiling takes long"},
      {"SAGEBWD_NVRTC", "a file or folder", "the only NVRTC library to try"},
      {"SAGEBWD_TUNE", "off, use, tune or frozen", "whether tuned tiles are used (default use)"},
      {"SAGEBWD_TUNE_WORKER", "a file", "the sagebwd program that times candidates"},
      {"SAGEBWD_TEMPLATE_DIR", "a folder", "templates to use instead of the embedded ones"},
  };
  return variables;
}

std::vector<std::string> unknown_variables() {
  // Variables of ./run, tests and benchmarks in a checkout.
  constexpr std::string_view kOthers[] = {
      "BIN",          "CACHE_SPEED_REPORT", "COMMIT",      "COMPILE_REPORT",
      "FRESH_MIRROR", "LLVM_INCLUDEDIR",    "LLVM_LIBDIR", "PYTHON_EXE",
      "TREE",         "UPDATE_GOLDEN"};
  std::vector<std::string> names;
  for (char** variable = ::environ; *variable; ++variable) {
    const std::string_view text = *variable, name = text.substr(0, text.find('='));
    if (!name.starts_with(kPrefix))
      continue;
    const std::string_view rest = name.substr(kPrefix.size());
    const auto is_it = [&](const SettingVariable& known) { return name == known.name; };
    if (!rest.starts_with("TEST_") && std::ranges::find(kOthers, rest) == std::end(kOthers) &&
        std::ranges::none_of(setting_variables(), is_it))
      names.emplace_back(name);
  }
  return names;
}

std::string hint_for_variable(const std::string& unknown) {
  std::vector<std::string> known; // without the prefix that all have in common
  for (const SettingVariable& variable : setting_variables())
    known.emplace_back(variable.name + kPrefix.size());
  const std::string near = nearest(std::string_view(unknown).substr(kPrefix.size()), known);
  return near.empty() ? near : "; did you mean " + std::string(kPrefix) + near + "?";
}

void warn_of_unknown_variables(const std::string& speaker) {
  if (told_of_unknown.exchange(true))
    return;
  for (std::string name : unknown_variables()) {
    const std::string hint = hint_for_variable(name);
    std::ranges::replace_if(
        name, [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
    std::fprintf(stderr,
                 "%s: warning: nothing reads %s%s 'sagebwd doctor --help' lists the "
                 "variables\n",
                 speaker.c_str(), name.c_str(), hint.empty() ? ";" : hint.c_str());
  }
}

void leave_unknown_variables_to_others() { told_of_unknown = true; }

bool is_appendable(const std::string& path) {
  std::error_code none;
  if (std::filesystem::is_directory(path, none))
    return false;
  if (::access(path.c_str(), F_OK) == 0)
    return ::access(path.c_str(), W_OK) == 0;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return std::filesystem::is_directory(folder, none) && ::access(folder.c_str(), W_OK | X_OK) == 0;
}

Settings Settings::from_environment(std::vector<std::string>* problems) {
  // Sets a field if its variable is set.
  const auto read = [&](const char* name, auto& field, auto parse) {
    try {
      if (const std::string text = environment_variable(name); !text.empty())
        field = parse(text);
    } catch (const SpecError& error) {
      if (!problems)
        throw;
      problems->push_back(error.what());
    }
  };
  const auto read_switch = [&](const char* name, bool& field) {
    read(name, field, [&](const std::string& text) { return parse_switch(name, text); });
  };

  const auto read_path = [&](const char* name, std::string& field) {
    read(name, field, [&](const std::string& text) { return absolute_path(name, text); });
  };

  Settings s;
  s.cache_directory = usual_directory();
  read_path("SAGEBWD_CACHE_DIR", s.cache_directory);
  read("SAGEBWD_CACHE_PACKS", s.packs, parse_packs);
  read("SAGEBWD_TRUSTED_OWNERS", s.trusted_owners, parse_owners);
  read("SAGEBWD_CACHE_LIMIT", s.byte_limit, parse_limit);
  read_switch("SAGEBWD_OFFLINE", s.offline);
  read_switch("SAGEBWD_RECOMPILE", s.recompile);
  read_switch("SAGEBWD_ALLOW_SPILLS", s.allow_spills);
  read_switch("SAGEBWD_DEBUG_WAITS", s.debug_waits);
  read_switch("SAGEBWD_STATS", s.stats);
  read("SAGEBWD_LOG", s.log, [](const std::string& text) {
    const bool word = text == Settings::kStandardError || text == Settings::kNoLog;
    // A word such as "true" or "debug" is not a path.
    if (!word && text.find_first_of("/.") == std::string::npos)
      throw SpecError("SAGEBWD_LOG is '" + text +
                      "'; it takes 1 for standard error, 0 for no lines, or a file: write './" +
                      text + "' if that is one");
    return word ? text : absolute_path("SAGEBWD_LOG", text);
  });
  read_path("SAGEBWD_NVRTC", s.nvrtc);
  read("SAGEBWD_TUNE", s.tune, parse_tune_mode);
  read_path("SAGEBWD_TUNE_WORKER", s.tune_worker);
  read_path("SAGEBWD_TEMPLATE_DIR", s.template_dir);
  s.rank = rank_of_process();
  return s;
}

StoreOptions Settings::store_options() const {
  StoreOptions options;
  options.directory = cache_directory;
  options.packs = packs;
  options.trusted_owners = trusted_owners;
  options.byte_limit = byte_limit;
  options.heal = !offline;
  options.check_interrupt = sagebwd::check_interrupt;
  return options;
}

const Settings& settings() {
  // The object is never destroyed, because threads may still read settings while the process ends.
  static constinit Single<const Settings> settings;
  return settings.get([] {
    auto* read = new Settings(Settings::from_environment());
    warn_of_unknown_variables("sagebwd");
    return read;
  });
}

} // namespace sagebwd
