"""One set of spellings for every public function, and errors of our own for everything else."""

import enum
import inspect

import numpy as np
import pytest

import sagebwd
from sagebwd import options, reference

try:
    import torch
except (ImportError, OSError):
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="needs PyTorch")
X = reference.random_inputs(64, head_dim=64)


def same(x, y):
    return all(np.array_equal(x[name], y[name]) for name in x if x[name] is not None)


# ---- what is taken -------------------------------------------------------------------------------


def test_causal_true():
    for function in (reference.exact, reference.emulate):
        assert same(function(*X, causal=True), function(*X, causal="top-left"))
    assert sagebwd.trace(*X, causal=True) == sagebwd.trace(*X, causal="top-left")
    emitted = [sagebwd.emit("sm_80", head_dim=64, causal=c) for c in (True, "top-left")]
    assert emitted[0] == emitted[1]


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes(name):
    if name.startswith("torch.") and torch is None:
        pytest.skip("needs PyTorch")
    dtype = torch.bfloat16 if name.startswith("torch.") else name
    assert sagebwd.trace(*X, dtype=dtype) == sagebwd.trace(*X)
    assert sagebwd.emit("sm_80", dtype=dtype) == sagebwd.emit("sm_80")
    assert options.spec("sm_80", dtype=dtype) == options.spec("sm_80")  # as build and warmup do
    assert np.array_equal(reference.round_to(X[0], dtype), X[0])


@pytest.mark.parametrize("dtype", [np.float16, "float16", "fp16", np.dtype("float16")])
def test_half_precision(dtype):
    assert sagebwd.trace(*X, dtype=dtype) == sagebwd.trace(*X, dtype="fp16")
    assert sagebwd.emit("sm_80", dtype=dtype) == sagebwd.emit("sm_80", dtype="fp16")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sagebwd.emit("sm_80", head_dim="64"), "head_dim='64'"),
        (lambda: sagebwd.emit("sm_80", group_q=10**30), "group_q=1000"),
        (lambda: sagebwd.trace(*X, group_q=10**30), "group_q=1000"),
        (lambda: sagebwd.trace(*X, device="banana"), "device='banana'"),
        (lambda: sagebwd.trace(*X, precision=5), "precision=5"),
        (lambda: reference.emulate(*X, precision=5), "precision=5"),
        (lambda: sagebwd.build("sm_80", precision=5), "precision=5"),
        (lambda: reference.random_inputs(0), "seq_len=0"),
        (lambda: reference.random_inputs(8, heads=-1), "heads=-1"),
        (lambda: reference.random_inputs(8, sigma=-1), "sigma=-1"),
        (lambda: reference.emulate(*X, out=X[0]), "out and lse go together"),
        (lambda: sagebwd.Spec(arch=5), "arch=5"),
        (lambda: sagebwd.tune(kernels=None), "kernels=None: pass names"),
        (lambda: sagebwd.tune(tiles=3), "tiles=3: pass names"),
        (lambda: sagebwd.prebuild("a.pack", arch="sm_80", records=3), "records=3"),
    ],
)  # fmt: skip
def test_refused(call, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        call()


@needs_torch
@pytest.mark.parametrize("function", [reference.exact, reference.emulate, sagebwd.trace])
def test_numpy_and_torch_are_not_mixed(function):
    with pytest.raises(sagebwd.SpecError, match="all as NumPy arrays or all as torch tensors"):
        function(torch.from_numpy(X[0]), *X[1:])


def test_a_spec_is_equal_to_specs_alone():
    assert sagebwd.Spec() != 5 and sagebwd.Spec() != "d128"


# ---- the wrong type for every parameter ----------------------------------------------------------


class Colour(enum.Enum):
    red = 1


WRONG = ["banana", "", None, 2.5, float("nan"), 10**30, -(10**30), [], [5], {}, b"\xff", object(),
         Colour.red, lambda: 0, np.zeros(3), np.array("text")]  # fmt: skip
TENSORS = dict(zip(("q", "k", "v", "dout"), X))
SMALL = dict(arch="sm_80", head_dim=64)
#: What each function takes where only one parameter is wrong. tune() and warmup() need a GPU, and
#: build() and prebuild() a compiler, once their arguments are right.
CALLS = {
    sagebwd.trace: TENSORS,
    reference.exact: TENSORS,
    reference.emulate: TENSORS,
    reference.round_to: dict(array=X[0], dtype="bf16"),
    reference.random_inputs: dict(seq_len=8, head_dim=64),
    sagebwd.emit: SMALL,
    sagebwd.build: SMALL | dict(backward=False),
    sagebwd.prebuild: SMALL | dict(out="absent/a.pack", dtype="bf16", causal="none"),
    sagebwd.tune: dict(seq_len=64, head_dim=64),
    sagebwd.Spec: dict(head_dim=64),
    sagebwd.import_records: dict(path="absent"),
    sagebwd.export_records: dict(path="absent/records.json"),
}
OURS = (TypeError, sagebwd.SpecError, sagebwd.LibraryError, sagebwd.TuneError, sagebwd.PackError,
        OSError)  # fmt: skip
SWITCHES = ("backward", "matrices", "round_outputs", "force", "overwrite")
CALLBACKS = ("progress",)


def parameters_of(function):
    if function is sagebwd.Spec:
        return ["arch", *sagebwd._core.spec_fields]
    return [name for name in inspect.signature(function).parameters if name != "group"]  # PyTorch's


@pytest.mark.parametrize(
    "function, name",
    [(function, name) for function in CALLS for name in parameters_of(function)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_wrong_types(function, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused = 0
    for wrong in WRONG:
        try:
            function(**CALLS[function] | {name: wrong})
        except OURS as error:
            assert "incompatible" not in str(error), (wrong, error)
            assert str(error), wrong
            right = wrong is None or callable(wrong)
            if name in SWITCHES or (name in CALLBACKS and not right):
                assert isinstance(error, sagebwd.SpecError) and f"{name}=" in str(error)
            refused += 1
    assert refused and (name not in SWITCHES or refused == len(WRONG))
