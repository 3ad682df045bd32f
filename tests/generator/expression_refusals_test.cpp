//===- expression_refusals_test.cpp - Errors of expressions, and limits -----===//

#include "generator/expression.h"
#include "tests/generator/specs.h"

using namespace sagebwd;
using test::expect_refusal;

namespace {

std::string canonical_of(const std::string& mask) { return to_string(parse_mask(mask)); }
std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i)
    all += text;
  return all;
}

/// The parts are in the message, which names the column.
struct Refused {
  const char* text;
  int column;
  std::initializer_list<const char*> parts;
};
void expect_refused(const Refused& refused, const std::function<void(std::string_view)>& parse) {
  const std::string column = "': column " + std::to_string(refused.column) + " ";
  expect_refusal([&] { parse(refused.text); }, {column.c_str()});
  for (const char* part : refused.parts)
    expect_refusal([&] { parse(refused.text); }, {part});
}

TEST(ExpressionRefusals, WrongMasksAreRefusedWithTheColumn) {
  const Refused kRefused[] = {
      {"", 1, {"cannot read mask ''", "is the end, where a value is expected: b, h, q, k, a"}},
      {"q > ", 5, {"is the end, where a value"}},
      {"q > (k", 7, {"is the end, where an operator or ')' is expected"}},
      {"q > k)", 6, {"has ')', where an operator or the end is expected"}},
      {"q k", 3, {"has 'k', where an operator or the end"}},
      {"q > k and b == 0", 7, {"has 'and': write &"}},
      {"q > k && b == 0", 7, {"has '&&': write &"}},
      {"q > k or b == 0", 7, {"has 'or': write |"}},
      {"q > k || b == 0", 7, {"has '||': write |"}},
      {"not q > k", 1, {"has 'not': write ~"}},
      {"b == 0 & !(q > k)", 10, {"has '!': write ~"}},
      {"q = k", 3, {"has '=': write ==, >= or <="}},
      {"q <> k", 3, {"has '<>': write !="}},
      {"q ** 2 > k", 3, {"has '**': write pow(a, c)"}},
      {"q << 2 > k", 3, {"has '<<'", "power of two"}},
      {"q > k if b else q < k", 7, {"has 'if': write where(c, a, b)"}},
      {"b == 0 ? q : k", 8, {"has '?': write where(c, a, b)"}},
      {"q.k > 1", 2, {"has '.'", "indexed, as in doc[b, q]"}},
      {".5 < 1", 1, {"has '.'", "as in 0.5"}},
      {"1. < 2", 1, {"has '1.', which is no number", "0.5"}},
      {"q > 1.5.2", 5, {"'1.5.2', which is no number"}},
      {"q > 1e", 5, {"'1e', which is no number"}},
      {"q > 0x10", 5, {"'0x10', which is no number"}},
      {"q > 010", 5, {"'010', which is no number"}},
      {"q > 2147483648", 5, {"has 2147483648, and ints have 32 bits", "1e10"}},
      {"q > -2147483649", 6, {"has 2147483649, and ints have 32 bits"}},
      {"q > 1e39", 5, {"has 1e39, which FP32 does not have: write inf or 0.0"}},
      {"q > 1e-60", 5, {"has 1e-60, which FP32 does not have"}},
      {"True", 1, {"has 'True': write true"}},
      {"nan[q] == 1", 1, {"has 'nan'", "a mask hides keys"}},
      {"q < k | k < 0 / 0", 13, {"begins a constant that is NaN", "a mask hides keys"}},
      {"q < log(-1)", 5, {"begins a constant that is NaN"}},
      {"q > k > b", 7, {"has '>' behind another comparison", "write a < b & b < c"}},
      {"q == k != true", 8, {"has '!=' behind another"}},
      {"true == (q > k)", 1, {"begins a bool, and == takes ints and floats", "& | ^ ~"}},
      {"q & k == 0", 1, {"begins an int, and & takes bools: compare it"}},
      {"q > k | 1.5", 9, {"begins a float, and | takes bools"}},
      {"(q) ^ (k > 0)", 1, {"begins an int, and ^ takes bools"}},
      {"~q == k", 2, {"begins an int, and ~ takes bools"}},
      {"-(q > k) == 1", 2, {"begins a bool, and - takes ints and floats"}},
      {"1 + (q > k) == 1", 5, {"begins a bool, and + takes ints", "where(c, 1, 0)"}},
      {"q // k == 1", 6, {"begins no constant, and // divides by a constant other than 0"}},
      {"q % (2 - 2) == 1", 5, {"begins a 0, and % divides by a constant other than 0"}},
      {"q // 2.0 == 1", 6, {"begins a float, and // takes ints: / divides floats"}},
      {"q / 2 % 2 == 1", 1, {"begins a float, and % takes ints"}},
      {"s > 0", 1, {"has 's', the score, which only score functions have", "b, h, q, k"}},
      {"q", 1, {"begins an int, and a mask is a bool", "q - k < 512"}},
      {"q / k", 1, {"begins a float, and a mask is a bool"}},
      {"doc == 1", 1, {"has 'doc', which is none of b, h, q, k, and", "write doc[b] or doc[b, q]"}},
      {"q[0] > 1", 1, {"has 'q', a number, with an index"}},
      {"q(0) > 1", 1, {"has 'q', which is no function"}},
      {"min > 1", 1, {"has 'min', a function, without its values: write min(a, b)"}},
      {"min[q] > 1", 1, {"has 'min', a function"}},
      {"min(q) > 1", 1, {"has min of 1 value: write min(a, b)"}},
      {"q > abs(q, k)", 5, {"has abs of 2 values: write abs(a)"}},
      {"where(q, k) > 1", 1, {"has where of 2 values: write where(c, a, b)"}},
      {"min() > 1", 5, {"has ')', where a value is expected"}},
      {"where(q, 1, 2) > 1", 7, {"begins an int, and the condition of where takes bools"}},
      {"where(q > k, true, 2)", 20, {"begins an int, and where, if its other choice is a bool,"}},
      {"where(q > k, 2, true) > 1", 17, {"begins a bool, and where, if its other choice is a num"}},
      {"max(q > k, 2) > 1", 5, {"begins a bool, and max takes ints and floats"}},
      {"pow(q, k) > 1.0", 8, {"begins no constant, and pow takes constant exponents", "log"}},
      {"mni(q, k) > 1",
       1,
       {"has 'mni', which is no function (did you mean 'min'?): these are min"}},
      {"clamp(q, 0, 1) > 1", 1, {"has 'clamp': write min(max(a, low), high)"}},
      {"int(q / 2) > 1", 1, {"has 'int': floats do not become ints; a // c divides ints"}},
      {"torch.abs(q) > 1", 1, {"has 'torch': functions have no module"}},
      {"q_idx > k", 1, {"has 'q_idx': write q"}},
      {"q > kv_idx", 5, {"has 'kv_idx': write k"}},
      {"Doc[q] == 1", 1, {"has 'Doc', and an operand's name", "letters from a to z: rename it"}},
      {"_a[q] == 1", 1, {"has '_a', and an operand's name is a letter and up to 15"}},
      {"a2345678901234567[q] == 1", 1, {"and an operand's name is a letter and up to 15"}},
      {"doc[] == 1", 5, {"has ']', where a value is expected"}},
      {"doc[q > k] == 1", 5, {"begins a bool, and an index takes ints"}},
      {"doc[q, 1.0] == 1", 8, {"begins a float, and an index takes ints"}},
      {"doc[q, k, b] == 1", 1, {"has 'doc' with 3 indices, and it takes 1 or 2"}},
      {"doc[q] == doc[q, k]", 11, {"has 'doc' with 2 indices, and it takes 1, as before"}},
      {"q > k\t| q < 5", 6, {"has a character that is not printable ASCII"}},
      {"q \xe2\x89\xa5 k", 3, {"cannot read mask 'q ??? k'", "not printable ASCII"}},
      {"q > k; q", 6, {"has ';', where an operator or the end"}},
      {"a[q]+c[q]+d[q]+e[q]+f[q]+g[q]+i[q]+j[q]+l[q]==0", 41, {"has 'l', another operand", "8"}},
  };
  for (const Refused& refused : kRefused)
    expect_refused(refused, [](std::string_view text) { parse_mask(text); });
}

TEST(ExpressionRefusals, WrongScoreFunctionsAreRefusedWithTheColumn) {
  const Refused kRefused[] = {
      {"q + 1.0", 1, {"cannot read score function", "begins a score function without the score s"}},
      {"q", 1, {"begins an int, and a score function is a float: write float(...)"}},
      {"where(s > 0.0, 1, 2)", 1, {"begins an int, and a score function is a float"}},
      {"s > 0", 1, {"begins a bool, and a score function is a float", "a mask hides keys"}},
      {"s + ", 5, {"b, h, q, k, s, a number"}},
      {"s // 2", 1, {"begins a float, and // takes ints"}},
      {"s + bias[where(s > 0.0, q, k)]", 16, {"has 's', the score, in an index"}},
      {"s + softcap(s)", 5, {"has 'softcap', which is no function"}},
      {"score * 2", 1, {"has 'score': write s"}},
  };
  for (const Refused& refused : kRefused)
    expect_refused(refused, [](std::string_view text) { parse_score(text); });
}

TEST(ExpressionRefusals, OperandsOfATableAreThose) {
  const OperandTypes types = {{"doc", {ValueType::integer, 2}},
                              {"rank", {ValueType::integer, 1}},
                              {"bias", {ValueType::real, 2}},
                              {"slope", {ValueType::real, 1}}};
  const Refused kRefused[] = {
      {"dok[b, q] == 1",
       1,
       {"has 'dok', which is no operand here (did you mean 'doc'?)",
        "the operands are bias, doc, rank, slope"}},
      {"doc[b] == 1", 1, {"has 'doc' with 1 index, and it takes 2"}},
      {"rank[b, q] == 1", 1, {"has 'rank' with 2 indices, and it takes 1"}},
      {"bias[q, k] % 2 == 1", 1, {"begins a float, and % takes ints"}},
  };
  for (const Refused& refused : kRefused)
    expect_refused(refused, [&](std::string_view text) { parse_mask(text, &types); });
  const OperandTypes none;
  expect_refusal([&] { parse_mask("doc[q] == 1", &none); }, {"no operand here: there are none"});
}

TEST(ExpressionRefusals, LimitsAreToldAndHold) {
  const auto parse = [](const std::string& text) { return [=] { parse_mask(text); }; };
  const std::string deep = repeated("(", 100) + "q" + repeated(")", 100) + "==k";
  EXPECT_EQ(canonical_of(deep), "q == k");
  expect_refusal(parse("(" + deep + ")"),
                 {"column 101 opens bracket 101 inside of others, and 100 are supported"});
  expect_refusal(parse(repeated("a[", 2000)), {"at most 2000 are supported"});
  expect_refusal(parse(repeated("-", 1999) + "q"), {"and at most 500 are supported"});
  EXPECT_EQ(canonical_of(repeated("~", 498) + "true"), "true");
  EXPECT_NO_THROW(parse(repeated("q+", 248) + "q==k")());
  expect_refusal(parse(repeated("q+", 249) + "q==k"), {"column 502 has name, literal, operator or "
                                                       "call 501, and at most 500 are supported"});
  expect_refusal(parse(std::string(2001, ' ')), {"it has 2001 characters, and at most 2000"});
  EXPECT_NO_THROW(parse(std::string(1997, ' ') + "q<k")());
  // Spaces are added around operators.
  const std::string name(16, 'x');
  const std::string wide = repeated(name + "[q]+", 95) + name + "[q]==0";
  ASSERT_LE(wide.size(), kMostCharacters);
  expect_refusal(parse(wide), {"the canonical form of a mask", "characters, and at most 2000"});
  // Operators and brackets, as deep as the parser goes.
  EXPECT_EQ(canonical_of(repeated("true|true&(", 100) + "q<k" + repeated(")", 100)).substr(0, 26),
            "true | true & (true | true");
}

TEST(ExpressionRefusals, LongTextsAreShownInPart) {
  const std::string terms = repeated("q+", 100);
  try {
    parse_mask(terms + "oops+" + terms + "q == k");
    ADD_FAILURE();
  } catch (const SpecError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'...q+q+"), std::string::npos) << message;
    EXPECT_NE(message.find("oops+q+"), std::string::npos) << message;
    EXPECT_LT(message.size(), 350U) << message;
  }
}

} // namespace
