"""SAGEBWD_DEBUG_WAITS=1: sound kernels run under it, and one that would hang says where.

Each in a process of its own, for a failed assertion ends a process' use of the GPU.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from inputs import torch

import sagebwd

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
CALL = """
import sys, torch, sagebwd
from sagebwd.numerics.exact import exact_attention
words = dict(word.split("=") for word in sys.argv[2:])
shape = 1, 2, 700, int(sys.argv[1])
q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
deterministic = "deterministic" not in words or words.pop("deterministic") == "yes"
found = sagebwd.attention_forward(q, k, v, deterministic=deterministic, **words)
found += sagebwd.attention_backward(dout, q, k, v, *found, deterministic=deterministic, **words)
torch.cuda.synchronize()
expected = exact_attention(q, k, v, dout)
for name, x in zip(("out", "lse", "dq", "dk", "dv"), found):
    of = getattr(expected, name).double()
    error = ((x.double() - of).norm() / of.norm()).item()
    assert error < 0.03, (name, error)
print("right")
"""


def hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not hopper(), reason="warp-specialised kernels are sm_90a's")


def call(tmp_path, head_dim, *words, **environment):
    environment |= {"SAGEBWD_DEBUG_WAITS": "1", "SAGEBWD_CACHE_DIR": str(tmp_path / "cache")}
    package = str(Path(sagebwd.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", CALL, str(head_dim), *words],
                          env=os.environ | environment, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "words"),
    [
        (64, []),
        (256, []),
        (128, ["precision=gradients16", "deterministic=no"]),
    ],
)
def test_sound_kernels_are_right_under_it(tmp_path, head_dim, words):
    ran = call(tmp_path, head_dim, *words)
    assert ran.returncode == 0 and ran.stdout.endswith("right\n"), ran.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken", "head_dim", "says"),
    [
        # Stages that consumers never release: the producer waits.
        ("kernels/forward_ws.cuh", "ring.release(state);", "", 64, "readers of a stage"),
        # Bytes that are announced and never copied: what waits for them is waited for, and so is
        # who would release the stage. Which of the two comes to its bound first is a race.
        ("kernels/backward_dkv_ws.cuh", "ring.begin_filling(state,",
         "ring.begin_filling(state, 16 +", 128, "what dP starts from|readers of a stage"),
        # A signal that is never given: warpgroups wait for each other, and release no stage for
        # which the producer waits. Again a race.
        ("kernels/forward_ws.cuh", "ping_pong.signal();", "", 128,
         "other warps|readers of a stage"),
    ],
)  # fmt: skip
def test_a_wait_in_vain_ends_and_says_for_what(tmp_path, file, line, broken, head_dim, says):
    templates = tmp_path / "templates"
    shutil.copytree(TEMPLATES, templates)
    text = (templates / file).read_text()
    assert line in text
    (templates / file).write_text(text.replace(line, broken))
    ran = call(tmp_path, head_dim, SAGEBWD_TEMPLATE_DIR=str(templates))
    assert ran.returncode != 0 and "right" not in ran.stdout
    said = ran.stdout + ran.stderr
    kernel = "sagebwd_" + Path(file).stem.removesuffix("_ws").removesuffix("_pair")
    failed = [line for line in said.splitlines() if re.search(f"Assertion `({says})` failed", line)]
    assert failed and all(f": {kernel}_d{head_dim}_" in line for line in failed), said[-2000:]
