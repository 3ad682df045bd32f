"""The first page, what a visitor of the repository finds, and how long pages are."""

import json
import re

import pytest
from documents import PAGES, ROOT

pytestmark = pytest.mark.anywhere
README = (ROOT / "README.md").read_text()
HOME = (ROOT / "docs/index.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSIONS = re.findall(r"Python :: (3\.\d+)", PROJECT)
#: The layer, the study and the masks.
PICTURES = ["layer", "parity", "skipped"]
#: The most words of a page; others are to be read in one sitting.
MOST = {"README.md": 900, "docs/benchmarks.md": 3000}
AT_ONCE = 1500


def test_pages_are_read_in_one_sitting():
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith("docs/reference/"):
            words = len(page.read_text().split())
            assert words <= MOST.get(name, AT_ONCE), f"{name} has {words} words"


@pytest.mark.parametrize("text", [README, HOME], ids=["README", "home"])
def test_three_claims_have_three_pictures_before_all_else(text):
    first = text.partition("\n## ")[0]
    assert re.findall(r"figures/(\w+)\.png", first) == PICTURES
    for figure in ("0.98 to 1.19 times", "No gap at 64K", "1.16 to 1.47 times"):
        assert figure in " ".join(first.split()), figure


def test_install_is_on_the_first_screen():
    before, _, after = README.partition("pip install .")
    assert after and len(before.split()) < 250
    assert before.count("\n## ") == 1 and before.rpartition("\n## ")[2].startswith("Install\n")
    assert "(install.md)" in HOME.partition("\n## ")[0]


def test_cards_are_named_with_what_is_predicted():
    rows = json.loads((ROOT / "bench/results/balance.json").read_text())["rows"]

    def predicted(gpu, plan="six-of-seven", masks=(False, True)):
        """The least and the most of both head dimensions at 8192 tokens."""
        found = [row["predicted"]["forward+backward"]["ratio_to_fa2"] for row in rows
                 if (row["gpu"], row["plan"], row["tokens"]) == (gpu, plan, 8192)
                 and row["causal"] in masks]  # fmt: skip
        assert len(found) == 2 * len(masks)
        return [min(found), max(found)]

    least = [predicted("RTX 4090", f"six-of-seven{more}", [causal])[0]
             for more in ("", " dp_sums=fp16") for causal in (False, True)]  # fmt: skip
    for page in (README, HOME):
        said = {line.split("|")[1].strip(): line.split("|")[2] for line in page.splitlines()
                if line.startswith("| ")}  # fmt: skip
        for card, ratios in (("RTX 4090", least), ("A100", predicted("A100")),
                             ("L40S", predicted("L40S"))):  # fmt: skip
            numbers = [float(word) for word in re.findall(r"(?<!\w)\d\.\d\b", said[card])]
            assert "predicted" in said[card] and len(numbers) == len(ratios), card
            assert all(abs(a - b) < 0.055 for a, b in zip(numbers, ratios)), (card, ratios)
        assert any("5090" in card and "instruction count" in text for card, text in said.items())


def test_the_repository_has_what_a_visitor_expects():
    templates = list((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    forms = {path.stem: path.read_text() for path in templates if path.stem != "config"}
    assert forms.keys() == {"fault", "speed", "record"}
    assert all("sagebwd doctor" in text for text in forms.values())
    assert "sagebwd bench --json" in forms["record"] and "sagebwd bench --json" in README
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    [ran] = re.findall(r"run: (?:sudo )?(\S+)", workflow)
    assert (ROOT / ran).stat().st_mode & 0o111 and ran == ".ci/run"


def test_badges_are_true():
    badges = re.findall(r"!\[([^\]]+)\]\((\S+(?:badge|badge\.svg)\S*)\)", README)
    assert [name.partition(" ")[0].rstrip(":") for name, _ in badges] == [
        "tests", "Python", "Licence"]  # fmt: skip
    for folder, name in re.findall(r"\.\./\.\./actions/(\w+)/(\w+\.yml)", README):
        assert (ROOT / ".github" / folder / name).is_file()
    said = [label for label, _ in badges[1:]]
    assert said == [f"Python {VERSIONS[0]} to {VERSIONS[-1]}", "Licence: Apache 2.0"]
    assert 'license = "Apache-2.0"' in PROJECT
    for label, address in badges[1:]:
        shown = address.partition("/badge/")[2].replace("--", "~").replace("%20", " ")
        assert label.replace(": ", " ").replace("Apache ", "Apache~") == " ".join(
            shown.split("-")[:2]).replace("licence", "Licence")  # fmt: skip


def test_tables_of_measurements_are_on_the_site():
    """README is no page of the site: nothing there sends readers to it."""
    assert not re.search(r"^<!-- [\w./-]+\.json", README, re.M)
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"\]\((\.\./)+README\.md\)", page.read_text()), page.name


def rows_of(page, heading):
    """The first table behind a heading: what stands in its first column, and the cells behind."""
    table = page.split(f"\n{heading}\n")[1].split("\n|---")[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: rest for first, *rest in lines if rest}


def test_versions_are_those_that_are_tested():
    rows = rows_of((ROOT / "docs/supported.md").read_text(), "## Tested versions")
    least = dict(re.findall(r'^\w+ = \["(\w+)>=([\d.]+)"\]$', PROJECT, re.M))
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (
        ROOT / "tests/python/requirements.txt").read_text(), re.M))  # fmt: skip
    for name in ("PyTorch", "transformers", "diffusers", "JAX", "pandas"):
        package = {"PyTorch": "torch"}.get(name, name.lower())
        assert [rows[name][0], rows[name][2]] == [
            least[package], pinned[package]], name  # fmt: skip
    assert rows["peft"][2] == pinned["peft"]
    assert [rows["Python"][0], rows["Python"][2]] == [VERSIONS[0], VERSIONS[-1]]
    ran = json.loads((ROOT / "bench/results/gpu-tests.json").read_text())["environment"]
    assert rows["Python"][1] == ran["python"].rpartition(".")[0]
    assert rows["PyTorch"][1] == (f"{ran['torch'].rpartition('.')[0]}, "
                                  f"with CUDA {ran['torch_cuda']}")  # fmt: skip
    llvm = re.search(r'llvm_versions="([\d ]+)"', (ROOT / "tools/run/packages.sh").read_text())
    assert [rows["LLVM, to build"][2], rows["LLVM, to build"][0]] == [
        llvm[1].split()[0], llvm[1].split()[-1]]  # fmt: skip


def test_every_architecture_has_a_version_of_nvrtc():
    text = (ROOT / "docs/supported.md").read_text()
    said = {}
    for cell, version in re.findall(r"^\| sm_([\da, ]+) \(.*?\| (\d+\.\d+) or newer", text, re.M):
        said |= dict.fromkeys(cell.split(", "), tuple(map(int, version.split("."))))
    table = (ROOT / "generator/arch.cpp").read_text()
    known = {name: int(number) for name, number in
             re.findall(r'\{"sm_(\w+)", \d+, \d, \w+, (\d+)\}', table)}  # fmt: skip
    assert said.keys() == known.keys() and len(known) == 10
    wgmma = 12040  # of integers; runtime/nvrtc/first_version.cpp
    for name, number in known.items():
        least = max(number, wgmma if name == "90a" else 12010)
        assert said[name] == (least // 1000, least % 1000 // 10), name


def test_the_first_release_has_no_diary():
    """Nobody had an earlier version: nothing was changed or fixed for users."""
    text = (ROOT / "CHANGELOG.md").read_text()
    version = re.search(r"project\(sagebwd VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert re.findall(r"^## (\S+)", text, re.M) == [version[1]]
    assert not re.search(r"^### (Changed|Fixed|Removed|Deprecated)", text, re.M)
    assert len(text.split()) <= 600
    for path in re.findall(r"\]\((?!\w+:)([^)#]+)", text):
        assert (ROOT / path).exists(), path
    assert text.count("\n- ") >= 10
