//===- settings_test.cpp - What the environment says -----------------------===//

#include "runtime/parallel_for.h"
#include "runtime/settings.h"

#include "generator/spec.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <set>

using namespace sagebwd;
using test::ScopedVariable;
using Text = std::optional<std::string>;
using Strings = std::vector<std::string>;

namespace {

Settings with(const char* name, const Text& value) {
  const ScopedVariable variable(name, value);
  return Settings::from_environment();
}

std::string raised_with(const char* name, const std::string& value) {
  try {
    with(name, value);
  } catch (const SpecError& error) {
    return error.what();
  }
  return "nothing";
}

TEST(Settings, TrustedOwnersAreNamesOrNumbers) {
  const auto owners = [](const Text& text) {
    return with("SAGEBWD_TRUSTED_OWNERS", text).trusted_owners;
  };
  EXPECT_TRUE(owners(std::nullopt).empty() && owners("").empty());
  EXPECT_EQ(owners("1000:root,12345"), (std::vector<uint32_t>{1000, 0, 12345}));
  for (const char* bad : {"nobody-is-called-so", "1000::1", ":", "-1", "99999999999", "1x"})
    EXPECT_EQ(raised_with("SAGEBWD_TRUSTED_OWNERS", bad).find("SAGEBWD_TRUSTED_OWNERS is '"), 0u)
        << bad;
}

TEST(Settings, TheLogGoesNowhereToStandardErrorOrIntoAFile) {
  const auto log = [](const Text& text) { return with("SAGEBWD_LOG", text).log; };
  EXPECT_EQ(log(std::nullopt), "");
  EXPECT_EQ(log("0"), Settings::kNoLog);
  EXPECT_EQ(log("1"), Settings::kStandardError);
  EXPECT_EQ(log("/var/log/kernels"), "/var/log/kernels");
  EXPECT_TRUE(log("kernels.txt").starts_with("/") && log("kernels.txt").ends_with("/kernels.txt"));
  EXPECT_TRUE(log("./debug").ends_with("/debug"));
  for (const std::string word : {"true", "debug", "INFO", "2", "standard error"})
    EXPECT_EQ(raised_with("SAGEBWD_LOG", word.c_str()),
              "SAGEBWD_LOG is '" + word +
                  "'; it takes 1 for standard error, 0 for no lines, or a " + "file: write './" +
                  word + "' if that is one");
}

TEST(Settings, ASwitchIsOnOrOffOrAnError) {
  const std::pair<const char*, bool Settings::*> switches[] = {
      {"SAGEBWD_OFFLINE", &Settings::offline},
      {"SAGEBWD_RECOMPILE", &Settings::recompile},
      {"SAGEBWD_ALLOW_SPILLS", &Settings::allow_spills},
      {"SAGEBWD_DEBUG_WAITS", &Settings::debug_waits},
      {"SAGEBWD_STATS", &Settings::stats}};
  for (const auto& [name, field] : switches) {
    EXPECT_TRUE(with(name, "1").*field) << name;
    for (const Text& no : {Text(), Text(""), Text("0")})
      EXPECT_FALSE(with(name, no).*field) << name;
    for (const char* bad : {"true", "yes", "2", "01", " 1"})
      EXPECT_EQ(raised_with(name, bad), std::string(name) + " is '" + bad +
                                            "'; it takes 1 for yes, and 0 or nothing for no");
  }
}

TEST(Settings, TheLimitIsANumberOfBytes) {
  const auto limit = [](const Text& text) { return with("SAGEBWD_CACHE_LIMIT", text).byte_limit; };
  EXPECT_EQ(limit(std::nullopt), uint64_t{1} << 30);
  EXPECT_EQ(limit(""), uint64_t{1} << 30);
  EXPECT_EQ(limit("0"), 0u);
  EXPECT_EQ(limit("512M"), uint64_t{512} << 20);
  EXPECT_EQ(limit("3G"), uint64_t{3} << 30);
  EXPECT_EQ(limit("7K"), 7u << 10);
  EXPECT_EQ(limit("123"), 123u);
  for (const char* bad : {"1T", "M", "-1", "1 G", "1g", "18446744073709551616", "17179869184G"})
    EXPECT_EQ(raised_with("SAGEBWD_CACHE_LIMIT", bad).find("SAGEBWD_CACHE_LIMIT is '"), 0u) << bad;
}

TEST(Settings, TheDirectoryIsOursOrTheSystems) {
  test::TempDirectory temp;
  const auto directory = [] { return Settings::from_environment().cache_directory; };
  const ScopedVariable home("HOME", temp / "home");
  ScopedVariable own("SAGEBWD_CACHE_DIR", std::nullopt);
  {
    const ScopedVariable xdg("XDG_CACHE_HOME", temp / "xdg");
    EXPECT_EQ(directory(), temp / "xdg/sagebwd");
    const ScopedVariable named("SAGEBWD_CACHE_DIR", temp / "own");
    EXPECT_EQ(directory(), temp / "own");
    const ScopedVariable relative("SAGEBWD_CACHE_DIR", "relative");
    EXPECT_EQ(directory(), (std::filesystem::current_path() / "relative").string());
    const ScopedVariable quoted("SAGEBWD_CACHE_DIR", "~/kernels");
    EXPECT_EQ(directory(), temp / "home/kernels");
  }
  const ScopedVariable relative("XDG_CACHE_HOME", "relative"); // invalid, says the specification
  EXPECT_EQ(directory(), temp / "home/.cache/sagebwd");
  const ScopedVariable homeless("HOME", std::nullopt);
  EXPECT_EQ(directory(), "");
  EXPECT_NE(CacheStore(Settings::from_environment().store_options()).disabled_reason().find("HOME"),
            std::string::npos);
  const ScopedVariable somewhere("HOME", "relative");
  EXPECT_NE(CacheStore(Settings::from_environment().store_options())
                .disabled_reason()
                .find("(the last two by a path that begins with /)"),
            std::string::npos);
}

TEST(Settings, TheStoresOptionsAreThose) {
  const ScopedVariable own("SAGEBWD_CACHE_DIR", "/own"), limit("SAGEBWD_CACHE_LIMIT", "5M"),
      packs("SAGEBWD_CACHE_PACKS", ":/a.pack::/b.pack");
  const StoreOptions options = with("SAGEBWD_OFFLINE", "1").store_options();
  EXPECT_EQ(options.directory, "/own");
  EXPECT_EQ(options.byte_limit, 5u << 20);
  EXPECT_EQ(options.packs, (Strings{"/a.pack", "/b.pack"}));
  EXPECT_FALSE(options.heal); // what is removed could not be made again
  EXPECT_TRUE(with("SAGEBWD_OFFLINE", "0").store_options().heal);
  const ScopedWatch watch([] { throw std::runtime_error("Ctrl-C"); });
  EXPECT_THROW(options.check_interrupt(), std::runtime_error);
}

/// A program may go to another folder before it compiles, and containers set variables without a
/// shell that knows ~.
TEST(Settings, PathsAreMeantWhereTheyAreRead) {
  const ScopedVariable home("HOME", "/home/somebody");
  const std::string here = std::filesystem::current_path().string();
  const std::pair<const char*, std::function<std::string(const Settings&)>> paths[] = {
      {"SAGEBWD_CACHE_DIR", [](const Settings& s) { return s.cache_directory; }},
      {"SAGEBWD_CACHE_PACKS", [](const Settings& s) { return s.packs.front(); }},
      {"SAGEBWD_NVRTC", [](const Settings& s) { return s.nvrtc; }},
      {"SAGEBWD_TUNE_WORKER", [](const Settings& s) { return s.tune_worker; }},
      {"SAGEBWD_TEMPLATE_DIR", [](const Settings& s) { return s.template_dir; }}};
  for (const auto& [name, path] : paths) {
    EXPECT_EQ(path(with(name, "a/b")), here + "/a/b") << name;
    EXPECT_EQ(path(with(name, "~/a")), "/home/somebody/a") << name;
    EXPECT_EQ(path(with(name, "/a")), "/a") << name;
  }
  EXPECT_EQ(with("SAGEBWD_CACHE_PACKS", "a:~/b:/c").packs,
            (Strings{here + "/a", "/home/somebody/b", "/c"}));
  const ScopedVariable homeless("HOME", std::nullopt); // no folder called ~ is meant
  for (const char* name : {"SAGEBWD_CACHE_DIR", "SAGEBWD_CACHE_PACKS", "SAGEBWD_LOG",
                           "SAGEBWD_NVRTC", "SAGEBWD_TUNE_WORKER", "SAGEBWD_TEMPLATE_DIR"}) {
    const ScopedVariable variable(name, "~/a");
    Strings problems;
    Settings::from_environment(&problems);
    EXPECT_EQ(problems, Strings{std::string(name) + " has the path '~/a', and HOME is not set: " +
                                "write the whole path, or set HOME"});
  }
}

TEST(Settings, AnEmptyVariableCountsAsUnset) {
  for (const auto& [name, field] : {std::pair("SAGEBWD_NVRTC", &Settings::nvrtc),
                                    {"SAGEBWD_TUNE_WORKER", &Settings::tune_worker},
                                    {"SAGEBWD_TEMPLATE_DIR", &Settings::template_dir}}) {
    EXPECT_EQ(with(name, "").*field, "") << name;
    EXPECT_EQ(with(name, "/a b").*field, "/a b") << name;
  }
  EXPECT_EQ(with("SAGEBWD_TUNE", "").tune, TuneMode::use);
  EXPECT_EQ(with("SAGEBWD_TUNE", std::nullopt).tune, TuneMode::use);
}

TEST(Settings, TheModeIsAWord) {
  for (const char* word : {"off", "use", "tune", "frozen"})
    EXPECT_EQ(to_string(with("SAGEBWD_TUNE", word).tune), word);
  for (const char* word : {"1", "on", "Use", "tune "}) {
    const std::string what = raised_with("SAGEBWD_TUNE", word);
    for (const char* part : {"SAGEBWD_TUNE", "off", "use", "tune", "frozen"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
    EXPECT_NE(what.find("'" + std::string(word) + "'"), std::string::npos) << what;
  }
}

TEST(Settings, TheRankIsWhatALauncherSays) {
  const auto rank = [] { return Settings::from_environment().rank; };
  ScopedVariable a("RANK", std::nullopt), b("OMPI_COMM_WORLD_RANK", std::nullopt),
      c("SLURM_PROCID", std::nullopt), d("PMI_RANK", std::nullopt);
  EXPECT_EQ(rank(), std::nullopt);
  ScopedVariable pmi("PMI_RANK", "3");
  EXPECT_EQ(rank(), 3);
  ScopedVariable torchrun("RANK", "0");
  EXPECT_EQ(rank(), 0);
  ScopedVariable nonsense("RANK", "many");
  EXPECT_EQ(rank(), 3);
}

TEST(Settings, AReportTakesAllProblemsAndTheDefaults) {
  const ScopedVariable offline("SAGEBWD_OFFLINE", "yes"), limit("SAGEBWD_CACHE_LIMIT", "much"),
      mode("SAGEBWD_TUNE", "always"), stats("SAGEBWD_STATS", "1");
  Strings problems;
  const Settings settings = Settings::from_environment(&problems);
  ASSERT_EQ(problems.size(), 3u);
  EXPECT_NE(problems[0].find("SAGEBWD_CACHE_LIMIT"), std::string::npos);
  EXPECT_FALSE(settings.offline);
  EXPECT_EQ(settings.byte_limit, uint64_t{1} << 30);
  EXPECT_EQ(settings.tune, TuneMode::use);
  EXPECT_TRUE(settings.stats);
  EXPECT_THROW(Settings::from_environment(), SpecError);
}

/// The variables of ours that a file mentions.
std::set<std::string> mentioned_in(const std::string& path) {
  const std::string text = test::read_text(SAGEBWD_SOURCE_DIR "/" + path);
  const std::string start = "SAGEBWD_", letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_";
  std::set<std::string> names;
  for (size_t at = 0, end; (at = text.find(start, at)) != std::string::npos; at = end) {
    end = std::min(text.find_first_not_of(letters, at), text.size());
    if (end > at + start.size())
      names.insert(text.substr(at, end - at));
  }
  return names;
}

TEST(Settings, AreAllListedInTheDocuments) {
  std::set<std::string> listed;
  for (const SettingVariable& variable : setting_variables())
    listed.insert(variable.name);
  EXPECT_EQ(listed, mentioned_in("docs/reference/environment.md"));
  EXPECT_EQ(listed, mentioned_in("runtime/settings.cpp"));
}

/// Elsewhere the environment only says where other programs' things are.
TEST(Settings, AreReadNowhereElse) {
  for (const char* folder : {"cache", "runtime", "tools", "python"})
    for (const auto& item : std::filesystem::recursive_directory_iterator(SAGEBWD_SOURCE_DIR "/" +
                                                                          std::string(folder)))
      if (const std::string path = item.path(); path.ends_with(".cpp") || path.ends_with(".h"))
        EXPECT_EQ(test::read_text(path).find("getenv(\"SAGEBWD_"), std::string::npos) << path;
}

} // namespace
