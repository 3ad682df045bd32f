//===- expression_parse.cpp - Parsing expressions ---------------------------===//

#include "generator/expression_checks.h"

#include "generator/nearest.h"

#include <cmath>

namespace sagebwd {
namespace {

using Token = ExpressionToken;

const Notation* operator_of(const Token& token, int inputs) {
  for (const Notation& notation : notations())
    if (token.kind == Token::sign && notation.level < kCall && notation.inputs == inputs &&
        notation.text == token.text)
      return &notation;
  return nullptr;
}

/// Recursive descent. Inside of each bracket are at most as many calls of operation() as there are
/// levels, and ExpressionTokens allows few brackets inside of others.
class ExpressionParser {
public:
  ExpressionParser(bool score, std::string_view text, const OperandTypes* types)
      : score_(score), tokens_(score ? "score function" : "mask", text),
        checks_(tokens_, score, types) {}

  Expression parse() {
    const ParsedNode whole = operation(1);
    if (tokens_.current().kind != Token::end)
      tokens_.refuse(tokens_.current(), "an operator or the end is expected");
    return checks_.finished(whole);
  }

private:
  ParsedNode operation(int least_level);
  ParsedNode with_signs();
  ParsedNode value();
  ParsedNode literal(bool negative, size_t at);
  ParsedNode word();
  ParsedNode name(PointName);
  ParsedNode read();
  std::vector<ParsedNode> list(std::string_view open, std::string_view close);
  void check_word() const;

  bool score_;
  ExpressionTokens tokens_;
  CheckedBuilder checks_;
  int open_indices_ = 0;
};

ParsedNode ExpressionParser::operation(int least_level) {
  ParsedNode left = with_signs();
  bool compared = false;
  while (const Notation* notation = operator_of(tokens_.current(), 2)) {
    if (notation->level < least_level)
      break;
    if (notation->level == kComparison && compared)
      tokens_.refuse(tokens_.current().at, "has '" + std::string(notation->text) +
                                               "' behind another comparison, and comparisons are "
                                               "not chained: write a < b & b < c");
    compared = notation->level == kComparison;
    checks_.count(tokens_.take());
    const ParsedNode right = operation(notation->level + 1);
    left = checks_.operation(*notation, left.at, {left, right});
  }
  return left;
}

ParsedNode ExpressionParser::with_signs() {
  std::vector<Token> signs;
  while (operator_of(tokens_.current(), 1))
    signs.push_back(tokens_.take());
  const bool negative =
      !signs.empty() && signs.back().text == "-" && tokens_.current().kind == Token::number;
  const size_t at = negative ? signs.back().at : tokens_.current().at;
  if (negative)
    signs.pop_back();
  ParsedNode result = tokens_.current().kind == Token::number ? literal(negative, at) : value();
  for (; !signs.empty(); signs.pop_back()) {
    checks_.count(signs.back());
    result = checks_.operation(*operator_of(signs.back(), 1), signs.back().at, {result});
  }
  return result;
}

ParsedNode ExpressionParser::value() {
  const Token token = tokens_.current();
  if (token.kind == Token::word)
    return word();
  if (!tokens_.take_if("("))
    tokens_.refuse(token, "a value is expected: b, h, q, k" + std::string(score_ ? ", s" : "") +
                              ", a number, true, false, inf, an operand with indices such as "
                              "doc[b, q], a function such as min(a, b), or (...)");
  const ParsedNode inner = operation(1);
  tokens_.expect(")");
  return {inner.node, token.at};
}

ParsedNode ExpressionParser::literal(bool negative, size_t at) {
  const Token token = tokens_.take();
  checks_.count(token);
  const std::string text = (negative ? "-" : "") + std::string(token.text);
  const size_t point = token.text.find_first_not_of("0123456789");
  const bool whole = point == std::string_view::npos;
  const bool sound = (token.text[0] != '0' || token.text.size() == 1 || point == 1) &&
                     (whole || token.text[point] != '.' ||
                      token.text.find_first_of("0123456789", point) == point + 1);
  const auto read = [&](auto number) {
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (!sound || stop != text.data() + text.size())
      tokens_.refuse(token.at, "has '" + std::string(token.text) +
                                   "', which is no number: numbers are as 12, 0.5 and 1e-5");
    if (error != std::errc())
      tokens_.refuse(token.at,
                     "has " + std::string(token.text) +
                         (whole ? ", and ints have 32 bits: write it as a float, as in 1e10"
                                : ", which FP32 does not have: write inf or 0.0"));
    return number;
  };
  return whole ? checks_.literal(read(int32_t()), at)
               : checks_.literal(static_cast<double>(read(float())), at);
}

/// Refuses a word that cannot stand where a value begins.
void ExpressionParser::check_word() const {
  const Token& word = tokens_.current();
  const bool called = tokens_.next().text == "(", indexed = tokens_.next().text == "[";
  const std::string has = "has '" + std::string(word.text) + "'";
  const std::string_view instead = instead_of(word.text);
  if (!instead.empty() && (!indexed || is_reserved(word.text)))
    tokens_.refuse(word.at, has + ": " + std::string(instead));
  if (const Notation* function = function_of(word.text)) {
    if (!called)
      tokens_.refuse(word.at,
                     has + ", a function, without its values: write " + usage_of(*function));
  } else if (called) {
    std::vector<std::string> known;
    for (const Notation& notation : notations())
      if (notation.level == kCall)
        known.emplace_back(notation.text);
    const std::string meant = nearest(word.text, known);
    tokens_.refuse(word.at, has + ", which is no function" +
                                (meant.empty() ? "" : " (did you mean '" + meant + "'?)") +
                                ": these are " + joined(known, ", "));
  }
}

ParsedNode ExpressionParser::word() {
  check_word();
  const Token word = tokens_.current();
  for (const auto& [name, text] : Words<PointName>::all)
    if (text == word.text)
      return this->name(name);
  if (const Notation* function = function_of(word.text)) {
    checks_.count(tokens_.take());
    return checks_.operation(*function, word.at, list("(", ")"));
  }
  const bool is_true = word.text == "true", is_infinite = word.text == "inf";
  if (!is_true && !is_infinite && word.text != "false")
    return read();
  checks_.count(tokens_.take());
  return is_infinite ? checks_.literal(static_cast<double>(INFINITY), word.at)
                     : checks_.literal(is_true, word.at);
}

ParsedNode ExpressionParser::name(PointName name) {
  const Token word = tokens_.take();
  checks_.count(word);
  if (tokens_.current().text == "[")
    tokens_.refuse(word.at, "has '" + std::string(word.text) +
                                "', a number, with an index: an operand has another name, as in "
                                "doc[b, q]");
  if (name == PointName::s && !score_)
    tokens_.refuse(word.at, "has 's', the score, which only score functions have: a mask is made "
                            "of b, h, q, k and operands");
  if (name == PointName::s && open_indices_ > 0)
    tokens_.refuse(word.at, "has 's', the score, in an index: indices are made of b, h, q, k and "
                            "operands");
  return checks_.name(name, word.at);
}

ParsedNode ExpressionParser::read() {
  const Token name = tokens_.take();
  checks_.count(name);
  if (tokens_.current().text != "[")
    tokens_.refuse(name.at, "has '" + std::string(name.text) + "', which is none of b, h, q, k" +
                                (score_ ? ", s" : "") + ", and an operand has indices: write " +
                                std::string(name.text) + "[b] or " + std::string(name.text) +
                                "[b, q], say");
  const int operand = checks_.operand(name);
  ++open_indices_;
  const std::vector<ParsedNode> indices = list("[", "]");
  --open_indices_;
  return checks_.read(operand, name, indices);
}

std::vector<ParsedNode> ExpressionParser::list(std::string_view open, std::string_view close) {
  std::vector<ParsedNode> items;
  tokens_.expect(open);
  do
    items.push_back(operation(1));
  while (tokens_.take_if(","));
  tokens_.expect(close);
  return items;
}

Expression checked(bool score, std::string_view text, const OperandTypes* types) {
  Expression expression = ExpressionParser(score, text, types).parse();
  const std::string canonical = to_string(expression); // its constructor knows the limits
  ExpressionTokens(
      score ? "the canonical form of a score function" : "the canonical form of a mask", canonical);
  return expression;
}

} // namespace

Expression parse_mask(std::string_view text, const OperandTypes* types) {
  return checked(false, text, types);
}

Expression parse_score(std::string_view text, const OperandTypes* types) {
  return checked(true, text, types);
}

} // namespace sagebwd
