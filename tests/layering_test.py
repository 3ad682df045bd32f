"""Who may include whom. The layers are in CONTRIBUTING.md."""

import ast
import importlib.util
import re
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder -> the folders whose headers its files may include.
ALLOWED = {
    "templates": {"templates"},
    "generator": {"generator", "templates"},  # of templates/ layouts/ alone
    "cache": {"cache"},
    "runtime": {"generator", "cache", "runtime"},
    "tools": {"generator", "cache", "runtime", "tools"},
    "c": {"c", "generator", "cache", "runtime"},
    "examples": {"generator", "cache", "runtime"},
}
SUFFIXES = {".h", ".c", ".cpp", ".cuh", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# Headers of third parties that no header of ours may mention: LLVM's, CUDA's.
FOREIGN = re.compile(r"^(llvm|llvm-c|clang|mlir)/|^(cuda|nvrtc|mma|cublas|cooperative_groups)")
# Headers for .cpp files, which are not installed: some wrap LLVM, one has layouts of shared memory.
# Nothing public includes them.
INTERNAL = {"cache/untrusted.h", "cache/bounded_json.h", "generator/kernels/attention.h"}


def sources(folder):
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)


def includes(path):
    return INCLUDE.findall(path.read_text())


def folder_of(included):
    """Our folder that an include names, or None for a system or third-party header."""
    included = included.removeprefix("sagebwd/")  # as other projects include them
    top = included.split("/", 1)[0]
    return top if "/" in included and (ROOT / top).is_dir() else None


def public_headers():
    folders = ("generator", "cache", "runtime")
    headers = [h for folder in folders for h in sources(folder) if h.suffix == ".h"]
    return [h for h in headers if h.relative_to(ROOT).as_posix() not in INTERNAL]


def test_sources_of_the_python_module_share_its_casters():
    """Without the caster of a type, a source that is compiled alone binds it in another way."""
    bindings = sorted((ROOT / "python").glob("module_*.cpp"))
    assert len(bindings) > 5
    alone = [path.name for path in bindings
             if "jax" not in path.name and "python/module.h" not in includes(path)]  # fmt: skip
    assert not alone
    assert "python/module_problem.h" in includes(ROOT / "python/module.h")


def test_the_generator_reads_neither_files_nor_the_environment():
    outside = {"cstdlib", "filesystem", "fstream", "iostream", "thread"}
    wrong = [f"{path.relative_to(ROOT)} includes <{included}>" for path in sources("generator")
             for included in includes(path) if included in outside]
    assert not wrong, "\n".join(wrong)


def test_the_generator_includes_only_layouts_of_the_templates():
    """In layouts/ both read the same text; the rest of templates/ is device code."""
    included = {name for path in sources("generator") for name in includes(path)}
    inside = {name for name in included if (ROOT / "templates" / name).is_file()}
    of_templates = inside | {name for name in included if folder_of(name) == "templates"}
    assert len(of_templates) > 5
    assert not {name for name in of_templates if not name.startswith("templates/layouts/")}


def test_layouts_are_plain_cpp():
    device = re.compile(r"\b(__\w+|asm|threadIdx|blockIdx|[us]\d+)\b")
    for path in sources("templates/layouts"):
        text = path.read_text()
        assert not device.findall(text), path
        assert all(included.startswith("layouts/") for included in includes(path)), path


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_includes_only_what_it_may(folder):
    wrong = []
    for path in sources(folder):
        for included in includes(path):
            target = folder_of(included)
            # A template includes its neighbours by their path inside templates/.
            if folder == "templates" and (ROOT / "templates" / included).is_file():
                target = "templates"
            if target is not None and target not in ALLOWED[folder]:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_every_layer_has_sources():
    """The rules above hold for something."""
    empty = [folder for folder in ALLOWED if not sources(folder)]
    assert not empty


WRITTEN_BY_THE_GENERATOR = ("configuration.cuh", "mask_expression.cuh", "mask_ranges.cuh",
                            "score_expression.cuh")  # fmt: skip


def test_templates_include_nothing_foreign():
    wrong = [
        f"{path.relative_to(ROOT)} includes {included}"
        for path in sources("templates")
        for included in includes(path)
        if included not in WRITTEN_BY_THE_GENERATOR
        and not (ROOT / "templates" / included).is_file()
    ]
    assert not wrong, "\n".join(wrong)


def test_simulated_kernels_include_nothing_of_cpps_library():
    """What a kernel includes is parsed once for each of 1,500: <atomic> and <thread> took .2 s."""
    folder = ROOT / "tests/simulator"
    seen = [folder / "lane.h", folder / "prelude.h", *sorted((folder / "ptx").iterdir())]
    wrong = [f"{path.name} includes {included}" for path in seen for included in includes(path)
             if not (folder / included).is_file()]  # fmt: skip
    assert len(seen) > 10 and not wrong, "\n".join(wrong)


def test_public_headers_mention_neither_llvm_nor_cuda():
    wrong = []
    for path in public_headers():
        for included in includes(path):
            of_templates = folder_of(included) == "templates"
            if FOREIGN.search(included) or included in INTERNAL or of_templates:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_generator_reads_no_clock_and_opens_no_library():
    """The same spec gives the same bytes: a pure function has no use for these."""
    banned = {"chrono", "ctime", "time.h", "random", "dlfcn.h", "thread", "unistd.h"}
    wrong = [
        f"{path.relative_to(ROOT)} includes {included}"
        for path in sources("generator")
        for included in includes(path)
        if included in banned
    ]
    assert not wrong, "\n".join(wrong)


# ---- rooms of the Python package ----------------------------------------------------------------

PACKAGE = ROOT / "python/sagebwd"
_BELOW = {"core", "lists", "numerics"}
#: Room -> the rooms that its files may import, beside their own and the extension module. Files of
#: no folder, such as __init__.py, join the rooms: they may import all, and no room imports them.
ROOMS = {
    "core": set(), "lists": {"core"}, "masks": {"core"}, "numerics": {"core", "lists"},
    "sla": _BELOW,
    "nn": {*_BELOW, "sla"}, "distributed": _BELOW, "monitoring": _BELOW,
    "integrations": {*_BELOW, "masks"}, "benchmark": {*_BELOW, "masks"},
}  # fmt: skip


def modules():
    """The package's modules by their names inside it, '' for the package itself."""
    paths = {path.relative_to(PACKAGE).with_suffix("").parts: path
             for path in PACKAGE.rglob("*.py")}  # fmt: skip
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
            for parts, path in paths.items()}  # fmt: skip


def imported_by(name, path, known):
    """The modules of the package that a file imports anywhere, also by import_module(name)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            within = f"sagebwd.{name if path.name == '__init__.py' else name.rpartition('.')[0]}"
            base = resolve_name("." * node.level + (node.module or ""), within.strip("."))
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            found |= {given.value for given in node.args if isinstance(given, ast.Constant)}
    inside = {full.removeprefix("sagebwd").lstrip(".") for full in map(str, found)
              if full.split(".")[0] == "sagebwd"}  # fmt: skip
    inside = {one for one in inside if one.split(".")[0] != "_core"}
    return {one if one in known else one.rpartition(".")[0] for one in inside}


def room_of(module):
    top = module.split(".")[0]
    return top if (PACKAGE / top).is_dir() and top else ""


def upward_imports():
    known = modules()
    for module, path in known.items():
        room = room_of(module)
        for other in imported_by(module, path, known):
            target = room_of(other)
            if room and target not in {room, *ROOMS[room]}:
                yield f"{module} -> {other or 'sagebwd'}"


def test_rooms_of_the_python_package_import_only_what_lies_below():
    rooms = {room_of(module) for module in modules()}
    assert rooms - {""} == ROOMS.keys()
    assert not list(upward_imports())


def test_scripts_stand_on_the_package_and_never_under_it():
    """Files of bench/ and tests/drawn/ import each other by their names alone, so no two share one.
    bench/all.py starts the drawn cases as it starts other tests, and imports none of them."""
    bench, drawn = ({path.stem for path in (ROOT / folder).glob("*.py")}
                    for folder in ("bench", "tests/drawn"))  # fmt: skip
    assert len(bench) > 30 and len(drawn) > 10 and not bench & drawn
    for above, paths in ((bench | drawn, PACKAGE.rglob("*.py")),
                         (drawn, (ROOT / "bench").glob("*.py"))):  # fmt: skip
        for path in paths:
            found = {alias.name for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.Import) for alias in node.names}  # fmt: skip
            found |= {node.module for node in ast.walk(ast.parse(path.read_text()))
                      if isinstance(node, ast.ImportFrom) and not node.level}  # fmt: skip
            assert not found & above, path.relative_to(ROOT)


def test_the_python_package_imports_neither_experiments_nor_tests():
    imported = {(path.name, name) for path in PACKAGE.rglob("*.py") for name in
                re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert len(imported) > 100
    assert not [pair for pair in imported if pair[1] in ("experiments", "tests")]


def test_imports_of_the_python_package_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "ring.py"
    path.write_text("import sagebwd.sla, math\nfrom sagebwd import Spec, _core\n"
                    "def f():\n    from sagebwd.core import options\n    from .heads import g\n"
                    "    import_module('sagebwd.nn')\n")  # fmt: skip
    known = {"", "sla", "core", "core.options", "distributed.heads", "nn"}
    assert imported_by("distributed.ring", path, known) == known - {"core"}


# ---- what is compiled as one ---------------------------------------------------------------------

ANONYMOUS = re.compile(r"^namespace \{\n(.*?)^\} // namespace$", re.MULTILINE | re.DOTALL)
#: A function that begins a line: `std::string name(`, `template <class T> void name(`.
FUNCTION = re.compile(r"^(?![ /}#)]|using|namespace)[^=\n]*?[\s&*](\w*[a-z]\w*)\(", re.MULTILINE)
#: The sources of a target that ./run compiles several at a time.
TARGETS = ["generator", "cache", "runtime", "tools", *(f"tests/{t}" for t in (
    "generator", "templates", "cache", "runtime", "gpu"))]  # fmt: skip


def own_functions(text):
    return {name for body in ANONYMOUS.findall(text) for name in FUNCTION.findall(body)}


@pytest.mark.parametrize("target", TARGETS)
def test_functions_of_one_source_are_unlike_those_of_another(target):
    """Overloads of two sources would be one set where both are compiled as one, and a call would
    take another function there, without an error."""
    owners = {}
    for path in (ROOT / target).rglob("*.cpp"):
        if path.parent != ROOT / "generator/kernels":  # each is compiled on its own
            for name in own_functions(path.read_text()):
                owners.setdefault(name, []).append(path.name)
    assert len(owners) > 10
    namesakes = {name: files for name, files in owners.items() if len(files) > 1}
    assert not namesakes


def test_own_functions():
    text = """
void shown();
namespace {

template <class T> std::vector<T> first(int x) {
  return second(x);
}
constexpr int kThird = fourth(1);
std::string& fifth(
    int x) {}
} // namespace
"""
    assert own_functions(text) == {"first", "fifth"}


# ---- STRUCTURE.md -------------------------------------------------------------------------------


def test_files_that_structure_names_are_there():
    named = set(re.findall(r"`([\w./-]+\.(?:c|cpp|cuh|h|md|py|sh|toml|txt|cmake))`",
                           (ROOT / "STRUCTURE.md").read_text()))  # fmt: skip
    folders = ("", "bench", "c", "cmake", *ALLOWED, "experiments", "hub", "python", "tests", "docs")
    paths = [f"/{path.relative_to(ROOT)}" for folder in folders
             for path in ((ROOT / folder).rglob("*") if folder else ROOT.glob("*"))]  # fmt: skip
    assert len(named) > 100
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]


# ---- what `pytest` reads ------------------------------------------------------------------------


def test_files_of_tests_have_one_name_each():
    """pytest imports them by their base names, and ends where two are the same."""
    config = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^testpaths = \[(.*)\]$", config, re.MULTILINE)
    folders = [ROOT / path for path in re.findall(r'"([^"]+)"', listed)]
    names = [path.name for folder in folders for path in folder.rglob("test_*.py")]
    assert len(names) > 50
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('#include "runtime/kernels.h"', ["runtime/kernels.h"]),
        ("  #  include <llvm/Support/JSON.h>", ["llvm/Support/JSON.h"]),
        ('// #include "a.h"', []),
    ],
)
def test_include_pattern(line, found):
    assert INCLUDE.findall(line) == found


def test_every_mutant_is_found_once():
    """tests/mutants names faults by the texts that they replace."""
    spec = importlib.util.spec_from_file_location("table", ROOT / "tests/mutants/table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert len(table.MUTANTS) > 40
    for file, text, _ in table.MUTANTS:
        assert (ROOT / file).read_text().count(text) == 1, f"{file}: {text}"
