"""Calls that are left to PyTorch because this GPU is faster with it."""

import json
import math
import os
import subprocess
import sys

import pytest
from inputs import torch

import sagebwd

call = torch.nn.functional.scaled_dot_product_attention


def tensors(tokens, head_dim=256):
    torch.manual_seed(0)
    return [torch.randn(1, 2, tokens, head_dim, device="cuda", dtype=torch.bfloat16,
                        requires_grad=True) for _ in range(3)]  # fmt: skip


def crossover(**given):
    try:
        found = sagebwd.crossover_tokens(**given)
    except sagebwd.SpecError as error:
        if "nothing is known of the crossover on" not in str(error):
            raise
        pytest.skip("needs a GPU whose crossover is known")
    if found == math.inf:
        pytest.skip("needs a GPU that has a crossover at D256")
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_below_the_crossover_are_pytorchs(causal, compiled):
    least = crossover(head_dim=256, causal=causal)
    short, long = tensors(least - 1), tensors(least)

    def attend(q, k, v):
        return call(q, k, v, is_causal=causal)

    with sagebwd.sdpa(min_tokens="auto") as mode:
        function = torch.compile(attend, dynamic=False) if compiled else attend
        found = [function(*of) for of in (short, long)]
        gradient = torch.autograd.grad(found[1].sum(), long)
    assert torch.equal(found[1], sagebwd.attention(*long, causal=causal))
    assert not torch.equal(found[0], sagebwd.attention(*short, causal=causal))
    assert all(torch.isfinite(g).all() for g in gradient)
    if not compiled:
        assert mode.short_calls == 1 and mode.calls == 2


def test_fastest_has_a_crossover_of_its_own():
    words = sagebwd.fastest_precision(head_dim=256)
    least = crossover(head_dim=256, **words)
    with sagebwd.sdpa(min_tokens="auto", precision="fastest") as mode:
        call(*tensors(least - 1))
        found = call(*tensors(least))
    assert mode.short_calls == 1
    assert torch.equal(found, sagebwd.attention(*tensors(least), **words))


def test_a_measured_crossover_is_used_by_later_processes(tmp_path):
    """Both lengths are tuned and timed by the command, and what it kept comes before tables."""
    environment = {**os.environ, "SAGEBWD_CACHE_DIR": str(tmp_path / "cache")}

    def program(*words):
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    words = "--lengths", "256,1024", "--heads", "2", "--head-dim", "64", "--batch", "2", "--rounds"
    found = program("-m", "sagebwd", "tune", *words, "5", "--json")
    assert [row["seq_len"] for row in found["lengths"]] == [256, 1024] and found["kept"]
    for row in found["lengths"]:
        assert 0 < row["forward_ms"] < row["both_ms"]
        assert 0 < row["pytorch_forward_ms"] < row["pytorch_both_ms"]
    assert {tile["kernel"] for tile in found["tiles"]} >= {"forward"}
    asked = ("import json, math, sagebwd; print(json.dumps([None if math.isinf(n) else n for n in ("
             "sagebwd.crossover_tokens(head_dim=64, training=t) for t in (False, True))]))")
    assert program("-c", asked) == [found["crossover"][name] for name in ("forward", "training")]
