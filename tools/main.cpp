//===- main.cpp - The sagebwd command line ---------------------------------===//
//
// Exit codes: 0 done, 1 failed, 2 wrong use.
//
//===----------------------------------------------------------------------===//
#include "generator/spec.h"
#include "runtime/error.h"
#include "runtime/settings.h"
#include "runtime/tuner/worker/gpu_bench.h"
#include "runtime/version.h"
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

/// Prints the help of the program, which lists all commands.
void print_overview(const Command& root, FILE* stream) {
  fprintf(stream,
          "sagebwd %s - trainable INT8 attention (SageBwd), compiled where it runs\n"
          "\n"
          "usage: sagebwd COMMAND [options]\n"
          "\n",
          version());
  for (const auto& command : root.subcommands)
    fprintf(stream, "  %-10s  %s\n", command->name.c_str(), command->summary.c_str());
  fputs("\n"
        "'sagebwd COMMAND --help' lists a command's options and shows examples.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong use.\n",
        stream);
}

void print_help(const Command& command, FILE* stream) {
  if (command.name.empty())
    return print_overview(command, stream);
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

/// This is typed before the name of a subcommand or an option.
std::string prefix_of(const Command& command) {
  return command.name.empty() ? "" : command.name + " ";
}

ExitCode wrong_use(const std::string& message, const Command& command) {
  command.give_up({message});
  fprintf(stderr, "See 'sagebwd %s--help'.\n", prefix_of(command).c_str());
  return kWrongUse;
}

ExitCode run(Command& command, std::vector<std::string> arguments);

/// Runs the subcommand that the first argument names.
ExitCode run_subcommand(Command& command, std::vector<std::string> arguments) {
  const std::string name = arguments.front(), prefix = prefix_of(command);
  arguments.erase(arguments.begin());
  std::vector<std::string> known;
  for (const auto& sub : command.subcommands) {
    if (sub->name == prefix + name)
      return run(*sub, std::move(arguments));
    known.push_back(sub->name.substr(prefix.size()));
  }
  const bool option = name.rfind('-', 0) == 0;
  if (option)
    known = {"--help", command.name.empty() ? "--version" : "-h"};
  const bool clears = prefix + name == "cache clear"; // as other tools call it
  return wrong_use((option ? "unknown option '" : "unknown command '" + prefix) + name + "'" +
                       (clears ? "; 'sagebwd cache prune --all --yes' removes all that is kept"
                               : suggestion(name, known)),
                   command);
}

ExitCode run(Command& command, std::vector<std::string> arguments) {
  const bool group = !command.subcommands.empty();
  if (group && arguments.size() > 1 && arguments.front() == "help") // "sagebwd help build"
    std::rotate(arguments.begin(), arguments.begin() + 1, arguments.end());
  if (group && !arguments.empty() && !asks_for_help(arguments.front()))
    return run_subcommand(command, std::move(arguments));
  const bool wants_help = std::any_of(arguments.begin(), arguments.end(), asks_for_help);
  if (wants_help || group) {
    print_help(command, wants_help ? stdout : stderr);
    return wants_help ? kDone : kWrongUse;
  }
  command.json = std::find(arguments.begin(), arguments.end(), "--json") != arguments.end();
  try {
    command.options.parse(arguments);
    command.arguments = std::move(arguments);
    say_when_interrupted(command.name);
    if (command.warns_of_variables())
      warn_of_unknown_variables("sagebwd " + command.name);
    return command.run();
  } catch (const std::invalid_argument& error) { // an option, a spec or a variable's value
    return wrong_use(error.what(), command);
  } catch (const CompileError& error) {
    return command.give_up({std::string(error.what()) + "\n" + error.log});
  } catch (const std::bad_alloc&) {
    return command.give_up({"out of memory; make the problem smaller"});
  } catch (const std::exception& error) {
    return command.give_up({error.what()});
  }
}

} // namespace

int main(int count, char** values) {
  if (count == 2 && strcmp(values[1], "tune-worker") == 0)
    return tune_worker_main(); // for the tuner alone, so no help lists it
  std::vector<std::string> arguments(values + 1, values + count);
  Command root("", "", "");
  root.subcommands = all_commands();
  int code = kDone;
  if (!arguments.empty() && (arguments.front() == "--version" || arguments.front() == "-V"))
    printf("sagebwd %s\n", version());
  else
    code = run(root, std::move(arguments));
  // If the output was not written, for example because the disk is full, the command failed.
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "sagebwd: cannot write to standard output: %s\n", strerror(errno));
    return kFailed;
  }
  return code;
}
