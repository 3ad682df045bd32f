//===- main.cpp - The sagebwd command line ---------------------------------===//
//
// Exit codes: 0 done, 1 failed, 2 wrong use.
//
//===----------------------------------------------------------------------===//
#include "generator/spec.h"
#include "runtime/error.h"
#include "runtime/tuner/worker/worker.h"
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

void print_help(const Command& command, FILE* stream) {
  fprintf(stream, "sagebwd %s - %s\n\n%s\n", command.name.c_str(), command.summary.c_str(),
          command.help.c_str());
  for (const auto& sub : command.subcommands)
    fprintf(stream, "  %-14s %s\n", sub->name.c_str(), sub->summary.c_str());
  if (command.subcommands.empty())
    fprintf(stream, "options:\n%s", command.options.help().c_str());
  else
    fprintf(stream, "\n'sagebwd %s COMMAND --help' lists a command's options.\n",
            command.name.c_str());
}

bool asks_for_help(const std::string& argument) {
  return argument == "--help" || argument == "-h" || argument == "help";
}

ExitCode wrong_use(const std::string& message, const std::string& command) {
  fprintf(stderr, "sagebwd: %s\n", message.c_str());
  fprintf(stderr, "See 'sagebwd %s--help'.\n", command.empty() ? "" : (command + " ").c_str());
  return kWrongUse;
}

ExitCode run(Command& command, std::vector<std::string> arguments);

/// `prefix` is what was typed before, e.g. "cache ".
ExitCode run_one_of(const Commands& commands, std::vector<std::string> arguments,
                    const std::string& prefix) {
  const std::string name = arguments.front();
  arguments.erase(arguments.begin());
  auto found = std::find_if(commands.begin(), commands.end(),
                            [&](const auto& command) { return command->name == prefix + name; });
  if (found != commands.end())
    return run(**found, std::move(arguments));
  std::vector<std::string> known;
  for (const auto& command : commands)
    known.push_back(command->name.substr(prefix.size()));
  const bool option = name.rfind('-', 0) == 0;
  return wrong_use((option ? "unknown option '" : "unknown command '" + prefix) + name + "'" +
                       suggestion(name, known),
                   prefix.substr(0, prefix.find(' ')));
}

ExitCode dispatch(const Commands& commands, std::vector<std::string> arguments) {
  if (arguments.empty()) {
    print_overview(commands, stderr);
    return kWrongUse;
  }
  if (arguments.front() == "help" && arguments.size() > 1) // "sagebwd help build"
    std::rotate(arguments.begin(), arguments.begin() + 1, arguments.end());
  if (asks_for_help(arguments.front())) {
    print_overview(commands, stdout);
    return kDone;
  }
  if (arguments.front() == "--version") {
    puts("sagebwd " SAGEBWD_VERSION);
    return kDone;
  }
  return run_one_of(commands, std::move(arguments), "");
}

ExitCode run(Command& command, std::vector<std::string> arguments) {
  const std::string& name = command.name;
  if (!command.subcommands.empty() && !arguments.empty() && !asks_for_help(arguments.front()))
    return run_one_of(command.subcommands, std::move(arguments), name + " ");
  const bool wants_help = std::any_of(arguments.begin(), arguments.end(), asks_for_help);
  if (wants_help || !command.subcommands.empty()) {
    print_help(command, wants_help ? stdout : stderr);
    return wants_help ? kDone : kWrongUse;
  }
  try {
    command.options.parse(arguments);
    return command.run();
  } catch (const std::invalid_argument& error) { // an option, a spec or a variable's value
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
  if (count == 2 && strcmp(values[1], "tune-worker") == 0)
    return tune_worker_main(); // not for people, so that no list has it
  Commands commands;
  commands.push_back(make_doctor());
  commands.push_back(make_emit());
  commands.push_back(make_build());
  commands.push_back(make_prebuild());
  commands.push_back(make_tune());
  commands.push_back(make_verify());
  commands.push_back(make_trace());
  commands.push_back(make_cache());
  const int code = dispatch(commands, {values + 1, values + count});
  // What did not reach its reader, on a full disk say, must not pass for done.
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "sagebwd: cannot write to standard output: %s\n", strerror(errno));
    return kFailed;
  }
  return code;
}
