"""The address of the repository, which pyproject.toml alone says: `[project.urls]`, Repository."""

import re
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def address(text=None):
    """The address, or None as long as none is filled in."""
    text = PYPROJECT.read_text() if text is None else text
    table = re.search(r"^\[project\.urls\]\n((?:(?!\[).*\n?)*)", text, re.MULTILINE)
    found = table and re.search(r'^Repository *= *"(.+?)"', table[1], re.MULTILINE)
    return found[1] if found else None
