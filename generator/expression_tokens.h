//===- expression_tokens.h - The pieces of an expression's text -------------===//
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sagebwd {

struct ExpressionToken {
  enum Kind { word, number, sign, end } kind = end;
  std::string_view text;
  size_t at = 0; ///< characters before it
};

/// A text that is read token by token. The text has to outlive it.
class ExpressionTokens {
public:
  /// `what` says in errors what the text is, as in "mask". Raises SpecError for a text that passes
  /// the limits of expression.h or is not printable ASCII.
  ExpressionTokens(std::string_view what, std::string_view text);

  /// The token to be read, and the one behind it.
  const ExpressionToken& current() const { return current_; }
  const ExpressionToken& next() const { return next_; }
  ExpressionToken take();
  /// Whether the current token is this sign, which is then taken.
  bool take_if(std::string_view sign);
  /// Takes a sign that must be there.
  void expect(std::string_view sign);

  /// Raises SpecError, which says what is said of the column.
  [[noreturn]] void refuse(size_t at, const std::string& said) const;
  /// Refuses a token, with what to write in its place or else what is expected there.
  [[noreturn]] void refuse(const ExpressionToken&, const std::string& expected) const;

private:
  [[noreturn]] void refuse_text(const std::string& problem, size_t at = 0) const;
  ExpressionToken token_at(size_t) const;

  std::string_view what_, text_;
  ExpressionToken current_, next_;
};

/// Whether operands cannot have this name, because it means something in other languages.
bool is_reserved(std::string_view word);
/// What to write in the place of a word or sign of other languages, as in "write &"; may be empty.
std::string_view instead_of(std::string_view text);

} // namespace sagebwd
