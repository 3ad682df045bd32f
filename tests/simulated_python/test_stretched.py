"""What bench/balance.py runs, on the simulator: kernels with the tiles of another architecture give
the same bits with stretched tensor instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import stretch  # noqa: E402

CELL = {"label": "", "head_dim": 64, "tokens": 256, "causal": True, "batch": 1, "heads": 1}
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(BENCH)!r})
import torch
import balance_runs
tensors, found = balance_runs.Tensors({CELL}, 0, "cpu"), {{}}
for plan in sys.argv[1:]:
    spec = balance_runs.spec_of({CELL}, plan)
    operation = balance_runs.Operation(spec, balance_runs.tiles_of(spec, "sm_89", {{}}), tensors)
    memory = torch.empty(operation.workspace_bytes() + 256, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256:]
    for tensor in (workspace, *tensors.outputs().values()):
        balance_runs.filled(tensor)
    kernels = [[*operation.timed(name, workspace)] for name in operation.passes]
    found[plan] = kernels, balance_runs.results_of(tensors, False)
print(json.dumps(found))
"""


def run(templates, *plans):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *plans], capture_output=True, text=True,
                          env=os.environ | {"SAGEBWD_TEMPLATE_DIR": str(templates),
                                            "SAGEBWD_TUNE": "off"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stretched_kernels_give_the_same_bits(tmp_path):
    plans = "six-of-seven gradient_kernels=split", "six-of-seven no-deterministic"
    stretch.write(tmp_path, {"int8": 3, "bits16": 6, "bits16_half": 3})
    plain, stretched = (run(folder, *plans) for folder in (stretch.TEMPLATES, tmp_path))
    assert stretched == plain
    assert plain[plans[0]][0] == [["key_mean", "quantize", "forward"],
                                  ["key_mean", "quantize", "backward_dkv", "backward_dq"]]
    assert plain[plans[1]][0][1] == ["key_mean", "quantize", "backward", "round_dq"]
    split, fused = (plain[plan][1] for plan in plans)
    assert len(set(split.values())) == 5
    assert {name for name in split if split[name] != fused[name]} == {"dQ"}
