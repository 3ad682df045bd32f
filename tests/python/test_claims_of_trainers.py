"""Figures of the pages about trainers stand on the pages that have them from records."""

import re

from documents import ROOT

PAGES = sorted((ROOT / "docs/use/trainers").glob("*.md"))


def test_speeds_are_those_of_the_tables():
    tables = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("benchmarks", "predicted"))
    found = {figure for page in PAGES for figure in re.findall(r"\d\.\d+x", page.read_text())}
    assert len(found) > 5 and not {figure for figure in found if figure not in tables}


def test_each_trainer_has_a_page_with_its_commit_and_a_test():
    text = (ROOT / "tests/trainers/checkouts.py").read_text()
    commits = dict(re.findall(r'"(\S+)": Trainer\(\s*"\S+",\s*"(\w{40})"', text))
    assert len(commits) == len(PAGES) - 1 == 8
    for name, commit in commits.items():
        page = (ROOT / f"docs/use/trainers/{name.lower()}.md").read_text()
        assert commit[:8] in page and len(page.split()) <= 350
        assert (ROOT / f"tests/trainers/test_{name.lower().replace('-', '_')}.py").exists()
        assert commit[:8] in (ROOT / "docs/use/trainers/trainers.md").read_text()
