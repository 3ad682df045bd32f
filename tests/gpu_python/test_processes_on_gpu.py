"""Processes that share an empty cache directory."""

import os
import subprocess
import sys
from pathlib import Path

from inputs import torch  # noqa: F401

PROGRAM = """
import sys, time
import torch, sagebwd
q, k, v = (torch.randn(1, 4, 333, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
           for _ in range(3))
print("ready", flush=True)
sys.stdin.readline()  # both begin at the same time
out = sagebwd.attention(q, k, v, causal=True)
gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
exact = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
expected = [exact, *torch.autograd.grad(exact, leaves, torch.ones_like(exact))]
for x, y in zip((out, *gradients), expected):
    assert (x.double() - y).norm() < .05 * y.norm()
counters = sagebwd.cache_stats()["counters"]
print(counters["compiles"], counters["publish_failures"], counters["timeouts"])
"""


def test_two_that_race_for_an_empty_cache_are_both_right(tmp_path):
    environment = os.environ | {"SAGEBWD_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("SAGEBWD_CACHE_PACKS", None)
    racers = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE) for _ in range(2)]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n", racer.communicate()
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    compiled = 0
    for racer in racers:
        said, errors = racer.communicate(timeout=300)
        assert racer.returncode == 0, said + errors
        compiles, failures, timeouts = map(int, said.split())
        assert failures == timeouts == 0
        compiled += compiles
    files = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    kernels = [name for name in files if name.endswith(".kernel")]
    assert len(kernels) == compiled > 0  # each kernel once, whoever compiled it
    assert not [name for name in files if "tmp" in name or name.startswith(".")], files
