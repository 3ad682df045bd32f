"""bench/ptxas_rows.py: which settings of ptxas still change something."""

import json

import ptxas_rows
import pytest

from sagebwd import _core


def compared(with_, without, differs=True):
    return {"with": {"spill_bytes": with_}, "without": {"spill_bytes": without},
            "differs": differs}  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ([compared(0, 0), compared(0, 8)], "needed"),
        ([compared(8, 0), compared(0, 0, differs=False)], "other code"),
        ([compared(0, 0, differs=False)], "idle"),
    ],
)
def test_verdict(kernels, said):
    assert ptxas_rows.verdict(kernels) == said


@pytest.mark.skipif(bool(_core.nvrtc()["missing"]), reason="needs NVRTC")
def test_a_row_is_compiled_with_and_without_its_option(tmp_path):
    out = tmp_path / "ptxas.json"
    words = ["--out", str(out), "--only", "dkv-wide", "--kernels", "1", "--draws", "40"]
    assert ptxas_rows.main(words) == 0
    (row,) = json.loads(out.read_text())["rows"]
    (kernel,) = row["kernels"]
    assert row["row"] == "dkv-wide" and kernel["option"] == "--ptxas-options=-O1"
    assert "backward_dkv" in kernel["kernel"] and kernel["differs"]
    assert kernel["with"]["registers"] > 100 and "code" not in kernel["with"]
