"""Norm, RoPE and gate of sequences that GPUs share, over NCCL: against one GPU and FP64."""

import pytest
from inputs import torch
from on_gpus import MORE, needs_gpus, run

import distributed_front as fronts

pytestmark = needs_gpus

#: Their chunks are quantised as the whole is.
CASES = {
    "one table": (dict(heads=8, heads_kv=2, tokens=4096, d=128), dict(causal=True),
                  dict(q_norm="D", k_norm="D", rope=("M", 64))),
    "a length that no number divides": (
        dict(heads=4, heads_kv=4, tokens=3001, d=64, dtype=torch.float16), dict(causal=True),
        dict(q_norm="HD", k_norm="KD", rope=("M", 32))),
    "tables of each sequence": (
        dict(heads=4, heads_kv=2, tokens=2048, d=128, batch=2, layout="bshd"),
        dict(causal=True, layout="bshd", precision="gradients16"),
        dict(q_norm="HD", k_norm="KD", norm_eps=0.01, rope=("BM", 64))),
    "given 1/rms": (dict(heads=4, heads_kv=2, tokens=2048, d=64), {},
                    dict(q_norm="HD", q_inv_rms="BM", k_inv_rms="BKN", rope=("M", 32))),
    "interleaved": (dict(heads=4, heads_kv=2, tokens=2048, d=64), dict(causal=True),
                    dict(k_norm="D", rope=("M", 8), rope_begin=4, rope_style="interleaved")),
}  # fmt: skip


def judged(rank, method, ranks):
    """What is wrong, by case."""
    wrong = {}
    for name, case in CASES.items():
        found = fronts.together(rank, method, ranks, case)
        if rank == 0:
            wrong[name] = fronts.wrong_among(found, fronts.alone(case), fronts.exactly(case), MORE)
    return wrong


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_gpus_together_give_what_one_gives(method, tmp_path):
    found, _ = run(tmp_path, 2, judged, method, 2)
    assert found == {name: [] for name in CASES}
