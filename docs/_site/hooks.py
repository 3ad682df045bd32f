"""mkdocs: pages that are of the repository or of the command line, figures, and links.

The site shows what is written elsewhere from there: REPOSITORY's files are pages of the site as
they are, `sagebwd COMMAND --help` makes the page of the command line, and pictures of figures.py
become SVG.
"""

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

import figures  # noqa: E402
import repository  # noqa: E402

#: Files of the repository that are pages of the site.
REPOSITORY = {
    "STRUCTURE.md": "inside/structure.md",
    "templates/kernels/README.md": "inside/kernels.md",
    "templates/kernels/MEASURED.md": "inside/measured.md",
    "templates/kernels/LISTS.md": "inside/lists.md",
    "tests/simulator/README.md": "inside/simulator.md",
    "tests/drawn/README.md": "inside/drawn.md",
    "tests/trainers/README.md": "inside/trainers.md",
    "bench/README.md": "inside/records.md",
    "CHANGELOG.md": "inside/changes.md",
    "CONTRIBUTING.md": "inside/contributing.md",
    "SECURITY.md": "inside/security.md",
}
PAGES = {site: path for path, site in REPOSITORY.items()}
COMMAND_LINE = "reference/command-line.md"
FIGURE = re.compile(r"^!\[([^\]]*)\]\((?:\.\./)+bench/results/figures/(\w+)\.png\)$", re.MULTILINE)
#: Paragraphs for who reads a page in the repository, where there are no docstrings.
ELSEWHERE = re.compile(r"^<!-- in the repository alone -->\n(?:.+\n)+\n", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config):
    config.repo_url = repository.address()
    version = re.search(r"project\(sagebwd VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    config.site_name = f"sagebwd {version}"  # every page shows it
    config.copyright = "Apache-2.0"
    return config


def on_files(files, config):
    for path, site in REPOSITORY.items():
        files.append(File.generated(config, site, content=(ROOT / path).read_text()))
    for picture in sorted((ROOT / "bench/results").glob("*.png")):
        files.append(File.generated(config, f"pictures/{picture.name}",
                                    abs_src_path=str(picture)))  # fmt: skip
    worker = ROOT / "docs/_site/frame-worker.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(worker)))
    files.append(File.generated(config, COMMAND_LINE, content=command_line()))
    return files


def on_page_markdown(markdown, page, files, **_):
    site = page.file.src_uri
    here = PAGES.get(site, f"docs/{site}")

    def linked(found):
        bang, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return found[0]
        target = place_on_site(posixpath.normpath(posixpath.join(posixpath.dirname(here), path)))
        if target is None:  # a source: who has the repository finds it by this name
            return text if text.startswith("`") else f"`{text}`"
        relative = posixpath.relpath(target, posixpath.dirname(site) or ".")
        return f"{bang}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    markdown = FIGURE.sub(lambda f: figures.svg(f[2], f[1]), ELSEWHERE.sub("", markdown))
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(x if x.startswith("```") else LINK.sub(linked, x) for x in parts)


def place_on_site(path):
    """The page or picture of a file of the repository; None: the site has none."""
    if not (ROOT / path).exists() and path != f"docs/{COMMAND_LINE}":
        raise SystemExit(f"docs: a link leads to {path}, which there is not")
    if (ROOT / path / "README.md").exists():
        path += "/README.md"
    if path == "README.md":
        return "index.md"
    if path.startswith("bench/results/") and path.endswith(".png"):
        return f"pictures/{posixpath.basename(path)}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return REPOSITORY.get(path)


# ---- the command line ----------------------------------------------------------------------------


def command_line():
    text = (ROOT / "docs/_site/command-line.md").read_text()
    return text + "".join(section(name, 2) for name in listed(help_of()))


def section(name, level):
    """A command's help, and those of its subcommands."""
    text = help_of(*name.split())
    title, _, body = text.partition("\n")
    has_subcommands = f"'sagebwd {name} COMMAND --help'" in text
    below = "".join(section(sub, level + 1) for sub in listed(text)) if has_subcommands else ""
    summary = title.partition(" - ")[2]
    return (f"\n{'#' * level} sagebwd {name}\n\n{summary[:1].upper()}{summary[1:]}.\n\n"
            f"```text\n{body.strip()}\n```\n{below}")  # fmt: skip


def help_of(*command):
    program = os.environ.get("SAGEBWD_BIN", ROOT / "build/bin/sagebwd")
    return subprocess.run([program, *command, "--help"], check=True, text=True,
                          capture_output=True).stdout  # fmt: skip


def listed(text):
    """The commands that a help names."""
    return re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", text, re.MULTILINE)
