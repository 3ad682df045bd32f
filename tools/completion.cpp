//===- completion.cpp - sagebwd completion ---------------------------------===//
//
// The scripts by which shells complete commands and options, made from the same tables as --help.
//
//===----------------------------------------------------------------------===//
#include "tools/command.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <map>

namespace sagebwd::tools {

namespace {

struct CommandWords {
  std::string before; ///< for example "sagebwd cache"
  std::vector<std::string> next;
  std::vector<OptionTable::Values> values; ///< after an option of `next`
};

/// Collects what may follow a command, and the commands below it.
void collect(const Command& command, std::vector<CommandWords>& all) {
  const std::string before = command.name.empty() ? "sagebwd" : "sagebwd " + command.name;
  CommandWords words{before, {}, {}};
  if (command.subcommands.empty()) {
    words.next = command.options.words();
    words.values = command.options.values();
  }
  words.next.push_back("--help");
  for (const auto& sub : command.subcommands)
    words.next.push_back(sub->name.substr(sub->name.rfind(' ') + 1));
  all.push_back(words);
  for (const auto& sub : command.subcommands)
    collect(*sub, all);
}

/// zsh reads the script for bash by its bashcompinit.
std::string for_bash(const std::vector<CommandWords>& all) {
  std::string script = "_sagebwd() {\n"
                       "  local word=${COMP_WORDS[COMP_CWORD]} before=sagebwd i next\n"
                       "  local behind=${COMP_WORDS[COMP_CWORD-1]} list=${word%\"${word##*,}\"}\n"
                       "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
                       "    [[ ${COMP_WORDS[i]} == -* ]] || before+=\" ${COMP_WORDS[i]}\"\n"
                       "  done\n"
                       "  case $before in\n";
  for (auto words = all.rbegin(); words != all.rend(); ++words) { // the longest names first
    script += "    '" + words->before + "'" + (words->before == "sagebwd" ? "" : "*") + ") next='" +
              llvm::join(words->next, " ") + "'\n      case $behind in\n";
    for (const auto& [option, values] : words->values) // without values: names of files
      script += "        --" + option + ") next='" + llvm::join(values, " ") + "' ;;\n";
    script += "      esac ;;\n";
  }
  return script + "  esac\n"
                  "  COMPREPLY=($(compgen -W \"$next\" -P \"$list\" -- \"${word#\"$list\"}\"))\n"
                  "}\n"
                  "complete -o default -F _sagebwd sagebwd\n";
}

std::string for_fish(const std::vector<CommandWords>& all) {
  std::string script = "complete -c sagebwd -f\n";
  for (const CommandWords& words : all) {
    const std::string behind = words.before.substr(std::min(words.before.size(), size_t{8}));
    std::string condition = "__fish_use_subcommand";
    if (!behind.empty()) {
      condition = "";
      for (size_t at = 0; at != std::string::npos;) {
        const size_t end = behind.find(' ', at);
        condition += (condition.empty() ? "" : "; and ") +
                     ("__fish_seen_subcommand_from " + behind.substr(at, end - at));
        at = end == std::string::npos ? end : end + 1;
      }
    }
    std::map<std::string, std::string> taken; // the values of each option
    for (const auto& [option, values] : words.values)
      taken[option] = values.empty() ? " -r -F" : " -x -a '" + llvm::join(values, " ") + "'";
    for (const std::string& word : words.next)
      script +=
          "complete -c sagebwd -n '" + condition + "' " +
          (word.starts_with("--") ? "-l " + word.substr(2) + taken[word.substr(2)] : "-a " + word) +
          "\n";
  }
  return script;
}

class Completion : public Command {
public:
  Completion()
      : Command("completion", "print a script that completes this command line in a shell",
                "Prints a script for bash, zsh or fish.\n"
                "\n"
                "examples:\n"
                "  source <(sagebwd completion bash)              # in ~/.bashrc\n"
                "  autoload -U bashcompinit && bashcompinit; source <(sagebwd completion zsh)\n"
                "  sagebwd completion fish > ~/.config/fish/completions/sagebwd.fish\n") {
    options.positional("bash|zsh|fish", shell_, "the shell");
  }

  bool warns_of_variables() const override { return false; }
  ExitCode run() override {
    if (shell_ != "bash" && shell_ != "zsh" && shell_ != "fish")
      throw UsageError(shell_.empty()
                           ? "name a shell: bash, zsh or fish"
                           : "'" + shell_ + "' is not known; it takes bash, zsh or fish");
    Command root("", "", "");
    root.subcommands = all_commands();
    std::vector<CommandWords> all;
    collect(root, all);
    const std::string script = shell_ == "fish" ? for_fish(all) : for_bash(all);
    return finish(llvm::json::Object{{"shell", shell_}, {"script", script}},
                  [&] { fputs(script.c_str(), stdout); });
  }

private:
  std::string shell_;
};

} // namespace

std::unique_ptr<Command> make_completion() { return std::make_unique<Completion>(); }

} // namespace sagebwd::tools
