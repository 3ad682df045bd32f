//===- command.h - What a subcommand is ------------------------------------===//
#pragma once

#include "tools/options.h"

#include <memory>
#include <string>
#include <vector>

namespace sagebwd::tools {

enum ExitCode { kDone = 0, kFailed = 1, kWrongUse = 2 };

/// One subcommand: the constructor declares its options, `run` does the work.
class Command {
public:
  Command(std::string name, std::string summary, std::string help)
      : name(std::move(name)), summary(std::move(summary)), help(std::move(help)) {
    options.flag("json", json, "print JSON to standard output");
  }
  virtual ~Command() = default;
  virtual ExitCode run() = 0;

  const std::string name;
  const std::string summary; ///< one line, for the list
  const std::string help;    ///< what it does, and examples
  OptionTable options;

protected:
  bool json = false;
};

std::unique_ptr<Command> make_doctor();
std::unique_ptr<Command> make_emit();
std::unique_ptr<Command> make_build();
std::unique_ptr<Command> make_verify();
std::unique_ptr<Command> make_trace();

} // namespace sagebwd::tools
