"""Tries a wheel as a newcomer has it: python try_wheel.py WHEEL FOLDER, with the Python it is for.

A new environment in FOLDER, which is emptied first, without PyTorch and with nothing else on PATH.
The last line says how long things took.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

OF_PIP = ("PIP_", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
REFERENCE = """
import sagebwd
q, k, v, dout = sagebwd.reference.random_inputs(64, head_dim=64)
print(sagebwd.__version__, sagebwd.trace(q, k, v, dout)["dQ"]["cosine"])
"""

#: A program in C begins so: it includes the header and opens the library that lies beside it.
FROM_C = """
import ctypes, pathlib, sagebwd
folder = pathlib.Path(sagebwd.__file__).parent
assert "sagebwd_version" in (folder / "sagebwd.h").read_text()
version = ctypes.CDLL(str(folder / "libsagebwd.so")).sagebwd_version
version.restype = ctypes.c_char_p
print(version().decode())
"""


class Environment:
    def __init__(self, folder):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv/bin"
        self.alone = {"PATH": str(self.bin), "HOME": str(folder), "LANG": "C.UTF-8"}

    def run(self, *command, code=0, **more):
        """Returns the output; ends the trial if it ends with a code other than `code`."""
        print("$", *command, flush=True)
        result = subprocess.run([self.bin / command[0], *command[1:]], env=self.alone | more,
                                capture_output=True, text=True, check=False)  # fmt: skip
        print(result.stdout, result.stderr, flush=True)
        if result.returncode != code:
            sys.exit(f"{' '.join(command)} ended with {result.returncode}, not {code}")
        return result.stdout

    def install(self, what):
        settings = {k: v for k, v in os.environ.items() if k.upper().startswith(OF_PIP)}
        start = time.monotonic()
        self.run("python", "-m", "pip", "install", "--disable-pip-version-check", what, **settings)
        return time.monotonic() - start


def require(condition, what):
    if not condition:
        sys.exit(what)


def main(wheel, folder):
    env = Environment(folder)
    version = wheel.name.split("-")[1]
    installed = env.install(str(wheel))
    start = time.monotonic()
    found, cosine = env.run("python", "-c", REFERENCE).split()
    first_use = time.monotonic() - start
    require(found == version, f"the package says it is {found}")
    stubs = list((env.bin.parent / "lib").rglob("sagebwd/integrations/*.pyi"))
    require(stubs, "type stubs are missing")
    require(float(cosine) > 0.99, f"dQ's cosine similarity with FP64 is {cosine}")
    require(env.run("python", "-c", FROM_C).split() == [version], "the library for C differs")

    require(env.run("sagebwd", "--version").split()[-1] == version, "the command's version differs")
    report = json.loads(env.run("sagebwd", "doctor", "--json"))
    require(report["version"] == version, "doctor's version differs")
    operation = ("--arch", "sm_90a", "--head-dim", "64")
    source = env.run("sagebwd", "emit", *operation, "--kernel", "forward")
    require('extern "C" __global__' in source, "emit printed no kernel")
    if not report["can_compile"]:  # where there is no CUDA toolkit
        env.run("sagebwd", "build", *operation, code=1)

    with_nvrtc = env.install(f"{wheel}[cu13]")
    nvrtc = json.loads(env.run("sagebwd", "doctor", "--json"))["nvrtc"]
    require(nvrtc["path"].startswith(str(folder)), f"pip's NVRTC is not the one found: {nvrtc}")
    start = time.monotonic()
    env.run("sagebwd", "build", *operation)
    compiled = time.monotonic() - start
    env.run("python", "-c", "import sagebwd; sagebwd.build('sm_80', head_dim=64)")
    print(f"installed in {installed:.1f} s, first used in {first_use:.1f} s; with NVRTC in "
          f"{with_nvrtc:.1f} s, kernels compiled in {compiled:.1f} s")  # fmt: skip


if __name__ == "__main__":
    require(len(sys.argv) == 3, __doc__)
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
