"""Says what this machine has for sagebwd, and what it lacks."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys

from sagebwd import _core

#: Packages that call attention, or are called with it; reports name those that are installed.
_PACKAGES = ("transformers", "diffusers", "peft", "accelerate", "jax", "flash-attn", "flash-attn-4",
             "triton", "numpy")  # fmt: skip


def doctor():
    """A dict of everything that the library depends on, for people and for bug reports.

    It holds what `sagebwd doctor --json` prints, the system, this Python, its PyTorch and, as
    `beside`, versions of packages that are used with it. `missing` lists what is absent or
    unusable, what needs it, and the remedy. A missing component raises no error.
    """
    return json.loads(_diagnose()[0])


def _diagnose():
    """The report as JSON and as text, and whether everything that is configured can be used."""
    torch, missing = _torch()
    parts = [("system", _system()), ("python", f"{platform.python_version()} at {sys.executable}"),
             ("torch", torch), ("beside", _packages())]  # fmt: skip
    return _core.diagnose(parts, missing)


def _system():
    """The distribution, its C library and the kernel."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {' '.join(platform.libc_ver()) or 'another libc'}, kernel {platform.release()}"


def _packages():
    """Names and versions, without importing any of them."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none of " + ", ".join(_PACKAGES)


def _torch():
    """Which PyTorch is installed, and what it lacks."""
    use = "sagebwd.attention on torch tensors"
    if importlib.util.find_spec("torch") is None:
        return "not installed", [("PyTorch", use, "pip install torch")]
    try:
        import torch
    except Exception as error:  # a broken install must not break the report about it
        return f"does not import: {error}", [("a PyTorch that imports", use, "install it again")]
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available() or _core.driver()["missing"]:
        return text, []
    what = "a PyTorch that sees this machine's GPU"
    return text, [(what, use, "install a PyTorch for CUDA: https://pytorch.org/get-started")]


def main(arguments=None, prog="python -m sagebwd.doctor"):
    """`python -m sagebwd doctor [--json]`; exits with 1 where `sagebwd doctor` does."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(arguments).json
    in_json, text, sound = _diagnose()
    print(in_json if as_json else text.rstrip("\n"))
    return 0 if sound else 1
