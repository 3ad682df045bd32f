"""Every block of Python, shell and C++ in README.md and the pages of docs/ runs.

Without a GPU calls on torch tensors are computed by the stand-in for kernels, on the CPU.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import warm_shell
from documents import PAGES, ROOT, blocks, blocks_of

import sagebwd

ALL = blocks()
BINARY = ROOT / "build/bin/sagebwd"
#: A page may lack these libraries; anything else that does not import is an error.
LIBRARIES = {"torch", "jax", "transformers", "diffusers", "cupy", "matplotlib", "pandas", "peft"}


def here(what):
    return sagebwd.doctor()[what]


def skip_unless_it_can_run(block):
    for said in block.said:
        if said.startswith("not run: "):
            pytest.skip(f"{block}: {said}")
        if said == "needs a GPU" and not here("can_run"):
            pytest.skip(f"{block}: {said}")
        if said == "needs NVRTC" and not here("can_compile"):
            pytest.skip(f"{block}: {said}")
        if said == "needs PyTorch":
            pytest.importorskip("torch", reason=f"{block}: {said}")


def of(*languages):
    """Those that start no Python are the same with PyTorch and without."""
    return pytest.mark.parametrize("block", [
        pytest.param(b, marks=pytest.mark.anywhere if b.language == "cpp" or (
            b.language == "sh" and "python" not in b.text and "needs PyTorch" not in b.said)
                     else ()) for b in ALL
        if b.language in languages], ids=str)  # fmt: skip


#: Pages compile these kernels, as `sagebwd build` takes them.
COMPILED = (["--arch", "sm_80", "--head-dim", 64, "--causal", "none,top-left"],
            ["--arch", "sm_90a", "--head-dim", 64])  # fmt: skip


def stock(block, folder, request):
    """Kernels in the block's cache and, as a prebuild that was interrupted leaves them, beside the
    packs that it makes: a block is to run, and that kernels compile is tested elsewhere."""
    if re.search("sagebwd build|prebuild", block.text) and "needs NVRTC" in block.said:
        packs = re.findall(r"prebuild\(?.*?(?:--out |\")([\w.]+pack)", block.text)
        for place in folder / "cache", *(folder / f"{pack}.partial" for pack in packs):
            for words in COMPILED:
                request.getfixturevalue("stocked")(place, *words)
            if place.suffix == ".partial":
                (place / "prebuild.lock").touch()


# ---- Python --------------------------------------------------------------------------------------


class Page:
    """The namespace of a page's Python blocks, which run in order, each once."""

    def __init__(self):
        self.names, self.done = {"__name__": "a page"}, 0

    def run_until(self, last):
        own = [b for b in ALL if b.page == last.page and b.language in ("python", "setup")]
        for block in own[self.done : own.index(last) + 1]:
            if block is last or not block.said:
                text = block.text if here("can_run") else re.sub(r'"cuda"', '"cpu"', block.text)
                exec(compile("\n" * block.line + text, str(ROOT / block.page), "exec"), self.names)
            self.done = own.index(block) + 1  # not where a library is missing: it is for the next


@pytest.fixture(scope="module")
def pages():
    yield {}
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # as a page's program does when it ends


@pytest.fixture
def kernels_or_their_stand_in(request):
    try:
        import stand_in  # noqa: F401
    except pytest.skip.Exception:  # without PyTorch there is nothing to stand in for
        return
    if not here("can_run"):
        request.getfixturevalue("interval_kernels_on_the_cpu")
        request.getfixturevalue("listed_kernels_on_the_cpu")
        request.getfixturevalue("mask_kernels_on_the_cpu")


with contextlib.suppress(pytest.skip.Exception):
    from stand_in import (
        interval_kernels_on_the_cpu,  # noqa: F401
        kernels_on_the_cpu,  # noqa: F401
        listed_kernels_on_the_cpu,  # noqa: F401
        mask_kernels_on_the_cpu,  # noqa: F401
    )


@of("python")
def test_python_blocks_of_pages_run(
    block, pages, kernels_or_their_stand_in, tmp_path, monkeypatch, request
):
    skip_unless_it_can_run(block)
    monkeypatch.chdir(tmp_path)
    stock(block, tmp_path, request)
    try:
        pages.setdefault(block.page, Page()).run_until(block)
    except ImportError as error:  # sagebwd's own, where PyTorch is not, has no name
        if error.name is None and "needs PyTorch" in str(error):
            pytest.skip(f"{block}: {error}")
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        pytest.skip(f"{block}: needs {error.name}")


def test_the_first_block_of_a_page_is_whole():
    """It runs when it is pasted: nothing that readers do not see comes before it."""
    guides = ("bench", "diffusers", "experiments", "jax", "masks", "scores", "sequences", "sparse",
              "transformers", "tuning")  # fmt: skip
    for page in ("index", "migration", *(f"use/{name}" for name in guides)):
        first = next(b for b in ALL if b.page == f"docs/{page}.md"
                     and b.language in ("python", "setup"))  # fmt: skip
        assert first.language == "python" and "import " in first.text, page
        assert " dtype=" not in first.text or page != "use/transformers"  # 4.48 has torch_dtype


# ---- shell and C++ -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One for each page, where its blocks leave files for those behind them."""
    return {}, tmp_path_factory


@of("sh")
def test_shell(block, folders, request):
    skip_unless_it_can_run(block)
    made, factory = folders
    if block.page not in made:
        made[block.page] = factory.mktemp("page")
    if not BINARY.exists():
        pytest.skip(f"{block}: {BINARY} is not built: ./run build")
    stock(block, made[block.page], request)
    environment = {
        **os.environ,
        "PATH": f"{BINARY.parent}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (Path(sagebwd.__file__).parents[1], ROOT))),
        "SAGEBWD_CACHE_DIR": str(made[block.page] / "cache"),
    }
    if "needs PyTorch" in block.said:  # importing it takes longer than what the programs do
        result = warm_shell.run(block.text, cwd=made[block.page], env=environment)
    else:
        result = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text],
                                cwd=made[block.page], env=environment, capture_output=True,
                                text=True, timeout=1200, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


@of("cpp")
def test_cpp_compiles(block, tmp_path):
    skip_unless_it_can_run(block)
    if shutil.which("c++") is None:
        pytest.skip(f"{block}: needs a C++ compiler")
    source = tmp_path / "page.cpp"
    source.write_text(block.text)
    (tmp_path / "sagebwd").symlink_to(ROOT)  # headers are installed into a folder of this name
    subprocess.run(["c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-I", tmp_path,
                    "-I", ROOT, source], check=True)  # fmt: skip


# ---- what pages are made of ----------------------------------------------------------------------

#: Words that newcomers had to read twice, and numbers that begin with a point.
HARD = re.compile(
    r"\b(but (for|under|on)|anew|lest|heeds?|hand(ed|s)? in|which binds|apart)\b|(?<![\w.])\.\d"
)
#: Words of the project's own history, which users do not know.
HISTORY = re.compile(r"\bnumerics 1\b|--plans?\b|\bcompare_plans\b|\bPlanFigures\b")
#: Folders and files whose comments and docstrings are tested.
COMMENTED = ("generator", "runtime", "cache", "templates", "python", "tools", "c", "bench",
             "examples", "experiments", "hub", "run", "tests/drawn")  # fmt: skip


def prose(text):
    """A page without code, and without comments that readers do not see."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL)


def hard_words_in(text, *patterns):
    return [m[0] for pattern in patterns for m in pattern.finditer(prose(text))]


@pytest.mark.anywhere
def test_pages_for_users_have_plain_words():
    for page in PAGES:
        found = hard_words_in(page.read_text(), HARD) + HISTORY.findall(page.read_text())
        assert not found, f"{page.relative_to(ROOT)}: {found}"


def test_help_of_the_command_line_has_plain_words():
    if not BINARY.exists():
        pytest.skip(f"{BINARY} is not built: ./run build")
    waiting, seen = [()], 0
    while waiting:
        command = waiting.pop()
        text = subprocess.run([BINARY, *command, "--help"], capture_output=True, text=True,
                              check=True).stdout  # fmt: skip
        found = hard_words_in(text, HARD, HISTORY)
        assert not found, f"sagebwd {' '.join(command)}: {found}"
        seen += 1
        if not command or command == ("cache",):
            waiting += [tuple(name.split()) for name in
                        re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", text, re.M)]  # fmt: skip
    assert seen >= 17


@pytest.mark.parametrize("command", ["corpus", "train", "study", "capture", "errors", "lora",
                                     "warning", "sparse_video"])
def test_help_of_the_experiments_has_plain_words(command, capsys):
    pytest.importorskip("torch", reason="needs PyTorch")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"experiments.{command}").main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--out" in text
    assert not hard_words_in(text, HARD)


def words_of(path):
    """Comments and docstrings of a source, and the messages and help texts of Python's."""
    text = path.read_text()
    if path.suffix in (".cpp", ".h", ".cuh"):
        strings = r'"(?:[^"\\\n]|\\.)*"'
        found = re.findall(rf"{strings}|(//[^\n]*|/\*.*?\*/)", text, re.DOTALL)
        return "\n".join(filter(None, found))
    if path.suffix == ".py":
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        comments = [t.string for t in tokens if t.type == tokenize.COMMENT]
        nodes = [n.body[0].value.value for n in ast.walk(ast.parse(text))
                 if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
                 and ast.get_docstring(n)]  # fmt: skip
        return "\n".join(comments + nodes)
    return "\n".join(re.findall(r"(?:^|\s)(#.*)", text))


def sources():
    named = [ROOT / name for name in COMMENTED]
    files = [p for n in named for p in (sorted(n.rglob("*")) if n.is_dir() else [n])]
    return [p for p in files if p.suffix in (".py", ".cpp", ".cuh", ".h", ".sh", "") and p.is_file()
            and "__pycache__" not in p.parts]  # fmt: skip


@pytest.mark.anywhere
def test_comments_and_docstrings_have_plain_words():
    assert len(sources()) > 120
    for path in sources():
        found = hard_words_in(words_of(path), HARD)
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_help_of_options_has_plain_words():
    helps = [f.metadata["help"] for f in dataclasses.fields(sagebwd.core.options.Operation)]
    assert len(helps) > 12 and not hard_words_in("\n".join(helps), HARD, HISTORY)


def test_words_of_history_are_found():
    for text in ("as in numerics 1", "sagebwd tune --plans", "trace --plan=none", "compare_plans()"):
        assert HISTORY.search(text), text


@pytest.mark.anywhere
def test_words_of_sources_are_found(tmp_path):
    python, cpp = tmp_path / "a.py", tmp_path / "a.cpp"
    python.write_text('"""Says lest."""\nx = "anew"  # all but for one\n')
    cpp.write_text('const char* x = "anew // lest"; // made anew\n/* apart */\n')
    assert hard_words_in(words_of(python), HARD) == ["but for", "lest"]
    assert hard_words_in(words_of(cpp), HARD) == ["anew", "apart"]


@pytest.mark.parametrize("text", ["all but for one", "an error of .84", "compiled anew, `once`"])
def test_hard_words_are_found(text):
    assert HARD.search(prose(text))


def test_code_and_numbers_are_not_hard_words():
    assert not HARD.search(prose("0.84, 1.5, but one; `anew`\n```sh\nls .5 anew\n```\n"))


def test_every_block_names_a_language_that_runs_or_is_output():
    known = {"python", "setup", "sh", "cpp", "text", "cmake"}
    assert {b.language for b in ALL} <= known
    assert {"python", "sh", "cpp"} <= {b.language for b in ALL}


def test_what_is_said_of_a_block_is_known_and_belongs_to_one():
    for block in ALL:
        for said in block.said:
            assert said.startswith("not run: ") or said in (
                "needs a GPU", "needs NVRTC", "needs PyTorch"), f"{block}: {said}"  # fmt: skip
    for page in {b.page for b in ALL}:
        comments = len(re.findall(r"^<!-- (not run|needs)", (ROOT / page).read_text(), re.M))
        assert comments == sum(len(b.said) for b in ALL if b.page == page), page


def test_blocks_are_found_as_pages_have_them():
    text = "# A\n\n<!-- needs a GPU -->\n```sh\nls\n```\n\n"
    text += "<!-- setup\nx = 1\n-->\n```python\nx\n```\n"
    found = blocks_of("a.md", text)
    assert [(b.language, b.text, b.said, b.line) for b in found] == [
        ("sh", "ls\n", ("needs a GPU",), 4), ("setup", "x = 1\n", (), 8),
        ("python", "x\n", (), 11)]  # fmt: skip


def tables_of_arguments():
    text = (ROOT / "docs/migration.md").read_text()
    found = re.findall(r"^<!-- arguments: (.+) -->\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(found) == 4
    return {functions: re.findall(r"`(\w+)`", " ".join(
        row.split("|")[1] for row in rows.splitlines())) for functions, rows in found}  # fmt: skip


def test_migration_lists_every_argument_of_a_drop_in():
    listing = Path(sagebwd.__file__).with_suffix(".pyi").read_text()
    for functions, listed in tables_of_arguments().items():
        taken = []
        for function in functions.split():
            body = re.search(rf"^def {function}\((.*?)\) ->", listing, re.M | re.S)[1]
            taken += re.findall(r"^ +(\w+):", body, re.M)
        assert sorted(set(taken)) == sorted(listed), functions


def test_the_reference_has_every_public_name():
    pages = "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md"))
    for name in sagebwd.__all__:
        if name not in ("INPUTS", "PRODUCTS", "arrays", "reference"):
            assert re.search(rf"(::: sagebwd\.(_doctor\.)?|`sagebwd\.){name}\b", pages), name


def test_pages_of_docstrings_say_how_to_read_them():
    pages = [p.read_text() for p in (ROOT / "docs/reference").glob("*.md")]
    generated = [text.partition("\n:::")[0] for text in pages if "\n:::" in text]
    assert len(generated) == 6 and sum("`./run docs`" in head for head in generated) == 1
    for head in generated:  # docs/_site/hooks.py leaves that paragraph out
        said = head.partition("\n<!-- in the repository alone -->\n")[2].partition("\n\n")[0]
        assert "`./run docs`" in said or "[Python](python.md)" in said


def test_the_tables_of_errors_say_what_they_are():
    text = (ROOT / "docs/reference/python.md").read_text()
    for name, base in re.findall(r"^\| `sagebwd\.(\w+)` \| `(\w+)` \|", text, re.M):
        assert getattr(sagebwd, name).__bases__[0].__name__ == base, name


def test_the_address_of_the_repository_is_filled_in_at_one_place():
    spec = importlib.util.spec_from_file_location("repository", ROOT / "docs/_site/repository.py")
    spec.loader.exec_module(repository := importlib.util.module_from_spec(spec))
    text = (ROOT / "pyproject.toml").read_text()
    filled = re.sub(r"^# (?=\[project\.urls\]|Repository)", "", text, flags=re.M)
    assert repository.address(filled) == "https://..." and "[project.urls]\nRepository" in filled
    cited = re.search(r"^repository-code: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert (cited and cited[1]) == repository.address()


def test_pages_link_to_what_there_is():
    """Files; the site's own build checks headings as well."""
    generated = {"docs/reference/command-line.md"}
    ran = "../../actions/workflows/"  # from README, on GitHub; a test of the front page looks there
    for page in {b.page for b in ALL}:
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", (ROOT / page).read_text()):
            path = os.path.relpath(folder / target, ROOT)
            assert ((ROOT / path).exists() or path in generated
                    or (page == "README.md" and target.startswith(ran))), f"{page}: {target}"
