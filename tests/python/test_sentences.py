"""Comments, docstrings and pages are whole sentences: few begin as those without a verb do."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Those whose sentences are counted, each line by itself.
FOLDERS = (
    "CHANGELOG.md CONTRIBUTING.md README.md SECURITY.md STRUCTURE.md",
    "bench",
    "c cmake examples hub",
    "cache",
    "docs",
    "experiments",
    "generator",
    "python/sagebwd",
    "python/sagebwd/benchmark",
    "python/sagebwd/core",
    "python/sagebwd/distributed",
    "python/sagebwd/integrations",
    "python/sagebwd/lists",
    "python/sagebwd/masks",
    "python/sagebwd/monitoring",
    "python/sagebwd/nn",
    "python/sagebwd/numerics",
    "python/sagebwd/sla",
    "python/stubs",
    "runtime",
    "templates",
    "templates/kernels/LISTS.md templates/kernels/MEASURED.md templates/kernels/README.md",
    "tests/cache",
    "tests/drawn",
    "tests/fuzz tests/mutants tests/conftest.py",
    "tests/generator",
    "tests/gpu",
    "tests/gpu_python",
    "tests/python",
    "tests/runtime",
    "tests/simulated_python",
    "tests/simulator",
    "tests/templates",
    "tests/tools",
    "tests/trainers",
    "tools",
)
SUFFIXES = {".py", ".cpp", ".h", ".cuh", ".md"}
#: "Of a block of keys, from A and y, which its h and z got": a reader looks for the verb in vain.
VERBLESS = re.compile(r"(?:Of|What|Where|The same|Its)\b")
MOST = 0.03


def paragraphs_of(path):
    """Texts of comments and docstrings, or of a page without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
        return re.split(r"(?:^|\n)\s*(?:#[^\n]*|[-*])|\n\s*\n|\|", text)
    if path.suffix == ".py":
        found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]  # fmt: skip
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return found + joined((t.start[0], t.string.lstrip("#: ")) for t in tokens
                              if t.type == tokenize.COMMENT and "fmt: " not in t.string
                              and "noqa" not in t.string)  # fmt: skip
    lines = text.split("\n")
    comments = ((number, re.search(r"(?:^|\s)///?<?(?: (.*))?$", line))
                for number, line in enumerate(lines))  # fmt: skip
    return joined((number, found[1] or "") for number, found in comments if found)


def joined(lines):
    """Numbered lines that follow each other become one text."""
    texts, before = [], None
    for number, line in lines:
        if before is not None and number == before + 1 and line:
            texts[-1] += " " + line
        else:
            texts.append(line)
        before = number
    return texts


def sentences_of(path):
    for text in paragraphs_of(path):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])|\n\s*\n", text.strip()):
            if re.match(r"[A-Z][a-z]*\b.*\s", sentence, re.DOTALL):
                yield " ".join(sentence.split())


def files_of(names):
    """Sources and pages of folders, and files, whose names have spaces between them."""
    below = [path for name in names.split() for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    return [path for path in sorted(below) if path.suffix in SUFFIXES
            and "results" not in path.parts and "__pycache__" not in path.parts]  # fmt: skip


@pytest.mark.parametrize("names", FOLDERS)
def test_few_sentences_lack_a_verb(names):
    sentences = [(path, s) for path in files_of(names) for s in sentences_of(path)]
    found = [f"{path.relative_to(ROOT)}: {s}" for path, s in sentences if VERBLESS.match(s)]
    assert len(sentences) > 20
    assert len(found) <= MOST * len(sentences), "\n".join(found)


def test_sentences_are_found(tmp_path):
    python, cpp, page = (tmp_path / name for name in ("a.py", "a.cpp", "a.md"))
    python.write_text('"""Two are here. Of these\none has no verb."""\nx = 1  # Nor has this\n')
    assert [*sentences_of(python)] == ["Two are here.", "Of these one has no verb.", "Nor has this"]
    cpp.write_text("int x; ///< What it counts. It counts\n       ///< to ten.\n// Where it\n// is.\n")
    assert [*sentences_of(cpp)] == ["What it counts.", "It counts to ten.", "Where it is."]
    page.write_text("# A title\n\nIts first sentence. Another one,\nof two.\n```sh\nOf code\n```\n")
    assert [*sentences_of(page)] == ["Its first sentence.", "Another one, of two."]
