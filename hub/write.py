"""Writes sagebwd as a kernel for the Hugging Face Hub: python hub/write.py LIBRARY FOLDER.

LIBRARY is what the target sagebwd_hub builds. FOLDER, which is emptied first, gets build/<variant>/
with the package, the library and metadata.json, for CUDA 12 and 13 (docs/use/hub.md). A library
that asks for more than manylinux_2_28 has is refused.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAME = "sagebwd"
#: The Hub's number of the interface; by its convention 0 is one that may still change.
VERSION = 0
#: Nothing of PyTorch's C++ is linked, so that one build serves its versions from this on. NVRTC has
#: to be of 12.8 or newer, and 2.7 is the first PyTorch that brings such a one.
VARIANTS = ("torch-stable-abi27-cu128-x86_64-linux", "torch-stable-abi27-cu130-x86_64-linux")
#: The newest versions of symbols that manylinux_2_28 allows.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
#: The Hub asks for a folder of the kernel's name, which older versions of `kernels` import.
OLDER = '''"""What older versions of `kernels` import: the package in the folder above."""

import os

__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
'''
#: Libraries that every such system has.
BARE = re.compile(r"(libc|libm|libdl|libpthread|libgcc_s|ld-linux-x86-64)\.so\.\d+")


def read_elf(option, library):
    done = subprocess.run(["readelf", "-W", option, library], capture_output=True, text=True,
                          check=True)  # fmt: skip
    return done.stdout


def too_new(library):
    """The symbols and libraries that it needs and that manylinux_2_28 lacks."""
    found = []
    for symbol, family, version in re.findall(r"\bUND (\S+)@(\w+?)_([\d.]+)",
                                              read_elf("--dyn-syms", library)):  # fmt: skip
        if tuple(map(int, version.split("."))) > NEWEST.get(family, ()):
            found.append(f"{symbol} of {family}_{version}")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read_elf("--dynamic", library))
    return found + [name for name in needed if not BARE.fullmatch(name)]


def architectures():
    """Compute capabilities as the Hub writes them."""
    rows = re.findall(r'\{"sm_(\d+?)(\d)(a?)", \d+, \d,', (ROOT / "generator/arch.cpp").read_text())
    return [f"{major}.{minor}{suffix}" for major, minor, suffix in rows]


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix():
            base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in files}  # fmt: skip


def write_variant(folder, library):
    """One build variant. Its id is made of what is in it: two builds in a process do not meet."""
    folder.mkdir(parents=True)
    shutil.copy(library, folder / "libsagebwd.so")
    for path in sorted((HERE / "package").glob("*.py")):
        shutil.copy(path, folder)
    (folder / NAME).mkdir()
    code = (folder / "__init__.py").read_text()
    (folder / NAME / "__init__.py").write_text(OLDER + code[code.index("\nfrom .") :])
    contents = hashlib.sha256(json.dumps(digests(folder)).encode()).hexdigest()
    identity = f"_{NAME}_cuda_{contents[:10]}"
    (folder / "_build.py").write_text(
        f'"""Written by hub/write.py."""\n\nNAMESPACE = "{identity}"\n')  # fmt: skip
    metadata = {
        "name": NAME, "id": identity, "version": VERSION, "license": "apache-2.0",
        "python-depends": [], "backend": {"type": "cuda", "archs": architectures()},
        "digest": {"algorithm": "sha256", "files": digests(folder)},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main(library, folder):
    missing = too_new(library)
    if missing:
        sys.exit(f"{library} needs what manylinux_2_28 has not: {', '.join(missing)}. Bind "
                 "functions of glibc to older versions in hub/old_glibc.c")  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    for variant in VARIANTS:
        write_variant(folder / "build" / variant, library)
        print(folder / "build" / variant)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
