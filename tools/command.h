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

/// One subcommand: the constructor declares its options, `run` does the work.
/// Or several under one name ("sagebwd cache ls"): then `run` is not called.
class Command {
public:
  Command(std::string name, std::string summary, std::string help)
      : name(std::move(name)), summary(std::move(summary)), help(std::move(help)) {
    options.flag("json", json, "print JSON to standard output");
  }
  virtual ~Command() = default;
  virtual ExitCode run() { return kWrongUse; }
  /// Prints the facts as JSON, or the text; then fail(failures).
  ExitCode finish(llvm::json::Object facts, const std::function<void()>& print_text) const;

  const std::string name;    ///< as typed after "sagebwd", e.g. "build" or "cache ls"
  const std::string summary; ///< one line, for the list
  const std::string help;    ///< what it does, and examples
  OptionTable options;
  std::vector<std::string> arguments; ///< as typed after the name, once they have been parsed
  std::vector<std::unique_ptr<Command>> subcommands;

protected:
  /// Prints each with the command's name to standard error; the exit code they make.
  ExitCode fail(const std::vector<std::string>& failures) const;

  bool json = false;
  std::vector<std::string> failures; ///< what went wrong without ending the work
};

/// What commands that compile begin with: a variable that nothing reads, a misspelt
/// SAGEBWD_OFFLINE say, costs a line of warning.
void warn_of_variables(const Command&);
/// What commands that use kernels begin with: raises PackError for a named pack that cannot be
/// used, which else only a kernel that is not in the directory would find out.
void require_packs();

/// Makes one subcommand, or one of "sagebwd cache".
using MakeCommand = std::unique_ptr<Command>();
MakeCommand make_doctor, make_emit, make_build, make_prebuild, make_tune, make_bench, make_verify,
    make_trace, make_cache, make_completion;
std::vector<std::unique_ptr<Command>> make_all(std::initializer_list<MakeCommand*>);
/// Every one, as "sagebwd --help" lists them.
std::vector<std::unique_ptr<Command>> all_commands();

} // namespace sagebwd::tools
