"""Code blocks of the documents, and what is said of each in comments that readers do not see.

`<!-- not run: WHY -->`, `<!-- needs a GPU -->` and `<!-- needs NVRTC -->` stand before a block;
`<!-- setup ... -->` holds Python that runs in its place among the page's Python blocks.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
         *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip
_PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>(?:.*\n)*?)-->$|^<!-- (?P<said>not run: .+|needs .+) -->$"
    r"|^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)```$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str  #: 'setup' for Python that readers do not see
    text: str
    said: tuple  #: of the comments that stand right before it

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page, text):
    """Those of a page, in order."""
    found, said, end = [], [], 0
    for piece in _PIECE.finditer(text):
        if text[end : piece.start()].strip():
            said = []
        end = piece.end()
        if piece["said"]:
            said.append(piece["said"])
            continue
        language = "setup" if piece["setup"] is not None else piece["language"]
        body = piece["setup"] if piece["setup"] is not None else piece["text"]
        line = text.count("\n", 0, piece.start()) + 1
        found.append(Block(page, line, language, body, tuple(said)))
        said = []
    return found


def blocks():
    named = [(page.relative_to(ROOT).as_posix(), page.read_text()) for page in PAGES]
    return [block for name, text in named for block in blocks_of(name, text)]
