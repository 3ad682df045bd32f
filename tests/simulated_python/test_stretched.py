"""Kernels that bench/balance.py runs are tested on the simulator: those with the tiles of another
architecture give the same bits with stretched tensor instructions."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(Path(__file__).resolve().parents[1] / "python")]

import simulator_needed  # noqa: E402, F401
import stretch  # noqa: E402
import warm  # noqa: E402

CELL = {"label": "", "head_dim": 64, "tokens": 256, "causal": True, "batch": 1, "heads": 1}
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(BENCH)!r})
import torch
import balance_runs
found = []
for cell, plans in json.loads(sys.argv[1]):
    tensors = balance_runs.Tensors(cell, 0, "cpu")
    found.append({{}})
    for plan in plans:
        spec = balance_runs.spec_of(cell, plan)
        told = balance_runs.told_of(spec, cell, plan, tensors, 0)
        operation = balance_runs.Operation(spec, balance_runs.tiles_of(spec, "sm_89", {{}}),
                                           tensors, told)
        workspace = balance_runs.room(operation.workspace_bytes(), "cpu")
        for tensor in (workspace, *tensors.outputs().values()):
            balance_runs.filled(tensor)
        kernels = [[*operation.timed(name, workspace)] for name in operation.passes]
        found[-1][plan] = kernels, balance_runs.results_of(tensors, False), told and (
            told.about["share"], balance_runs.errors_of(tensors, told))
print(json.dumps(found))
"""


DENSE = "six-of-seven gradient_kernels=split", "six-of-seven no-deterministic"
LISTED_CELL = CELL | {"tokens": 330, "heads": 2, "causal": False}
LISTS = "six-of-seven sparse_q=128 sparse_kv=64"
LISTED = f"{LISTS} density=0.5", f"{LISTS} density=1", "six-of-seven x64 sink_keys=0"
MASKED_CELL = CELL | {"tokens": 384, "causal": False, "mask": "image spans",
                      "words": "intervals=2"}
MASKED = ("six-of-seven",)


def run(templates):
    done = warm.run(["-c", PROGRAM, json.dumps([(CELL, DENSE), (LISTED_CELL, LISTED),
                                                (MASKED_CELL, MASKED)])],
                    loaded="torch",  # as sagebwd reads its variables once
                    env=os.environ | {"SAGEBWD_TEMPLATE_DIR": str(templates),
                                      "SAGEBWD_TUNE": "off"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each cell gives, by plan, with plain templates and with stretched ones: one process of
    each."""
    folder = tmp_path_factory.mktemp("stretched")
    stretch.write(folder, {"int8": 3, "bits16": 6, "bits16_half": 3})
    return list(zip(run(stretch.TEMPLATES), run(folder)))


def test_stretched_kernels_give_the_same_bits(ran):
    plans = DENSE
    plain, stretched = ran[0]
    assert stretched == plain
    assert plain[plans[0]][0] == [["key_mean", "quantize", "forward"],
                                  ["key_mean", "quantize", "backward_dkv", "backward_dq"]]
    assert plain[plans[1]][0][1] == ["key_mean", "quantize", "backward", "round_dq"]
    split, fused = (plain[plan][1] for plan in plans)
    assert len(set(split.values())) == 5
    assert {name for name in split if split[name] != fused[name]} == {"dQ"}


def test_stretched_kernels_see_the_same_lists(ran):
    plain, stretched = ran[1]
    assert stretched == plain
    half, whole, dense = (plain[plan] for plan in LISTED)
    assert half[0] == [["key_mean", "quantize", "forward"],
                       ["key_mean", "quantize", "transpose_bits", "order_lists", "backward_dkv",
                        "backward_dq"]]
    # Lists of all blocks give the bits of attention to all keys; those of some give others.
    assert whole[1] == dense[1] and whole[2][0] == 1
    assert all(half[1][name] != dense[1][name] for name in dense[1])
    assert dense[2] is None and 0 < half[2][0] < 1
    for of in half, whole:
        assert of[2][1].keys() == {"O", "dQ", "dK", "dV"}
        assert all(0.002 < error < 0.03 for error in of[2][1].values())


def test_stretched_kernels_see_the_same_mask(ran):
    plain, stretched = ran[2]
    assert stretched == plain
    kernels, _, (share, errors) = plain[MASKED[0]]
    assert kernels == [["interval_bits", "key_mean", "quantize", "forward"],
                       ["key_mean", "quantize", "transpose_bits", "order_lists", "backward_dkv",
                        "backward_dq"]]
    # The diagonal and what is below it, and 12 x 11 / 2 scores above it in each of eight spans.
    assert share == (384 * 385 / 2 + 8 * 66) / 384**2
    assert errors.keys() == {"O", "dQ", "dK", "dV"}
    assert all(0.002 < error < 0.03 for error in errors.values())
