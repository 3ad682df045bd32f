//===- command.h - What a subcommand is ------------------------------------===//
#pragma once

#include "tools/console.h"
#include "tools/options.h"

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace sagebwd::tools {

enum ExitCode { kDone = 0, kFailed = 1, kWrongUse = 2 };

/// One subcommand: the constructor declares its options, and `run` does the work. A command with
/// subcommands of its own ("sagebwd cache ls") is not run.
class Command {
public:
  Command(std::string name, std::string summary, std::string help)
      : name(std::move(name)), summary(std::move(summary)), help(std::move(help)) {
    options.flag("json", json, "print JSON to standard output");
  }
  virtual ~Command() = default;
  virtual ExitCode run() { return kWrongUse; }
  /// Whether to warn before run() of unknown variables SAGEBWD_..., which are probably misspelt.
  virtual bool warns_of_variables() const { return true; }
  /// Prints the facts as JSON, or the text; then each of the failures to standard error.
  ExitCode finish(llvm::json::Object facts, const std::function<void()>& print_text) const;

  /// Says why there are no facts, under --json as {"error": ...}, too, and returns kFailed.
  ExitCode give_up(const std::vector<std::string>& reasons) const;

  const std::string name;    ///< as typed after "sagebwd", e.g. "build" or "cache ls"
  const std::string summary; ///< one line, for the list
  const std::string help;    ///< what it does, and examples
  OptionTable options;
  std::vector<std::string> arguments; ///< as typed after the name, once they have been parsed
  std::vector<std::unique_ptr<Command>> subcommands;
  bool json = false; ///< whether --json is given

protected:
  /// Prints each fault to standard error, with the command's name, and returns the exit code.
  ExitCode complain_of(const std::vector<std::string>& faults) const;

  std::vector<std::string> failures; ///< faults that did not end the command
};

/// Commands that use kernels call this first. It raises PackError for a pack that cannot be used,
/// even if the directory has every kernel.
void require_packs();

/// Makes a subcommand of "sagebwd" or of "sagebwd cache".
using MakeCommand = std::unique_ptr<Command>();
MakeCommand make_doctor, make_emit, make_build, make_prebuild, make_tune, make_bench, make_verify,
    make_trace, make_cache, make_completion;
std::vector<std::unique_ptr<Command>> make_all(std::initializer_list<MakeCommand*>);
/// Every one, as "sagebwd --help" lists them.
std::vector<std::unique_ptr<Command>> all_commands();

} // namespace sagebwd::tools
