//===- command.h - What a subcommand is ------------------------------------===//
#pragma once

#include "tools/options.h"

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
  virtual ExitCode run() = 0;

  const std::string name;    ///< as typed after "sagebwd", e.g. "build" or "cache ls"
  const std::string summary; ///< one line, for the list
  const std::string help;    ///< what it does, and examples
  OptionTable options;
  std::vector<std::unique_ptr<Command>> subcommands;

protected:
  bool json = false;
};

std::unique_ptr<Command> make_doctor();
std::unique_ptr<Command> make_emit();
std::unique_ptr<Command> make_build();
std::unique_ptr<Command> make_prebuild();
std::unique_ptr<Command> make_verify();
std::unique_ptr<Command> make_trace();
std::unique_ptr<Command> make_cache();
std::unique_ptr<Command> make_tune();

} // namespace sagebwd::tools
