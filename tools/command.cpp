//===- command.cpp - What subcommands share --------------------------------===//
#include "tools/command.h"

#include "cache/bounded_json.h"
#include "runtime/kernels.h"

#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/FormatVariadic.h"

namespace sagebwd::tools {

namespace {
/// llvm::outs() would end the process if it cannot write.
void print(llvm::json::Object object) {
  puts(llvm::formatv("{0:2}", llvm::json::Value(std::move(object))).str().c_str());
}
} // namespace

ExitCode Command::finish(llvm::json::Object facts, const std::function<void()>& print_text) const {
  if (json)
    print(std::move(facts));
  else
    print_text();
  return complain_of(failures);
}

ExitCode Command::give_up(const std::vector<std::string>& reasons) const {
  if (json)
    print(llvm::json::Object{{"error", utf8(llvm::join(reasons, "\n"))}});
  return complain_of(reasons);
}

ExitCode Command::complain_of(const std::vector<std::string>& faults) const {
  for (const std::string& fault : faults)
    complain(name, fault);
  return faults.empty() ? kDone : kFailed;
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
