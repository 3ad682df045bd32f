"""Figures of the pages about trainers stand on the pages that have them from records."""

import re
from statistics import fmean, median

from documents import ROOT
from test_claims import record

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


def test_a_trained_model_is_sampled_as_the_record_says():
    found = record("trained.json")
    ours, theirs = ([row["errors"][name]["rel_l2"] for row in found["layers"]]
                    for name in ("sagebwd", "comfy-kitchen"))  # fmt: skip
    smaller = f"{sum(x < y for x, y in zip(ours, theirs))} of {len(ours)} layers"
    times = {mask: of["sagebwd"]["median_ms"] / of["comfy-kitchen"]["median_ms"]
             for mask, of in found["forward"].items()}  # fmt: skip
    text = " ".join((ROOT / "docs/use/inference.md").read_text().split())
    assert (f"The median of our errors is {median(ours) / median(theirs):.2f} of that of "
            f"comfy-kitchen's, and in {smaller} ours is the smaller one.") in text  # fmt: skip
    assert f"takes {times['all keys']:.2f} of its time" in text
    assert f"it takes {times['causal']:.2f}." in text

    def loss(of, by):
        return fmean(run["held_out_by"][by] for run in found["fine_tunes"]
                     if run["attention"] == of)  # fmt: skip

    more = {by: sorted(loss(of, by) - loss(of, "sdpa") for of in ("sdpa", "sagebwd"))
            for by in ("sagebwd", "comfy-kitchen")}  # fmt: skip
    won = found["held_out_before"]["sdpa"] - loss("sagebwd", "sdpa")
    assert ("sagebwd's forward costs {:.4f} to {:.4f} nats beside SDPA's, and comfy-kitchen's "
            "{:.4f} to {:.4f}, where the fine-tuning won {:.2f}.").format(
        *more["sagebwd"], *more["comfy-kitchen"], won) in text  # fmt: skip
