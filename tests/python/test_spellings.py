"""One set of spellings for every public function, and errors of our own for everything else."""

import enum
import inspect

import numpy as np
import pytest

import sagebwd
from sagebwd import reference
from sagebwd.core import options

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
    assert options.Spec(dtype=dtype) == options.Spec()  # as build and warmup do
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
        (lambda: sagebwd.emit(5), "arch=5"),
        (lambda: sagebwd.prebuild("a.pack", arch=5), "arch=5"),
        (lambda: sagebwd.Spec(sink_keys=-1), "sink_keys=-1"),
        (lambda: sagebwd.Spec(granularity="block", sink_keys=1), "sink_keys = 1 .*'block'"),
        (lambda: sagebwd.tune(kernels=None), "kernels=None: pass names"),
        (lambda: sagebwd.tune(tiles=3), "tiles=3: pass names"),
        (lambda: sagebwd.prebuild("a.pack", arch="sm_80", records=3), "records=3"),
        (lambda: sagebwd.prebuild("a.pack", arch="sm_80", head_dim=()), "head_dim is an empty"),
        (lambda: reference.random_inputs(8, heads=3, heads_kv=2), "heads=3 .* heads_kv=2"),
        (lambda: sagebwd.tune(group=5), "group=5: pass a torch.distributed group"),
        (lambda: sagebwd.Spec(head_dim="64"), "head_dim='64'"),
        (lambda: sagebwd.emit("sm_80", granularity="row smooth_k=no"), "granularity='row sm"),
    ],
)  # fmt: skip
def test_spellings_that_are_refused(call, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        call()


def test_values_are_checked_before_the_driver(monkeypatch):
    monkeypatch.setattr(sagebwd._core, "driver", lambda: {"missing": "no driver", "devices": []})
    for call, message in [
        (lambda: sagebwd.emit(head_dim="64"), "head_dim='64'"),
        (lambda: sagebwd.emit(causal="yes"), "causal='yes'"),
        (lambda: sagebwd.emit(causal=None), "causal=None: pass False or 'none', True, 'top-left'"),
        (lambda: sagebwd.emit(window_left=-1), "window_left=-1: .* None for no bound"),
        (lambda: sagebwd.build(dtype="float32"), "dtype='float32'"),
        (lambda: sagebwd.tune(kernels=("x",)), "'x' is no kernel with tiles: those are forward, "),
    ]:
        with pytest.raises(sagebwd.SpecError, match=message):
            call()
    with pytest.raises(sagebwd.LibraryError, match=r"no driver\. Without a GPU, name the arch"):
        sagebwd.emit()


#: A file name's bytes that are no UTF-8, as Python has them: no text that C++ takes.
SURROGATES = "sm_80\udcff"


@pytest.mark.parametrize("name", ["granularity", "precision", "dtype", "causal"])
@pytest.mark.parametrize(
    "call",
    [sagebwd.emit, sagebwd.build, sagebwd.Spec, lambda **more: reference.emulate(*X, **more),
     lambda **more: sagebwd.trace(*X, **more),
     lambda **more: sagebwd.prebuild("a.pack", **dict(arch="sm_80") | more)],
    ids=["emit", "build", "Spec", "emulate", "trace", "prebuild"],
)  # fmt: skip
@pytest.mark.parametrize("value", [SURROGATES, "", np.True_], ids=["surrogates", "empty", "true"])
def test_what_is_no_word(call, name, value):
    with pytest.raises(sagebwd.SpecError, match=f"{name}="):
        call(**{name: value})


@pytest.mark.parametrize("value", [SURROGATES, "", np.True_], ids=["surrogates", "empty", "true"])
def test_what_is_no_architecture(value):
    for call in (sagebwd.emit, sagebwd.build, lambda **more: sagebwd.prebuild("a.pack", **more)):
        with pytest.raises(sagebwd.SpecError, match="arch="):
            call(arch=value)


@pytest.mark.parametrize("name", ["kernels", "tiles"])
def test_what_is_no_tile(name):
    with pytest.raises(sagebwd.SpecError, match=f"{name}=.* pass names"):
        sagebwd.tune(**{name: (SURROGATES,)})


@pytest.mark.parametrize("scale", [True, 1e300, -1e-30, float("nan"), "1"])
def test_softmax_scales(scale):
    for function in (reference.exact, reference.emulate, sagebwd.trace):
        with pytest.raises(sagebwd.SpecError, match=r"number below 3\.4e38 in magnitude, 0 or "):
            function(*X, softmax_scale=scale)


def test_what_is_too_large_is_infinite(recwarn):
    assert reference.round_to(1e300, "bf16") == np.inf
    assert not recwarn.list


def test_articles():
    with pytest.raises(TypeError, match="dlse is an int;"):
        reference.exact(*X, dlse=5)


@needs_torch
@pytest.mark.parametrize("function", [reference.exact, reference.emulate, sagebwd.trace])
def test_meta_tensors_have_no_values(function):
    with pytest.raises(sagebwd.SpecError, match="q is a meta tensor"):
        function(*[torch.empty(1, 1, 8, 64, device="meta")] * 4)


@needs_torch
def test_a_device_of_pytorch(monkeypatch):
    """As warmup() takes it; here it is in vain, and the advice is each function's own."""
    monkeypatch.setattr(sagebwd._core, "driver", lambda: {"missing": "no driver", "devices": []})
    device = torch.device("cuda", 0)
    with pytest.raises(sagebwd.LibraryError, match=r"no driver\. Tuning times kernels"):
        sagebwd.tune(device=device)
    with pytest.raises(sagebwd.LibraryError, match=r"no driver\. Warming up loads kernels"):
        sagebwd.warmup(device=device)
    with pytest.raises(sagebwd.SpecError, match="device="):
        sagebwd.tune(device=torch.device("cpu"))


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
#: Each function takes these where only one parameter is wrong. tune() and warmup() need a GPU, and
#: build() and prebuild() a compiler, once their arguments are right.
CALLS = {
    sagebwd.trace: TENSORS,
    reference.exact: TENSORS,
    reference.emulate: TENSORS,
    reference.round_to: dict(array=X[0], dtype="bf16"),
    reference.random_inputs: dict(seq_len=8, head_dim=64),
    sagebwd.named_inputs: dict(name="gaussian", seq_q=8, head_dim=64),
    sagebwd.emit: SMALL,
    sagebwd.build: SMALL | dict(backward=False),
    sagebwd.prebuild: SMALL | dict(out="absent/a.pack", dtype="bf16", causal="none",
                                   backward=False),
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
        return [name for name in sagebwd._core.spec_fields if name != "numerics"]
    return [name for name in inspect.signature(function).parameters if name != "group"]  # PyTorch's


@pytest.mark.anywhere
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
