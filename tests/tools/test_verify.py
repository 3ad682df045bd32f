"""sagebwd verify, on a driver whose kernels do nothing and whose memory reads as 1s."""

import pytest

SPEC = ("--head-dim", 64, "--dtype", "bf16", "--causal", "none", "--granularity", "row",
        "--precision", "six-of-seven")  # fmt: skip
SHORT = ("--max-len", 32)
#: It takes every NVRTC's cubins, so that they come from the cache.
DRIVER = {"FAKE_VERSION": "99000", "FAKE_QUIET": "1", "FAKE_MAJOR": "9", "FAKE_MINOR": "0"}


@pytest.fixture
def stock(stocked, cache_dir):
    stocked(cache_dir, "--arch", "sm_90a", *SPEC)


@pytest.mark.usefixtures("stock")
def test_wrong_results_and_writes_beside_a_tensor_are_found(sagebwd, fake_driver):
    result = sagebwd("verify", "--cases", 1, *SPEC, *SHORT, "--json",
                     LD_LIBRARY_PATH=str(fake_driver), **DRIVER)  # fmt: skip
    assert result.code == 1 and result.json["wrong"] == 1
    (failure,) = result.json["failures"]
    assert " O 1.0000 > " in failure and " lse 1.0000 > " in failure
    for name in ("out", "dq", "dk", "dv", "lse", "the forward workspace", "the backward workspace"):
        assert f"memory before {name} was written to" in failure
        assert f"memory after {name} was written to" in failure
    assert "bshd+8 " in failure and "dk: the padding between tokens was written to" in failure


def test_without_a_gpu_it_says_what_to_do(sagebwd, tmp_path):
    result = sagebwd("verify", "--cases", 1, CUDA_VISIBLE_DEVICES="",
                     LD_LIBRARY_PATH=str(tmp_path))  # fmt: skip
    if "runs kernels on a GPU" not in result.err:
        pytest.skip("there is a GPU")
    assert result.code == 1 and "sagebwd trace --device cpu" in result.err
    assert result.err.startswith("sagebwd verify: this command runs kernels on a GPU. Not here: ")


@pytest.mark.usefixtures("stock")
def test_inputs_are_among_the_named(sagebwd, fake_driver):
    result = sagebwd("verify", "--cases", 8, *SPEC, *SHORT, "--inputs", "sink,qk-norm,sink",
                     "--json", LD_LIBRARY_PATH=str(fake_driver), **DRIVER)  # fmt: skip
    assert result.json["coverage"]["inputs"] == ["qk-norm", "sink"]
    assert result.json["coverage"]["sigmas"] == []
    assert all(" sink seed " in line or " qk-norm seed " in line
               for line in result.json["failures"])  # fmt: skip


def test_unknown_inputs_are_refused(sagebwd):
    result = sagebwd("verify", "--inputs", "gaussian,banana")
    assert result.code == 2 and "unknown inputs 'banana'" in result.err
