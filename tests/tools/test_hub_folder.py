"""hub/write.py: the folder that it writes is what the Hub asks for, and says what C's header says.

Loading and computing are tested in tests/simulated_python/test_hub_kernel.py.
"""

import ast
import base64
import ctypes
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import BINARY, ROOT

WRITE = ROOT / "hub/write.py"
BUILD = BINARY.parents[1]
LIBRARY = BUILD / "hub-library/libsagebwd.so"


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(library, folder):
    return subprocess.run([sys.executable, WRITE, library, folder], capture_output=True, text=True,
                          check=False)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    if not LIBRARY.exists() or shutil.which("readelf") is None:
        pytest.skip("needs the target sagebwd_hub, and readelf")
    folder = tmp_path_factory.mktemp("hub")
    done = run(LIBRARY, folder)
    assert done.returncode == 0, done.stderr
    return sorted((folder / "build").iterdir())


def test_there_is_a_variant_for_each_cuda(written):
    form = r"torch-stable-abi\d\d-cu(12\d|13\d)-x86_64-linux"
    assert [path.name for path in written] == [*module_of(WRITE).VARIANTS]
    assert [re.fullmatch(form, path.name)[1] for path in written] == ["128", "130"]


def test_metadata_has_what_is_required(written):
    for path in written:
        metadata = json.loads((path / "metadata.json").read_text())
        assert metadata["name"] == "sagebwd" and metadata["id"].isidentifier()
        assert isinstance(metadata["version"], int) and metadata["license"] == "apache-2.0"
        assert metadata["python-depends"] == [] and metadata["backend"]["type"] == "cuda"
        assert f'"{metadata["id"]}"' in (path / "_build.py").read_text()  # torch.ops.<id>
        files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert {"__init__.py", "sagebwd/__init__.py", "libsagebwd.so"} < files
        digests = metadata["digest"]["files"]
        assert {*digests, "metadata.json"} == files
        for name, digest in digests.items():
            found = hashlib.sha256((path / name).read_bytes()).digest()
            assert base64.b64decode(digest) == found


def test_other_contents_have_another_name(written, tmp_path):
    """Two versions in one process then register other operators."""
    write = module_of(WRITE)
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        write.write_variant(tmp_path / "build" / name, tmp_path / name)
    names = {json.loads(path.read_text())["id"] for path in tmp_path.rglob("metadata.json")}
    assert len(names) == 2


def test_architectures_are_those_that_are_promised():
    said = re.search(r"Ampere and newer: sm_(.*?)\. ", (ROOT / "docs/supported.md").read_text())[1]
    found = [arch.replace(".", "") for arch in module_of(WRITE).architectures()]
    assert found == said.split(", ")


def test_the_library_fits_manylinux_and_shows_c_functions_alone(written):
    write = module_of(WRITE)
    header = (ROOT / "c/sagebwd.h").read_text()
    declared = set(re.findall(r"^\w[\w *]* (sagebwd_\w+)\(", header, re.M))
    for path in written:
        assert not write.too_new(path / "libsagebwd.so")
        symbols = write.read_elf("--dyn-syms", path / "libsagebwd.so")
        shown = {line.split()[7] for line in symbols.splitlines()
                 if " GLOBAL " in line and " UND " not in line}  # fmt: skip
        assert shown == declared
        assert not re.search(r" UND _?Py", symbols)  # any Python loads it


def test_another_library_is_refused(written, tmp_path):
    """That for C++ programs here asks for the glibc and libstdc++ that it was linked with."""
    done = run(BUILD / "libsagebwd.so", tmp_path)
    assert done.returncode == 1 and "libstdc++.so.6" in done.stderr
    assert "manylinux_2_28" in done.stderr and not [*tmp_path.iterdir()]


def test_use():
    assert "LIBRARY FOLDER" in subprocess.run([sys.executable, WRITE], capture_output=True,
                                              text=True, check=False).stderr  # fmt: skip


def test_older_versions_of_kernels_find_the_package(written):
    """They import the folder of the kernel's name, which gives what the one above it gives."""
    above, below = (ast.parse((written[0] / name).read_text())
                    for name in ("__init__.py", "sagebwd/__init__.py"))  # fmt: skip
    imports = [ast.unparse(node) for node in above.body if isinstance(node, ast.ImportFrom)]
    assert imports and imports == [ast.unparse(node) for node in below.body
                                   if isinstance(node, ast.ImportFrom)]  # fmt: skip


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def test_the_package_imports_what_the_hub_allows():
    """The standard library, PyTorch and itself; in the syntax of Python 3.9."""
    files = sorted((ROOT / "hub/package").glob("*.py"))
    names = {name for path in files for name in imported(path)}
    assert len(files) > 4 and "torch" in names
    assert names - {"torch"} <= set(sys.stdlib_module_names)


STRUCTS = {"Problem": "problem", "Tensor": "tensor", "Packing": "packing", "Lists": "lists",
           "Intervals": "intervals", "Table": "table", "Shares": "shares",
           "Forward": "forward_args", "Backward": "backward_args"}  # fmt: skip


def test_structs_are_those_of_the_header(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    native = module_of(ROOT / "hub/package/_native.py")
    lines, expected = [], []
    for name, of in STRUCTS.items():
        struct = getattr(native, name)
        lines.append(f"sizeof(sagebwd_{of})")
        expected.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f"offsetof(sagebwd_{of}, {field})")
            expected.append(getattr(struct, field).offset)
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    prints = "".join(f'printf("%zu\\n", {line});\n' for line in lines)
    source.write_text(f'#include "sagebwd.h"\n#include <stdio.h>\nint main(void) {{\n{prints}}}\n')
    subprocess.run(["cc", f"-I{ROOT / 'c'}", source, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    found = dict(zip(lines, map(int, said)))
    assert found == dict(zip(lines, expected))
    assert native.TABLES == 8 and Path(native.__file__).parent == ROOT / "hub/package"
