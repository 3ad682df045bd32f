"""The two readers of masks and score functions, Python's and the generator's, agree on drawn texts:
what they take has the same canonical text, and what one refuses the other does."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402


class Texts:
    """Draws texts of a type, with brackets and spaces that are not needed."""

    def __init__(self, seed, score):
        self.random, self.score = random.Random(seed), score

    def spaced(self, *parts):
        return "".join(part + " " * self.random.choice([0, 0, 1]) for part in parts)

    def of(self, kind, depth):
        text = getattr(self, kind)(depth)
        return f"({text})" if depth and self.random.random() < 0.3 else text

    def boolean(self, depth):
        if depth == 0:
            return self.random.choice(["true", "false", "q<k"])
        one = self.random.choice(["compare", "join", "not", "where"])
        if one == "compare":
            kind = self.random.choice(["integer", "real"] if self.score else ["integer"])
            sign = self.random.choice(["<", "<=", ">", ">=", "==", "!="])
            return self.spaced(self.of(kind, depth - 1), sign, self.of(kind, depth - 1))
        if one == "where":
            return f"where({', '.join(self.of('boolean', depth - 1) for _ in range(3))})"
        if one == "not":
            return self.spaced("~", self.of("boolean", depth - 1))
        return self.spaced(self.of("boolean", depth - 1), self.random.choice("&|^"),
                           self.of("boolean", depth - 1))  # fmt: skip

    def integer(self, depth):
        if depth == 0:
            return self.random.choice(["q", "k", "h", "b", "7", "0", "-3", "2147483647"])
        one = self.random.choice(["sum", "by", "call", "minus", "where"])
        if one == "by":
            return self.spaced(self.of("integer", depth - 1), self.random.choice(["//", "%"]),
                               str(self.random.choice([1, 3, 16, 0, -2])))  # fmt: skip
        if one == "call":
            return (f"{self.random.choice(['min', 'max'])}({self.of('integer', depth - 1)}, "
                    f"abs({self.of('integer', depth - 1)}))")  # fmt: skip
        if one == "minus":
            return self.spaced("-", self.of("integer", depth - 1))
        if one == "where":
            return (f"where({self.of('boolean', depth - 1)}, {self.of('integer', depth - 1)},"
                    f"{self.of('integer', depth - 1)})")  # fmt: skip
        return self.spaced(self.of("integer", depth - 1), self.random.choice("+-*"),
                           self.of("integer", depth - 1))  # fmt: skip

    def real(self, depth):
        if depth == 0:
            return self.random.choice(["s", "0.5", "1e3", "s/2", "-0.0", "2", "float(q)"])
        one = self.random.choice(["sum", "call", "mixed", "pow"])
        if one == "call":
            name = self.random.choice(["tanh", "exp", "log", "sqrt", "sigmoid", "abs"])
            return f"{name}({self.of('real', depth - 1)})"
        if one == "pow":
            return f"pow({self.of('real', depth - 1)}, {self.of('integer', 0)})"
        other = "integer" if one == "mixed" else "real"
        return self.spaced(self.of("real", depth - 1), self.random.choice("+-*/"),
                           self.of(other, depth - 1))  # fmt: skip

    def broken(self, text):
        """A character less, more, or another one."""
        at = self.random.randrange(len(text))
        new = self.random.choice(["", "(", ")", ",", "&&", "q", ".", "1", "//"])
        return text[:at] + new + text[at + self.random.randint(0, 1):]


READERS = {"mask": masks.trace_mask, "score": masks.trace_score}


def canonical(read, text):
    """Without spaces; None if it is refused."""
    try:
        return read(text).replace(" ", "")
    except sagebwd.SpecError:
        return None


def agree(field, texts):
    """How many of the texts both take. A spec's score has no infinity, which is no matter of its
    reader."""
    def by_the_generator(text):
        words = str(sagebwd.Spec(head_dim=64, **{field: text})).split()
        return next(word for word in words if word.startswith(field + "=")).partition("=")[2]

    taken = 0
    for text in texts:
        ours = canonical(lambda given: READERS[field](given).text, text)
        if field == "score" and "inf" in (ours or ""):
            continue
        assert ours == canonical(by_the_generator, text), text
        taken += ours is not None
    return taken


@pytest.mark.parametrize("field", READERS)
def test_drawn_texts(field):
    draw = Texts(0, field == "score")
    texts = [draw.of("boolean", 1 + i % 4) if field == "mask" else
             "s + " + draw.of("real", 1 + i % 4) for i in range(500)]  # fmt: skip
    assert agree(field, [text for text in texts if len(text) < 900]) > 100


@pytest.mark.parametrize("field", READERS)
def test_broken_texts(field):
    draw = Texts(1, field == "score")
    texts = [draw.broken(draw.of("boolean", 2) if field == "mask" else "s + " + draw.of("real", 2))
             for _ in range(500)]  # fmt: skip
    assert 20 < agree(field, texts) < 480
