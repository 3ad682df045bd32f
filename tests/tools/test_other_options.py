"""Options that were renamed: the old names are still accepted, and no help lists them."""

import pytest

SMALL = ("--seq-len", 64, "--head-dim", 64, "--json")


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (["--plan", "s,pv"], ["--precision", "s,pv"]),
        (["--plan", "none"], ["--precision", "none"]),
        (["--precision", "s,pv,dv,dq,dk"], ["--precision", "six-of-seven"]),
        (["--dtype", "float16"], ["--dtype", "fp16"]),
        (["--dtype", "bfloat16"], ["--dtype", "bf16"]),
    ],
)
def test_trace_is_the_same_by_either_name(sagebwd, other, name):
    tensors = sagebwd("trace", *SMALL, *name).json["tensors"]
    assert sagebwd("trace", *SMALL, *other).json["tensors"] == tensors
    usual = sagebwd("trace", *SMALL).json["tensors"]
    assert (tensors == usual) == (name[1] in ("six-of-seven", "bf16"))


def test_lengths_have_two_names(sagebwd):
    by_name = sagebwd("trace", "--seq-q", 96, "--head-dim", 64, "--json").json
    assert by_name == sagebwd("trace", "--seq-len", 96, "--head-dim", 64, "--json").json
    assert by_name["seq_q"] == 96


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace", "--plan", "s", "--precision", "qk16"],
        ["trace", "--seq-q", 64, "--seq-len", 64],
        ["tune", "--plans", "--compare-precisions"],
    ],
)
def test_both_names_at_once_are_refused(sagebwd, arguments):
    result = sagebwd(*arguments)
    assert result.code == 2
    assert "are two names of one option: give one of them" in result.err


def test_lists_take_pytorchs_dtypes(sagebwd):
    common = ["prebuild", "--arch", "sm_80", "--head-dim", 64, "--dry-run", "--json"]
    kernels = sagebwd(*common, "--dtype", "bf16,fp16").json["kernels"]
    assert sagebwd(*common, "--dtype", "bfloat16,float16").json["kernels"] == kernels


def test_comparing_precisions_has_two_names(sagebwd):
    errors = {sagebwd("tune", option, "--list").err for option in ("--plans",
                                                                   "--compare-precisions")}  # fmt: skip
    assert len(errors) == 1 and "give one of them" in errors.pop()


@pytest.mark.parametrize(("command", "other"), [("trace", "--plan"), ("tune", "--plans"),
                                                ("tune", "--seq-q")])  # fmt: skip
def test_no_help_lists_other_names(sagebwd, command, other):
    assert other not in sagebwd(command, "--help").out.split()


@pytest.mark.parametrize(("words", "precision", "products"), [
    ([], "six-of-seven", "s,pv,dv,dq,dk"), (["--precision", "gradients16"], "gradients16", "s,pv"),
    (["--plan", "s,dp"], "s,dp", "s,dp"),
])  # fmt: skip
def test_the_json_of_trace_says_precision(sagebwd, words, precision, products):
    found = sagebwd("trace", "--seq-len", 8, "--heads", 1, "--head-dim", 64, *words, "--json").json
    assert found["precision"] == precision and found["products"] == products
    assert "plan" not in found
