"""sagebwd verify, on a driver whose kernels do nothing and whose memory reads as 1s."""

import pytest

SPEC = ("--head-dim", 64, "--dtype", "bf16", "--causal", "none", "--granularity", "row",
        "--precision", "six-of-seven", "--block-size", "0x0")  # fmt: skip
LISTS = ("--head-dim", 64, "--dtype", "bf16", "--causal", "none", "--precision",
         "six-of-seven")  # fmt: skip
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
    for name in ("Q 1.0000 > 0.00", "K ", "dQ ", "dK "):  # of norm and RoPE
        assert f" front {name}" in failure
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


def test_a_quarter_of_the_problems_has_lists_and_an_eighth_intervals(sagebwd, fake_driver):
    """And an eighth a mask or a score function, of which these have one. No stock: `build` would
    compile three times the kernels that these problems run."""
    result = sagebwd("verify", "--cases", 24, "--seed", 13, *LISTS, "--granularity", "block",
                     *SHORT, "--json", LD_LIBRARY_PATH=str(fake_driver), **DRIVER)  # fmt: skip
    assert result.json["coverage"]["lists"] == 7 and result.json["specs"] == 5
    assert result.json["coverage"]["intervals"] == 3
    (expression,) = [line for line in result.json["failures"]
                     if " mask=" in line or " score=" in line]  # fmt: skip
    assert result.json["coverage"]["expressions"] == 1 and " density " not in expression
    with_intervals = [line for line in result.json["failures"] if " intervals=" in line]
    assert len(with_intervals) == result.json["coverage"]["intervals"]
    assert not any(" density " in line for line in with_intervals)
    listed = [line for line in result.json["failures"]
              if "sparse_q=128" in line and line not in (*with_intervals, expression)]  # fmt: skip
    assert len(listed) == result.json["coverage"]["lists"]
    assert all(" density " in line for line in listed)


def test_blocks_of_a_size_are_drawn_for_the_specs_that_have_them(sagebwd, fake_driver):
    result = sagebwd("verify", "--cases", 4, *LISTS, "--granularity", "block,row", "--block-size",
                     "64x64", *SHORT, "--json", LD_LIBRARY_PATH=str(fake_driver),
                     **DRIVER)  # fmt: skip
    assert result.json["coverage"]["lists"] == 4 and result.json["specs"] == 1
    assert all("sparse_q=64 sparse_kv=64" in line for line in result.json["failures"])


def test_blocks_that_no_spec_has_are_refused(sagebwd):
    result = sagebwd("verify", "--granularity", "block", "--block-size", "64x64")
    assert result.code == 2 and "take 128 queries, or 'row'" in result.err
    result = sagebwd("verify", "--group-kv", "48", "--block-size", "64x64")
    assert result.code == 2 and "group_kv = 48" in result.err


def test_unknown_inputs_are_refused(sagebwd):
    result = sagebwd("verify", "--inputs", "gaussian,banana")
    assert result.code == 2 and "unknown inputs 'banana'" in result.err


@pytest.mark.parametrize("of, remedies", [
    (("--block-size", "128x64"), [("--density", 0.5), ("--seq-len", 512)]),
    (("--intervals", 2), [("--seq-len", 256)])])  # fmt: skip
def test_a_trace_of_nothing_is_refused(sagebwd, of, remedies):
    words = "trace", "--seq-len", 64, "--heads", 1, *of
    result = sagebwd(*words)
    assert result.code == 2 and "no query sees a key" in result.err
    assert ("--density" in result.err) == ("--block-size" in of)
    for option, value in remedies:
        given = [*words, option, value] if option != "--seq-len" else [
            "trace", option, value, "--heads", 1, *of]
        assert sagebwd(*given).code == 0, option


def test_trace_tells_the_density_of_its_lists(sagebwd):
    lists = "trace", "--seq-len", 512, "--head-dim", 64, "--heads", 1, "--block-size", "128x64"
    sparse, usual = (sagebwd(*lists, *more, "--json").json
                     for more in (["--density", "0.5"], []))  # fmt: skip
    assert (sparse["density"], usual["density"]) == (0.5, 0.1)
    assert sparse["tensors"] != usual["tensors"]
    assert ", density 0.5," in sagebwd(*lists, "--density", "0.5").out
    assert "density" not in sagebwd(*lists[:-2], "--json").json
    refused = sagebwd(*lists, "--density", "0")
    assert refused.code == 2 and "--density is '0'; it is a number above 0, up to 1" in refused.err


def test_trace_draws_intervals(sagebwd):
    given = "trace", "--seq-len", 256, "--head-dim", 64, "--heads", 1
    usual, first, again, other = (sagebwd(*given, *more, "--json").json["tensors"] for more in (
        [], ["--intervals", 2], ["--intervals", 2], ["--intervals", 2, "--seed", 1]))  # fmt: skip
    assert first == again and first not in (usual, other)
    refused = sagebwd(*given, "--intervals", 2, "--density", "0.5")
    assert refused.code == 2 and "--density is the part of the blocks that lists" in refused.err
    refused = sagebwd(*given, "--intervals", 4, "--causal", "top-left")
    assert refused.code != 0 and "has 1 or 2 numbers there" in refused.err


def test_linear_attention_has_shares_and_their_gradient(sagebwd, fake_driver):
    spec = "--spec", "d64 sparse_q=64 sparse_kv=64 linear=complement"
    result = sagebwd("verify", "--cases", 4, *spec, *SHORT, "--json",
                     LD_LIBRARY_PATH=str(fake_driver), **DRIVER)  # fmt: skip
    assert result.json["wrong"] == result.json["coverage"]["linear"] == 4
    for name in ("dalpha", "sparse_out"):
        assert f"memory before {name} was written to" in result.json["failures"][0]
    assert any(" rest seed " in line for line in result.json["failures"])
    assert {"O", "lse", "dQ", "dK", "dV", "dalpha"} == {
        name for name in result.json["tensors"] if not name.startswith("front ")}  # fmt: skip
