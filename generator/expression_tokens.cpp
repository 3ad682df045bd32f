//===- expression_tokens.cpp - The pieces of an expression's text -----------===//

#include "generator/expression_tokens.h"

#include "generator/expression.h"

#include <algorithm>

namespace sagebwd {
namespace {

constexpr std::string_view kLongSigns[] = {"==", "!=", "<=", ">=", "//", "**",
                                           "&&", "||", "<<", ">>", "<>"};
constexpr std::string_view kReserved[] = {"and", "or", "not", "if", "else", "is", "in", "nan"};

constexpr std::string_view kChoice = "write where(c, a, b) for a choice by c";
constexpr std::string_view kShift = "multiply, or divide by //, with a power of two";
constexpr std::string_view kClamp = "write min(max(a, low), high)";
constexpr std::string_view kModule = "functions have no module: write tanh(s) or where(c, a, b)";
constexpr std::pair<std::string_view, std::string_view> kInstead[] = {
    {"and", "write &"},
    {"&&", "write &"},
    {"or", "write |"},
    {"||", "write |"},
    {"not", "write ~"},
    {"!", "write ~"},
    {"=", "write ==, >= or <="},
    {"is", "write =="},
    {"<>", "write !="},
    {"**", "write pow(a, c), where c is a constant"},
    {"if", kChoice},
    {"else", kChoice},
    {"?", kChoice},
    {":", kChoice},
    {"<<", kShift},
    {">>", kShift},
    {"in", "compare with each value, and join the comparisons by |"},
    {".", "a decimal has digits on both sides, as in 0.5, and names have no members: an operand is "
          "indexed, as in doc[b, q]"},
    {"True", "write true"},
    {"False", "write false"},
    {"nan", "NaN is not supported; a mask hides keys"},
    {"torch", kModule},
    {"math", kModule},
    {"np", kModule},
    {"clamp", kClamp},
    {"clip", kClamp},
    {"relu", "write max(a, 0.0)"},
    {"maximum", "write max(a, b)"},
    {"minimum", "write min(a, b)"},
    {"fabs", "write abs(a)"},
    {"int", "floats do not become ints; a // c divides ints"},
    {"bool", "write a != 0"},
    {"q_idx", "write q"},
    {"kv_idx", "write k"},
    {"batch", "write b"},
    {"head", "write h"},
    {"score", "write s"},
};

bool begins_number(char c) { return c >= '0' && c <= '9'; }
bool begins_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/// The text around a place, without what a terminal or another program might not print.
std::string shown(std::string_view text, size_t at) {
  constexpr size_t kShown = 100;
  const size_t from = text.size() <= kShown || at <= kShown / 2
                          ? 0
                          : std::min(at - kShown / 2, text.size() - kShown);
  std::string part(text.substr(from, kShown));
  std::ranges::replace_if(
      part, [](char c) { return c < ' ' || c > '~'; }, '?');
  return (from ? "..." : "") + part + (from + part.size() < text.size() ? "..." : "");
}

} // namespace

bool is_reserved(std::string_view word) { return std::ranges::count(kReserved, word) != 0; }

std::string_view instead_of(std::string_view text) {
  for (const auto& [other, ours] : kInstead)
    if (other == text)
      return ours;
  return "";
}

ExpressionTokens::ExpressionTokens(std::string_view what, std::string_view text)
    : what_(what), text_(text) {
  if (text.size() > kMostCharacters)
    refuse_text("it has " + std::to_string(text.size()) + " characters, and at most " +
                std::to_string(kMostCharacters) +
                " are supported: read from an operand what does not fit");
  size_t open = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] < ' ' || text[i] > '~')
      refuse(i, "has a character that is not printable ASCII: write operators and names in ASCII, "
                "on one line");
    open += text[i] == '(' || text[i] == '[';
    open -= (text[i] == ')' || text[i] == ']') && open > 0;
    if (open > kMostBrackets)
      refuse(i, "opens bracket " + std::to_string(open) + " inside of others, and " +
                    std::to_string(kMostBrackets) + " are supported: leave some out");
  }
  current_ = token_at(0);
  next_ = token_at(current_.at + current_.text.size());
}

ExpressionToken ExpressionTokens::token_at(size_t at) const {
  at = std::min(text_.find_first_not_of(' ', at), text_.size());
  const std::string_view rest = text_.substr(at);
  if (rest.empty())
    return {ExpressionToken::end, rest, at};
  size_t size = 1;
  const auto in_word = [&] {
    return size < rest.size() && (begins_word(rest[size]) || begins_number(rest[size]));
  };
  if (begins_word(rest[0])) {
    while (in_word())
      ++size;
    return {ExpressionToken::word, rest.substr(0, size), at};
  }
  if (begins_number(rest[0])) { // whatever follows a number without a space, so that it is refused
    const auto in_exponent = [&] {
      return size < rest.size() && (rest[size] == '-' || rest[size] == '+') &&
             (rest[size - 1] == 'e' || rest[size - 1] == 'E');
    };
    while (in_word() || in_exponent() || (size < rest.size() && rest[size] == '.'))
      ++size;
    return {ExpressionToken::number, rest.substr(0, size), at};
  }
  for (std::string_view sign : kLongSigns)
    if (rest.starts_with(sign))
      size = sign.size();
  return {ExpressionToken::sign, rest.substr(0, size), at};
}

ExpressionToken ExpressionTokens::take() {
  const ExpressionToken taken = current_;
  current_ = next_;
  next_ = token_at(current_.at + current_.text.size());
  return taken;
}

bool ExpressionTokens::take_if(std::string_view sign) {
  const bool there = current_.kind == ExpressionToken::sign && current_.text == sign;
  if (there)
    take();
  return there;
}

void ExpressionTokens::expect(std::string_view sign) {
  if (!take_if(sign))
    refuse(current_, "an operator or '" + std::string(sign) + "' is expected");
}

void ExpressionTokens::refuse_text(const std::string& problem, size_t at) const {
  throw SpecError("cannot read " + std::string(what_) + " '" + shown(text_, at) + "': " + problem);
}

void ExpressionTokens::refuse(size_t at, const std::string& said) const {
  refuse_text("column " + std::to_string(at + 1) + " " + said, at);
}

void ExpressionTokens::refuse(const ExpressionToken& token, const std::string& expected) const {
  if (token.kind == ExpressionToken::end)
    refuse(token.at, "is the end, where " + expected);
  const std::string has = "has '" + std::string(token.text) + "'";
  const std::string_view instead = instead_of(token.text);
  refuse(token.at, has + (instead.empty() ? ", where " + expected : ": " + std::string(instead)));
}

} // namespace sagebwd
