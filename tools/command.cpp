//===- command.cpp - What subcommands share --------------------------------===//
#include "tools/command.h"
#include "tools/console.h"

namespace sagebwd::tools {

ExitCode Command::finish(llvm::json::Object facts, const std::function<void()>& print_text) const {
  if (json)
    print_json(std::move(facts));
  else
    print_text();
  return fail(failures);
}

ExitCode Command::fail(const std::vector<std::string>& failures) const {
  for (const std::string& failure : failures)
    complain(name, failure);
  return failures.empty() ? kDone : kFailed;
}

std::vector<std::unique_ptr<Command>> make_all(std::initializer_list<MakeCommand*> makers) {
  std::vector<std::unique_ptr<Command>> commands;
  for (MakeCommand* make : makers)
    commands.push_back(make());
  return commands;
}

} // namespace sagebwd::tools
