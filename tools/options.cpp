//===- options.cpp - The command line's options ----------------------------===//
#include "tools/options.h"

#include "generator/fields.h"
#include "tools/console.h"

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace sagebwd::tools {

std::string suggestion(std::string_view given, const std::vector<std::string>& known) {
  const std::string* best = nullptr;
  // Two letters swapped are two edits.
  unsigned best_distance = std::max<size_t>(2, given.size() / 3) + 1;
  for (const std::string& name : known) {
    unsigned distance = llvm::StringRef(name).edit_distance(
        llvm::StringRef(given.data(), given.size()), /*AllowReplacements=*/true, best_distance);
    // A prefix is what someone types who expects abbreviations.
    if (given.size() > 2 && name.compare(0, given.size(), given) == 0)
      distance = 0;
    if (distance < best_distance) {
      best = &name;
      best_distance = distance;
    }
  }
  return best ? "; did you mean '" + *best + "'?" : "";
}

void OptionTable::flag(std::string name, bool& value, std::string help) {
  options_.push_back({std::move(name), "", std::move(help), [&value](auto&) { value = true; }});
}

void OptionTable::text(std::string name, std::string placeholder, std::string& value,
                       std::string help) {
  if (!value.empty())
    help += " (default " + value + ")";
  // An unset variable of a shell must not turn one command into another.
  auto set = [&value, name](const std::string& given) {
    if (given.empty())
      throw UsageError("--" + name + " is empty");
    value = given;
  };
  options_.push_back({name, std::move(placeholder), std::move(help), std::move(set)});
}

void OptionTable::list(std::string name, std::string placeholder, std::vector<std::string>& values,
                       std::string help) {
  if (!values.empty())
    help += " (default " + llvm::join(values, ",") + ")";
  // The first use replaces the default, later ones add.
  auto set = [&values, name, fresh = true](const std::string& given) mutable {
    llvm::SmallVector<llvm::StringRef> parts;
    llvm::SplitString(given, parts, ",");
    if (parts.empty())
      throw UsageError("--" + name + " needs at least one value, comma-separated");
    if (fresh)
      values.clear();
    fresh = false;
    for (const llvm::StringRef part : parts)
      values.push_back(part.str());
  };
  options_.push_back({name, std::move(placeholder), std::move(help), std::move(set)});
}

int64_t OptionTable::whole_number(const std::string& name, const std::string& given, int64_t low,
                                  int64_t high) {
  int64_t value = 0;
  const char* end = given.data() + given.size();
  const auto [stop, error] = std::from_chars(given.data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high)
    throw UsageError("--" + name + " is '" + given + "'; it takes a whole number from " +
                     std::to_string(low) + " to " + std::to_string(high));
  return value;
}

void OptionTable::number(std::string name, double& value, double low, double high,
                         std::string help) {
  auto parse = [&value, name, low, high](const std::string& given) {
    char* end = nullptr;
    double parsed = std::strtod(given.c_str(), &end);
    if (given.empty() || *end || !(parsed >= low && parsed <= high))
      throw UsageError("--" + name + " is '" + given +
                       format("'; it takes a number from %g to %g", low, high));
    value = parsed;
  };
  options_.push_back(
      {std::move(name), "X", std::move(help) + format(" (default %g)", value), std::move(parse)});
}

void OptionTable::word(std::string name, std::string words,
                       std::function<void(const std::string&)> parse, std::string help) {
  auto set = [name, parse = std::move(parse)](const std::string& given) {
    try {
      parse(given);
    } catch (const SpecError& error) {
      throw UsageError("--" + name + ": " + error.what());
    }
  };
  options_.push_back({std::move(name), std::move(words), std::move(help), std::move(set)});
}

void OptionTable::positional(std::string placeholder, std::string& value, std::string help) {
  auto set = [&value, placeholder](const std::string& given) {
    if (!value.empty())
      throw UsageError("unexpected argument '" + given + "'; one " + placeholder + " is enough: '" +
                       value + "'");
    value = given;
  };
  positional_.push_back({"", std::move(placeholder), std::move(help), std::move(set)});
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
    // "-o" is the one short name; everything else is spelled out.
    std::string bare = name.rfind("--", 0) == 0 ? name.substr(2) : name == "-o" ? "output" : "";
    auto option = std::find_if(options_.begin(), options_.end(),
                               [&](const Option& candidate) { return candidate.name == bare; });
    if (bare.empty() || option == options_.end()) {
      std::vector<std::string> known;
      for (const Option& candidate : options_)
        known.push_back("--" + candidate.name);
      const char* what = argument.rfind("-", 0) == 0 ? "unknown option '" : "unexpected argument '";
      throw UsageError(what + name + "'" + suggestion(name, known));
    }
    if (option->placeholder.empty()) {
      if (has_value)
        throw UsageError("--" + bare + " takes no value, '" + value + "' was given");
    } else if (!has_value) {
      if (i + 1 == arguments.size())
        throw UsageError("--" + bare + " needs a value: --" + bare + " " + option->placeholder);
      value = arguments[++i];
    }
    option->set(value);
    option->given = true;
  }
}

bool OptionTable::given(const std::string& name) const { return llvm::is_contained(given(), name); }

std::vector<std::string> OptionTable::given() const {
  std::vector<std::string> names;
  for (const Option& option : options_)
    if (option.given)
      names.push_back(option.name);
  return names;
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
      lines += line + option.help + "\n";
    }
  return lines;
}

} // namespace sagebwd::tools
