//===- options.h - The command line's options ------------------------------===//
//
// Each subcommand lists its options in a table, bound to plain variables: no globals. That table
// also parses, writes the help text and suggests the nearest name. (LLVM's CommandLine registers
// options globally, ends the process on an error, and its errors name neither limits nor remedy.)
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/fields.h"

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd::tools {

/// The command line asks for something that does not exist: exit code 2.
class UsageError : public std::invalid_argument {
public:
  using std::invalid_argument::invalid_argument;
};

class OptionTable {
public:
  void flag(const std::string& name, bool& value, const std::string& help);
  void text(const std::string& name, const std::string& placeholder, std::string& value,
            const std::string& help);
  /// Comma-separated; may be given several times.
  void list(const std::string& name, const std::string& placeholder,
            std::vector<std::string>& values, const std::string& help);
  template <typename Int>
  void integer(const std::string& name, Int& value, int64_t low, int64_t high,
               const std::string& help) {
    const auto set = [=, &value](const std::string& given) {
      value = static_cast<Int>(whole_number(name, given, low, high));
    };
    word(name, "N", set, help + " (default " + std::to_string(value) + ")");
  }
  void number(const std::string& name, double& value, double low, double high,
              const std::string& help);
  /// `parse` raises SpecError for an unknown word and lists the known ones.
  void word(const std::string& name, const std::string& words,
            const std::function<void(const std::string&)>& parse, const std::string& help);

  /// The values of the option declared last, for completion in shells.
  void offer(std::vector<std::string> values);
  /// Another name of an option: it is accepted, and the help does not list it.
  void also(const std::string& other, const std::string& name);

  /// The only argument without a name, such as a FILE; empty if it is not given.
  void positional(const std::string& placeholder, std::string& value, const std::string& help);

  /// Reads "--name value" and "--name=value". Raises UsageError.
  void parse(const std::vector<std::string>& arguments);
  /// Whether the arguments named an option.
  bool given(const std::string& name) const;
  /// The names of all that were given.
  std::vector<std::string> given() const;
  /// These may be typed: every option, and each choice of an argument like "bash|zsh".
  std::vector<std::string> words() const;
  /// The words that each option with a value takes; none if it takes something else.
  struct Values {
    std::string option;
    std::vector<std::string> words;
  };
  std::vector<Values> values() const;
  /// One line per option.
  std::string help() const;

private:
  struct Option {
    std::string name, placeholder, help;
    std::function<void(const std::string&)> set; ///< with "" for flags
    bool given = false;
    std::vector<std::string> values = {}, other_names = {};
    std::string given_as = {}; ///< the name that was typed
  };
  /// The option of a name without dashes, or the end of the options.
  std::vector<Option>::iterator option_named(const std::string& bare);
  /// Raises UsageError for a text that is not a number, or is beyond the limits.
  static int64_t whole_number(const std::string& name, const std::string& given, int64_t low,
                              int64_t high);

  std::vector<Option> options_;
  std::vector<Option> positional_; ///< at most one
};

/// "--sigma is 'x'; it takes a number".
UsageError wrong_value(const std::string& option, const std::string& given,
                       const std::string& wanted);

} // namespace sagebwd::tools
