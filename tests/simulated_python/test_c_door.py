"""libsagebwd.so from another language than C, by ctypes: what the environment makes of a call."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulator_needed import FOLDER

import sagebwd

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = FOLDER.parent / "libsagebwd.so"
STATUSES = {name: int(number) for name, number in re.findall(
    r"^  SAGEBWD_(\w+) = (\d+)", (ROOT / "c/sagebwd.h").read_text(), re.M)}  # fmt: skip

# Prints the status and the message of sagebwd_create(), or of sagebwd_warmup() behind it.
CALL = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
library.sagebwd_last_error.restype = ctypes.c_char_p
class Warmup(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("problem", ctypes.c_int64 * 5),
                ("backward", ctypes.c_int)]
if "SUGGESTED" in os.environ:
    assert library.sagebwd_suggest_nvrtc(os.environ["SUGGESTED"].encode()) == 0
operation = ctypes.c_void_p()
spec, device = sys.argv[2].encode(), int(sys.argv[3])
status = library.sagebwd_create(spec, device, ctypes.byref(operation))
if status == 0:
    args = Warmup(ctypes.sizeof(Warmup), tuple(map(int, sys.argv[4:])), 1)
    status = library.sagebwd_warmup(operation, ctypes.byref(args))
print(status, library.sagebwd_last_error().decode())
library.sagebwd_destroy(operation)
"""


def call(device=0, sizes=(), **environment):
    """Name of the status, and the message. `sizes`: of the problem to warm up for."""
    spec = str(sagebwd.Spec(head_dim=64))
    words = [sys.executable, "-c", CALL, LIBRARY, spec, str(device), *map(str, sizes)]
    result = subprocess.run(words, capture_output=True, text=True,
                            env={**os.environ, **environment}, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr
    status, message = result.stdout.split(" ", 1)
    return next(name for name, number in STATUSES.items() if number == int(status)), message


def test_it_works():
    assert call() == ("OK", "\n")


def test_without_a_driver(tmp_path):
    status, message = call(LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert status == "NO_LIBRARY" and re.search("libcuda|GPU", message)


def test_without_a_compiler(tmp_path):
    nowhere = str(tmp_path / "libnvrtc.so")
    status, message = call(SAGEBWD_NVRTC=nowhere, SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))
    assert status == "NO_LIBRARY" and nowhere in message


def test_a_suggested_compiler_comes_before_those_that_are_found(tmp_path):
    """This one lacks all functions, and the message names it."""
    suggested = shutil.copy(FOLDER / "libcuda.so.1", tmp_path / "libnvrtc.so.13")
    status, message = call(sizes=(1, 1, 1, 64, 64), SUGGESTED=str(suggested), SAGEBWD_NVRTC="",
                           SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip
    assert status == "NO_LIBRARY" and str(suggested) in message


def test_offline(tmp_path):
    status, message = call(SAGEBWD_OFFLINE="1", SAGEBWD_CACHE_DIR=str(tmp_path))
    assert status == "OFFLINE" and "sagebwd prebuild" in message


def test_a_variable_without_meaning():
    status, message = call(SAGEBWD_TUNE="sometimes")
    assert status == "INVALID" and "SAGEBWD_TUNE" in message and "sometimes" in message


def test_warming_up_is_for_sizes():
    """Under `frozen` a size needs the records of its kernels, and default tiles need none."""
    assert call(SAGEBWD_TUNE="frozen") == ("OK", "\n")
    status, message = call(sizes=(1, 2, 1, 300, 200), SAGEBWD_TUNE="frozen")
    assert status == "FAILED" and "no tuning record" in message
    assert "--heads 2 --heads-kv 1 --seq-len 300 --seq-kv 200" in message


def test_a_kernel_that_does_not_compile(tmp_path):
    templates = tmp_path / "templates"
    subprocess.run(["cp", "-r", ROOT / "templates", templates], check=True)
    base = templates / "base.cuh"
    base.write_text(base.read_text() + "\nthis is no C++\n")
    status, message = call(SAGEBWD_TEMPLATE_DIR=str(templates),
                           SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip
    assert status == "COMPILE" and "this is no C++" in message


def test_a_device_that_is_not_there():
    status, message = call(device=7)
    assert status == "DRIVER" and "7" in message
