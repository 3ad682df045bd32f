"""Says where a figure comes from: the tree, the GPU, the libraries, the command, the date.

Records name files, never folders: they are committed, and paths of a machine are nobody's business.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from sagebwd.benchmark.common import torch

#: A built package or a result depends on these; recorded results are left out on purpose.
SOURCE_FOLDERS = ("generator", "templates", "cache", "runtime", "tools", "python", "experiments",
                  "tests", "bench")  # fmt: skip
SOURCE_SUFFIXES = (".cpp", ".h", ".cuh", ".cu", ".py", ".txt", ".cmake", ".toml")


def environment() -> dict:
    """Everything that identifies a run, as JSON."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "python": platform.python_version(),
        "torch": torch and torch.__version__,
        "torch_cuda": torch and torch.version.cuda,
        "cpus": os.cpu_count(),
        **gpu(),
        **tree(),
    }


def command() -> str:
    """The command line, to run once more in the folder of the files that it names: every path is
    cut to its last part."""
    given = sys.argv[1:]
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(given)]  # what Python itself is given
    program = before if "-m" in before else sys.argv[:1]
    words = [Path(sys.executable).name, *program, *given]
    return shlex.join(re.sub(r"[^\s=:,]*/", "", word.rstrip("/")) for word in words)


def gpu() -> dict:
    if torch is None or not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cudnn": torch.backends.cudnn.version(),
    }


def repository() -> Path | None:
    """The root of the checkout in or above the current folder or this file."""
    here = Path.cwd()
    folders = (here, *here.parents, *Path(__file__).resolve().parents)
    return next((f for f in folders if (f / "generator" / "spec.h").exists()), None)


def tree() -> dict:
    """The commit and its tree, and a digest of the sources that needs no git.

    There may be no git beside a GPU, or a copy whose history ends earlier: `SAGEBWD_COMMIT` and
    `SAGEBWD_TREE` then name them, and only the digest tells whether the copy differs from them.
    """
    root = repository()
    named = {what: os.environ.get(f"SAGEBWD_{what.upper()}") for what in ("commit", "tree")}
    if root is None:
        return named | {"dirty": None, "sources_sha256": None}
    digest = {"sources_sha256": sources_digest(root)}
    if named["commit"]:
        return named | {"dirty": None} | digest
    git = ("git", "-c", "safe.directory=*", "-C", str(root))
    status = output_of(*git, "status", "--porcelain", "--", ":!bench/results")
    return {
        "commit": output_of(*git, "rev-parse", "HEAD"),
        "tree": output_of(*git, "rev-parse", "HEAD^{tree}"),
        "dirty": None if status is None else bool(status),
    } | digest


def sources_digest(root: Path) -> str:
    """SHA-256 over the names and contents of the source files, in the order of their names."""
    files = [root / "CMakeLists.txt", root / "pyproject.toml"]
    files += (f for folder in SOURCE_FOLDERS for f in (root / folder).rglob("*")
              if f.suffix in SOURCE_SUFFIXES)  # fmt: skip
    digest = hashlib.sha256()
    for file in sorted(f for f in files if f.is_file() and "results" not in f.parts):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path):
    """Gives another path, whose file becomes that of `path` as a whole, or goes where the block
    fails: a reader or an interrupt never meets half a file. OSError for a path that is there and
    no file: a device would be replaced, too. An OSError of a write gets the name of the file."""
    given, path = path, Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe: name a file", str(path))
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(given)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, record: dict) -> None:
    """Replaces `path` as a whole. JSON has no NaN: non-finite numbers become their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
    with replacing(path) as partial:
        partial.write_text(json.dumps(finite, indent=1) + "\n")


def write_tensors(path: Path, content) -> None:
    """Replaces `path` as a whole by what torch.load reads."""
    with replacing(path) as partial:
        try:
            torch.save(content, partial)
        except RuntimeError:  # PyTorch's, where a disk is full: a further write says so
            with partial.open("ab") as file:
                file.write(bytes(1 << 20))
            raise


def brief(error: BaseException) -> str:
    """One short line for a record: the kind and the message's beginning, whose paths from the root
    on are cut to their names."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: " + re.sub(r"(?<![^\s'\"(=])/[^ ]*/", "", first)[:400]


def print_failure(title: str, error: BaseException) -> None:
    """The last frames and the message's first lines; PyTorch's own messages can run to pages."""
    further = str(error).strip().splitlines()[1:12]
    print(f"\n{title}: {brief(error)}", *further, sep="\n", file=sys.stderr)
    traceback.print_tb(error.__traceback__, limit=-4)


def output_of(*words: str) -> str | None:
    """Returns what a program prints; None if it is missing, fails or takes more than 20 seconds."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
