"""Reads the text of an expression: precedence climbing over tokens, with columns in errors."""

import re

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind
from sagebwd.masks import language

_TOKEN = re.compile(r"(?P<number>[0-9](?:[eE][-+]|[\w.])*)|(?P<word>[A-Za-z_]\w*)"
                    r"|(?P<sign>\*\*|//|==|!=|<=|>=|&&|\|\||<<|>>|[-+*/%<>&|^~()\[\],!=.?:])",
                    re.ASCII)  # fmt: skip
_NUMBER = re.compile(r"(?P<int>0|[1-9][0-9]*)(?P<decimal>(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)")
MOST_NESTED = 100
#: Other languages write these, and an expression has what follows.
INSTEAD = {
    "and": "&", "or": "|", "not": "~", "&&": "&", "||": "|", "!": "~", "=": "==", "is": "==",
    "**": "pow(x, 2)", "?": "where(c, x, y)", "if": "where(c, x, y)", "else": "where(c, x, y)",
    "in": "a comparison with each, joined by |", "minimum": "min", "maximum": "max",
    "absolute": "abs", "True": "true", "False": "false", "nan": "a mask, which hides keys",
    "<<": "* of a power of two", ">>": "// of a power of two", "clamp": "min(max(x, low), high)",
    "float_": "float", "q_idx": "q", "kv_idx": "k", "score": "s",
}  # fmt: skip


def parse(text, types):
    """The tree of a text. `types`: the type ('int' or 'float') and number of indices of each
    operand by its name; or one type, which all operands then have.

    Raises SpecError, which says the column (from 1 on), what is there and what is supported.
    """
    if not isinstance(text, str):
        raise SpecTypeError(f"the expression is {a_kind(text)}; pass a function or a text")
    if len(text) > language.MOST_CHARACTERS:
        raise SpecError(f"the expression has {len(text)} characters; at most "
                        f"{language.MOST_CHARACTERS} are supported")  # fmt: skip
    return _Parser(text, types).whole()


class _Parser:
    def __init__(self, text, types):
        self.text, self.types, self.at, self.depth = text, types, 0, 0
        self.indices = {}  # how many each operand has had so far
        self.advance()

    def advance(self):
        """Reads the next token: its kind, text and column."""
        while self.text.startswith(" ", self.at):
            self.at += 1
        self.begin = self.at
        found = _TOKEN.match(self.text, self.at)
        if found is None and self.at < len(self.text):
            self.fail(f"{self.text[self.at]!r} is not supported: {language.SUPPORTED}")
        self.kind, self.token = (found.lastgroup, found[0]) if found else ("end", "")
        self.at = found.end() if found else self.at

    def fail(self, message, at=None):
        at = self.begin if at is None else at
        first, last = max(0, at - 50), at + 50
        shown = "..." * (first > 0) + self.text[first:last] + "..." * (last < len(self.text))
        raise SpecError(f"column {at + 1} of {shown!r}: {message}")

    def checked(self, at, make, *given):
        """A node; its error gets the column."""
        try:
            return make(*given)
        except SpecError as error:
            self.fail(str(error), at)

    def unexpected(self, wanted):
        if self.token in INSTEAD:
            self.fail(f"{self.token!r} is not supported: write {INSTEAD[self.token]}")
        self.fail(f"{repr(self.token) if self.token else 'the end'} stands where {wanted} is "
                  "expected")  # fmt: skip

    def expect(self, token):
        if self.token != token:
            self.unexpected(repr(token))
        self.advance()

    def whole(self):
        tree = self.binary()
        if self.kind != "end":
            self.unexpected("an operator or the end")
        return tree

    def nested(self, change):
        self.depth += change
        if self.depth > MOST_NESTED:
            self.fail(f"more than {MOST_NESTED} brackets inside each other")

    def binary(self):
        """Operands and operators. Those that bind as tightly as the next one, or more, go first."""
        operands, signs = [self.unary()], []
        while True:
            binds = language.PRECEDENCE.get(self.token, 0)
            while signs and language.PRECEDENCE[signs[-1][0]] >= binds:
                sign, at = signs.pop()
                if self.token in language.COMPARISONS and sign in language.COMPARISONS:
                    self.fail("comparisons are not chained: write x < y & y < z")
                right, left = operands.pop(), operands.pop()
                operands.append(self.checked(at, language.operation, sign, left, right))
            if not binds:
                return operands[0]
            signs.append((self.token, self.begin))
            self.advance()
            operands.append(self.unary())

    def unary(self):
        """Signs, and what they are of; -1 is a literal, as 2147483648 is none."""
        signs = []
        while self.token in ("-", "~"):
            signs.append((self.token, self.begin))
            self.advance()
        if self.kind == "number":
            is_negative = bool(signs) and signs[-1][0] == "-"
            part = self.number("-" if is_negative else "")
            signs = signs[:-1] if is_negative else signs
        else:
            part = self.atom()
        for sign, at in reversed(signs):
            part = self.checked(at, language.operation, sign, part)
        return part

    def number(self, sign):
        found = _NUMBER.fullmatch(self.token)
        if found is None:
            self.fail(f"{self.token!r} is no number: numbers are as 12, 0.5 and 1e-5")
        number = (float if found["decimal"] else int)(sign + self.token)
        node = self.checked(self.begin, language.literal, number)
        self.advance()
        return node

    def atom(self):
        token, at = self.token, self.begin
        if self.kind != "word" and token != "(":
            self.unexpected("a number, a name or '('")
        self.advance()
        if token == "(":
            (inside,) = self.listed(")", most=1)
            return inside
        if token in INSTEAD and (self.token != "[" or token in language.RESERVED):
            self.fail(f"{token!r} is not supported: write {INSTEAD[token]}", at)
        if token in language.WORDS:
            return language.literal(language.WORDS[token])
        if token in language.NAMES:
            return language.name(token)
        if token in language.FUNCTIONS:
            return self.call(token, at)
        if self.token == "(":
            self.fail(f"there is no function {token!r}: {language.SUPPORTED}", at)
        return self.read(token, at)

    def listed(self, closing, most=3):
        self.nested(1)
        items = [self.binary()]
        while self.token == "," and len(items) < most:
            self.advance()
            items.append(self.binary())
        self.expect(closing)
        self.nested(-1)
        return items

    def call(self, function, at):
        self.expect("(")
        arguments, count = self.listed(")"), language.FUNCTIONS[function]
        if len(arguments) != count:
            self.fail(f"{function} has {len(arguments)} arguments; pass {count}", at)
        return self.checked(at, language.operation, function, *arguments)

    def read(self, operand, at):
        self.checked(at, language.check_operand_name, operand)
        if self.token != "[":
            self.fail(f"{operand!r} is neither a name nor indexed: {language.SUPPORTED}; a tensor "
                      f"is read as {operand}[q]", at)  # fmt: skip
        self.advance()
        indices = self.listed("]")
        wanted = self.indices.setdefault(operand, len(indices))
        type = self.types
        if not isinstance(type, str):
            if operand not in self.types:
                self.fail(f"there is no tensor {operand!r}: pass it in operands=", at)
            type, wanted = self.types[operand]
        if len(indices) != wanted:
            self.fail(f"{operand} is indexed with {len(indices)} numbers, and has {wanted} "
                      "dimensions", at)  # fmt: skip
        if len(self.indices) > language.MOST_OPERANDS:
            self.fail(f"{operand} is one tensor too many: at most {language.MOST_OPERANDS} are "
                      "supported", at)  # fmt: skip
        return self.checked(at, language.read, operand, type, indices)
