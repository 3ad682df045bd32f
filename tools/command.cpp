//===- command.cpp - What subcommands share --------------------------------===//
#include "tools/command.h"

#include "runtime/kernels.h"

#include "llvm/Support/FormatVariadic.h"

namespace sagebwd::tools {

ExitCode Command::finish(llvm::json::Object facts, const std::function<void()>& print_text) const {
  if (json) // llvm::outs() would end the process if it cannot write
    puts(llvm::formatv("{0:2}", llvm::json::Value(std::move(facts))).str().c_str());
  else
    print_text();
  return fail(failures);
}

ExitCode Command::fail(const std::vector<std::string>& failures) const {
  for (const std::string& failure : failures)
    complain(name, failure);
  return failures.empty() ? kDone : kFailed;
}

void require_packs() { user_store().packs(); }

std::vector<std::unique_ptr<Command>> make_all(std::initializer_list<MakeCommand*> makers) {
  std::vector<std::unique_ptr<Command>> commands;
  for (MakeCommand* make : makers)
    commands.push_back(make());
  return commands;
}

std::vector<std::unique_ptr<Command>> all_commands() {
  return make_all({make_doctor, make_emit, make_build, make_prebuild, make_tune, make_bench,
                   make_verify, make_trace, make_cache, make_completion});
}

} // namespace sagebwd::tools
