//===- options.cpp - The command line's options ----------------------------===//
#include "tools/options.h"

#include "generator/fields.h"
#include "tools/console.h"

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringExtras.h"

#include <algorithm>

namespace sagebwd::tools {

namespace {

std::string with_default(const std::string& help, const std::string& value) {
  return value.empty() ? help : help + " (default " + value + ")";
}

/// An option's name without its dashes; empty for what has none. "-o" is the only short name.
std::string bare_name(const std::string& typed) {
  return typed.starts_with("--") ? typed.substr(2) : typed == "-o" ? "output" : "";
}

} // namespace

UsageError wrong_value(const std::string& option, const std::string& given,
                       const std::string& wanted) {
  return UsageError("--" + option + " is '" + given + "'; it takes " + wanted);
}

void OptionTable::flag(const std::string& name, bool& value, const std::string& help) {
  options_.push_back({name, "", help, [&value](auto&) { value = true; }});
}

void OptionTable::text(const std::string& name, const std::string& placeholder, std::string& value,
                       const std::string& help) {
  // An unset shell variable must not turn one command into another.
  auto set = [&value, name](const std::string& given) {
    if (given.empty())
      throw UsageError("--" + name + " is empty");
    value = given;
  };
  options_.push_back({name, placeholder, with_default(help, value), set});
}

void OptionTable::list(const std::string& name, const std::string& placeholder,
                       std::vector<std::string>& values, const std::string& help) {
  // The first use replaces the default, later ones add.
  auto set = [&values, name, fresh = true](const std::string& given) mutable {
    llvm::SmallVector<llvm::StringRef> parts;
    llvm::StringRef(given).split(parts, ',');
    if (llvm::is_contained(parts, "")) // for example, an unset shell variable
      throw wrong_value(name, given, "values with a comma between them, none of them empty");
    if (fresh)
      values.clear();
    fresh = false;
    for (const llvm::StringRef part : parts)
      values.push_back(part.str());
  };
  options_.push_back({name, placeholder, with_default(help, llvm::join(values, ",")), set});
}

int64_t OptionTable::whole_number(const std::string& name, const std::string& given, int64_t low,
                                  int64_t high) {
  int64_t value = 0;
  if (!llvm::to_integer(given, value, 10) || value < low || value > high)
    throw wrong_value(name, given, format("a whole number from %td to %td", low, high));
  return value;
}

void OptionTable::number(const std::string& name, double& value, double low, double high,
                         const std::string& help) {
  auto set = [&value, name, low, high](const std::string& given) {
    double parsed = 0;
    if (given.empty() || !llvm::to_float(given, parsed) || !(parsed >= low && parsed <= high))
      throw wrong_value(name, given, format("a number from %g to %g", low, high));
    value = parsed;
  };
  options_.push_back({name, "X", with_default(help, format("%g", value)), set});
}

void OptionTable::word(const std::string& name, const std::string& words,
                       const std::function<void(const std::string&)>& parse,
                       const std::string& help) {
  auto set = [name, parse](const std::string& given) {
    try {
      parse(given);
    } catch (const SpecError& error) {
      throw UsageError("--" + name + ": " + error.what());
    }
  };
  options_.push_back({name, words, help, set});
}

void OptionTable::positional(const std::string& placeholder, std::string& value,
                             const std::string& help) {
  auto set = [&value, placeholder](const std::string& given) {
    if (!value.empty())
      throw UsageError("unexpected argument '" + given + "'; one " + placeholder + " is enough: '" +
                       value + "'");
    value = given;
  };
  positional_.push_back({"", placeholder, help, set});
}

std::vector<OptionTable::Option>::iterator OptionTable::option_named(const std::string& bare) {
  return std::find_if(options_.begin(), options_.end(), [&](const Option& candidate) {
    return candidate.name == bare || llvm::is_contained(candidate.other_names, bare);
  });
}

void OptionTable::parse(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!positional_.empty() && !argument.empty() && argument.front() != '-') {
      positional_.front().set(argument);
      continue;
    }
    const bool has_value = argument.find('=') != std::string::npos;
    const auto halves = llvm::StringRef(argument).split('=');
    const std::string name = halves.first.str();
    std::string value = halves.second.str();
    const std::string bare = bare_name(name);
    const auto option = option_named(bare);
    if (bare.empty() || option == options_.end()) {
      std::vector<std::string> known;
      for (const Option& candidate : options_)
        known.push_back("--" + candidate.name);
      // The opposite of a switch is the default.
      const bool negated = bare.starts_with("no-");
      const std::string other = negated ? bare.substr(3) : "no-" + bare;
      if (std::any_of(options_.begin(), options_.end(),
                      [&](const Option& o) { return o.name == other && o.placeholder.empty(); }))
        throw UsageError("unknown option '" + name + "': that is the default, which '--" + other +
                         "' changes");
      const char* what = argument.rfind("-", 0) == 0 ? "unknown option '" : "unexpected argument '";
      throw UsageError(what + name + "'" + suggestion(name, known));
    }
    if (option->placeholder.empty()) {
      if (has_value)
        throw UsageError("--" + bare + " takes no value, '" + value + "' was given");
    } else if (!has_value) {
      // A name of an option is no value, unless it is given as --option=value.
      if (i + 1 == arguments.size() ||
          option_named(bare_name(llvm::StringRef(arguments[i + 1]).split('=').first.str())) !=
              options_.end())
        throw UsageError("--" + bare + " needs a value: --" + bare + " " + option->placeholder);
      value = arguments[++i];
    }
    if (option->given && option->given_as != bare)
      throw UsageError("--" + bare + " and --" + option->given_as +
                       " are two names of one option: give one of them");
    option->set(value);
    option->given = true;
    option->given_as = bare;
  }
}

void OptionTable::offer(std::vector<std::string> values) {
  options_.back().values = std::move(values);
}

void OptionTable::also(const std::string& other, const std::string& name) {
  const auto named = [&](const Option& option) { return option.name == name; };
  std::find_if(options_.begin(), options_.end(), named)->other_names.push_back(other);
}

bool OptionTable::given(const std::string& name) const { return llvm::is_contained(given(), name); }

std::vector<std::string> OptionTable::given() const {
  std::vector<std::string> names;
  for (const Option& option : options_)
    if (option.given)
      names.push_back(option.name);
  return names;
}

std::vector<std::string> OptionTable::words() const {
  std::vector<std::string> words;
  for (const Option& choice : positional_) {
    llvm::SmallVector<llvm::StringRef> choices;
    llvm::SplitString(choice.placeholder, choices, "|");
    if (choices.size() > 1)
      words.insert(words.end(), choices.begin(), choices.end());
  }
  for (const Option& option : options_)
    words.push_back("--" + option.name);
  return words;
}

std::vector<OptionTable::Values> OptionTable::values() const {
  std::vector<Values> all;
  for (const Option& option : options_)
    if (!option.placeholder.empty())
      all.push_back({option.name, option.values});
  return all;
}

std::string OptionTable::help() const {
  constexpr size_t kColumn = 30;
  std::string lines;
  for (const std::vector<Option>* options : {&positional_, &options_})
    for (const Option& option : *options) {
      std::string line = option.name.empty() ? " " : "  --" + option.name;
      if (!option.placeholder.empty())
        line += " " + option.placeholder;
      line += line.size() < kColumn ? std::string(kColumn - line.size(), ' ')
                                    : "\n" + std::string(kColumn, ' ');
      lines += line + wrapped(option.help, kColumn) + "\n";
    }
  return lines;
}

} // namespace sagebwd::tools
