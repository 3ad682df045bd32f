//===- main.cpp - The sagebwd command line ---------------------------------===//
//
// Exit codes: 0 done, 1 failed, 2 wrong use.
//
//===----------------------------------------------------------------------===//
#include "generator/spec.h"
#include "runtime/error.h"
#include "tools/command.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

using namespace sagebwd;
using namespace sagebwd::tools;

namespace {

using Commands = std::vector<std::unique_ptr<Command>>;

void print_overview(const Commands& commands, FILE* stream) {
  fputs("sagebwd " SAGEBWD_VERSION " - trainable INT8 attention (SageBwd), compiled where it runs\n"
        "\n"
        "usage: sagebwd COMMAND [options]\n"
        "\n",
        stream);
  for (const auto& command : commands)
    fprintf(stream, "  %-8s %s\n", command->name.c_str(), command->summary.c_str());
  fputs("\n"
        "'sagebwd COMMAND --help' lists a command's options and shows examples.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong use.\n",
        stream);
}

void print_help(const Command& command) {
  printf("sagebwd %s - %s\n\n%s\noptions:\n%s", command.name.c_str(), command.summary.c_str(),
         command.help.c_str(), command.options.help().c_str());
}

bool asks_for_help(const std::string& argument) {
  return argument == "--help" || argument == "-h" || argument == "help";
}

ExitCode wrong_use(const std::string& message, const std::string& command) {
  fprintf(stderr, "sagebwd: %s\n", message.c_str());
  fprintf(stderr, "See 'sagebwd %s--help'.\n", command.empty() ? "" : (command + " ").c_str());
  return kWrongUse;
}

ExitCode dispatch(const Commands& commands, std::vector<std::string> arguments) {
  if (arguments.empty()) {
    print_overview(commands, stderr);
    return kWrongUse;
  }
  std::string name = arguments.front();
  arguments.erase(arguments.begin());
  if (name == "help" && !arguments.empty()) // "sagebwd help build"
    std::swap(name, arguments.front());
  if (asks_for_help(name)) {
    print_overview(commands, stdout);
    return kDone;
  }
  if (name == "--version") {
    puts("sagebwd " SAGEBWD_VERSION);
    return kDone;
  }
  auto found = std::find_if(commands.begin(), commands.end(),
                            [&](const auto& command) { return command->name == name; });
  if (found == commands.end()) {
    std::vector<std::string> known;
    for (const auto& command : commands)
      known.push_back(command->name);
    return wrong_use("unknown command '" + name + "'" + suggestion(name, known), "");
  }
  Command& command = **found;
  if (std::any_of(arguments.begin(), arguments.end(), asks_for_help)) {
    print_help(command);
    return kDone;
  }
  try {
    command.options.parse(arguments);
    return command.run();
  } catch (const UsageError& error) {
    return wrong_use(error.what(), name);
  } catch (const SpecError& error) {
    return wrong_use(error.what(), name);
  } catch (const CompileError& error) {
    fprintf(stderr, "sagebwd %s: %s\n%s\n", name.c_str(), error.what(), error.log.c_str());
  } catch (const std::bad_alloc&) {
    fprintf(stderr, "sagebwd %s: out of memory; make the problem smaller\n", name.c_str());
  } catch (const std::exception& error) {
    fprintf(stderr, "sagebwd %s: %s\n", name.c_str(), error.what());
  }
  return kFailed;
}

} // namespace

int main(int count, char** values) {
  Commands commands;
  commands.push_back(make_doctor());
  commands.push_back(make_emit());
  commands.push_back(make_build());
  commands.push_back(make_verify());
  commands.push_back(make_trace());
  const int code = dispatch(commands, {values + 1, values + count});
  // What did not reach its reader, on a full disk say, must not pass for done.
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "sagebwd: cannot write to standard output: %s\n", strerror(errno));
    return kFailed;
  }
  return code;
}
