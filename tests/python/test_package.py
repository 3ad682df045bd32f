"""The tests ask what importing gives, with and without PyTorch."""

import ast
import copy
import dataclasses
import inspect
import os
import pickle
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import sagebwd
from sagebwd.core import options

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; "


def python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_public_name_is_there_and_documented():
    for name in sagebwd.__all__:
        value = getattr(sagebwd, name)
        assert name == "PRODUCTS" or inspect.getdoc(value), name


def test_import_opens_no_cuda_library():
    code = (
        BLOCK_TORCH + "import sagebwd; sagebwd.archs(); sagebwd.emit('sm_80', head_dim=64); "
        "maps = open('/proc/self/maps').read(); print('libcuda' in maps, 'libnvrtc' in maps)"
    )
    assert python(code).split() == ["False", "False"]


def test_without_torch_the_rest_works():
    code = BLOCK_TORCH + (
        "import sagebwd\n"
        "q, k, v, dout = sagebwd.reference.random_inputs(32, head_dim=64)\n"
        "assert sagebwd.trace(q, k, v, dout)['dQ']['cosine'] > 0.99\n"
        "assert sagebwd.emit('sm_90a')\n"
        "for name in ('attention', 'attention_forward', 'attention_backward', 'warmup'):\n"
        "    try: getattr(sagebwd, name)(q, k, v)\n"
        "    except ImportError as error: print(error)\n"
    )
    refusals = python(code).splitlines()
    assert len(refusals) == 4
    assert all("needs PyTorch" in line and "pip install torch" in line for line in refusals)


def test_an_extension_for_another_python_is_named(tmp_path):
    source = Path(sagebwd.__file__).resolve().parent
    package = tmp_path / "sagebwd"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))

    def refusal():
        result = subprocess.run(
            [sys.executable, "-c", "import sagebwd"], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert result.returncode == 1
        assert "circular" not in result.stderr and result.stderr.count("Traceback") == 1
        return result.stderr.splitlines()[-1]

    assert "is not built" in refusal()
    (package / "_core.cpython-38-x86_64-linux-gnu.so").write_text("")
    message = refusal()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for part in ("built for another Python", "cpython-38", f"this is Python {version}"):
        assert part in message
    (package / f"_core{EXTENSION_SUFFIXES[0]}").write_text("no ELF")
    assert "cannot be loaded" in refusal()


def test_errors_mirror_the_library():
    assert issubclass(sagebwd.SpecError, ValueError)
    for error in (sagebwd.LibraryError, sagebwd.CompileError, sagebwd.DriverError):
        assert issubclass(error, RuntimeError)
    assert sagebwd.SpecError.__module__ == "sagebwd"


def test_dir_lists_what_users_call():
    listed = dir(sagebwd)
    lazy = "distributed", "emulation", "masks", "nn"
    assert {*sagebwd.__all__, *lazy, "__version__"} <= set(listed)
    assert all(n in (*sagebwd.__all__, *lazy) or n.startswith("__") for n in listed), listed


def test_spec_is_a_value():
    assert sagebwd.Spec(head_dim=64) == sagebwd.Spec(head_dim=64, group_q=64, group_kv=128)
    assert sagebwd.Spec(head_dim=64) != sagebwd.Spec(head_dim=128)
    assert len({sagebwd.Spec(head_dim=64), sagebwd.Spec(head_dim=64)}) == 1
    assert "d64 bf16" in str(sagebwd.Spec(head_dim=64))
    assert sagebwd.Spec(mask="").mask == "" and sagebwd.Spec(mask="q >=  k").mask == "q>=k"
    spec = sagebwd.Spec(head_dim=64, causal="top-left", rotate=False)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == copy.copy(spec) == spec
    with pytest.raises(TypeError, match="headdim"):
        sagebwd.Spec(headdim=64)


@pytest.mark.parametrize("more", [
    {}, {"granularity": "block"}, {"window_left": 7}, {"window_right": 7}, {"causal": "top-left"},
    {"sparse_q": 128, "sparse_kv": 64}, {"sparse_q": 64, "sparse_kv": 128, "causal": "top-left"},
])  # fmt: skip
def test_none_means_what_the_help_of_an_option_says(more):
    help = {f.name: f.metadata["help"] for f in dataclasses.fields(options.Options)}
    assert "None means 1 where 1 is supported" in help["sink_keys"]
    try:
        supported = sagebwd.Spec(**more, sink_keys=1).sink_keys
    except sagebwd.SpecError:
        supported = 0
    assert sagebwd.Spec(**more).sink_keys == supported == ("sparse_q" not in more and (
        "window_left" not in more and more.get("granularity") != "block"))  # fmt: skip
    assert "or a block's keys if a list's blocks have fewer" in help["group_kv"]
    usual = {"row": 128, "block": 64}[more.get("granularity", "row")]
    assert sagebwd.Spec(**more).group_kv == min(usual, more.get("sparse_kv", usual))


def test_spec_is_read_from_text_and_back():
    spec = sagebwd.Spec(head_dim=96, causal="bottom-right", window_left=7, rotate=False)
    assert sagebwd.Spec(str(spec)) == spec == eval(repr(spec), {"sagebwd": sagebwd})
    assert repr(spec) == f"sagebwd.Spec('{spec}')"
    assert (spec.head_dim, spec.causal, spec.window_left, spec.rotate, spec.dtype) == (
        96, "bottom-right", 7, False, "bf16")  # fmt: skip
    assert sagebwd.Spec("d64 no-rotate") == sagebwd.Spec(head_dim=64, rotate=False)
    exact = sagebwd.Spec("d64 bf16 causal=none row 64x128 sink_keys=1 six-of-seven numerics=5")
    assert not exact.rotate and not exact.smooth_k and sagebwd.Spec("d64 six-of-seven").rotate


@pytest.mark.parametrize(("line", "message"), [
    ("d64 no-rotat", r"'no-rotat' is no word of a spec \(did you mean 'no-rotate'\?\)"),
    ("d64 head_dim=64", "did you mean 'd64'"), ("d60", "head dimension 60 is not built"),
    ("", "it is empty"), ("d64 \udcff", "characters that are not ASCII"),
])  # fmt: skip
def test_lines_that_are_no_spec(line, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.Spec(line)


def test_spec_says_what_it_takes():
    for call in (lambda: sagebwd.Spec(64), lambda: sagebwd.Spec(b"d64"),
                 lambda: sagebwd.Spec("d64", rotate=False)):  # fmt: skip
        with pytest.raises(TypeError, match=r"Spec\(\) takes one line of text or keywords"):
            call()
    for kind in (TypeError, sagebwd.SpecError):  # and so as every other option that is wrong
        with pytest.raises(kind, match="head_dim='64' is a str: pass a multiple of 8 from 32"):
            sagebwd.Spec(head_dim="64")


def test_spec_carries_the_version_of_its_numerics():
    spec = sagebwd.Spec(head_dim=64)
    assert spec.numerics == 5 and str(spec).endswith(" numerics=5") and "numerics=5" in repr(spec)
    assert pickle.loads(pickle.dumps(spec)).numerics == 5
    of_another_version = pickle.dumps(spec).replace(b"numerics=5", b"numerics=2")
    with pytest.raises(sagebwd.SpecError, match=r"numerics = 2 is not .* computes, which is 5"):
        pickle.loads(of_another_version)
    with pytest.raises(sagebwd.SpecError, match=r"numerics = 6 is not .* computes, which is 5"):
        sagebwd._core.Spec(numerics=6)
    with pytest.raises(TypeError, match="numerics"):  # nobody chooses it
        sagebwd.Spec(numerics=5)


def test_a_family_that_is_none_is_refused_without_a_gpu():
    for word in ("tcgen05", "WGMMA", " mma"):
        with pytest.raises(sagebwd.SpecError) as refused:
            sagebwd._core.Attention(sagebwd.Spec(), 0, word)
        assert f"'{word}'" in str(refused.value)
        assert "supported are mma, wgmma, ws, pair, team" in str(refused.value)


def test_a_family_that_is_none_is_named_at_the_first_call():
    pytest.importorskip("torch", reason="needs PyTorch")
    from sagebwd.core import forms

    with forms.kernels_of("wgma"), pytest.raises(sagebwd.SpecError, match="did you mean 'wgmma'"):
        forms.operation(0, "", head_dim=64, dtype="bf16")
    assert forms._family == ""


def test_options_are_those_of_the_library():
    ours = {f.name: f.default for f in dataclasses.fields(options.Operation)}
    theirs = {name: default for name, (default, _) in sagebwd._core.spec_fields.items()}
    assert sagebwd.Spec().numerics == theirs.pop("numerics")  # nobody chooses it
    assert ours.keys() == theirs.keys()
    unspelled = {"causal": "none", "group_q": 0, "group_kv": 0, "sink_keys": -1,
                 "window_left": -1, "window_right": -1}  # False and None  # fmt: skip
    assert {**ours, **unspelled} == theirs


@pytest.mark.parametrize(("precision", "int8"), list(zip(options.PRECISIONS, (6, 4, 5, 3))))
def test_precisions_are_those_of_the_library(precision, int8):
    plan = options.plan_of(precision)
    assert options.precision_of(plan) == precision
    assert len(plan) + ("s" in plan) == int8  # S is formed in both passes
    assert f"'{precision}'" in options.Options.__dataclass_fields__["precision"].metadata["help"]


def test_sums_of_dq_in_fp16():
    fused = dict(precision="gradients16", deterministic=False)
    spec = sagebwd.Spec(**fused, dq_sums="fp16")
    assert spec.dq_sums == "fp16" and " dq_sums=fp16 " in str(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec != sagebwd.Spec(**fused)
    assert "dq_sums" not in str(sagebwd.Spec(**fused))
    with pytest.raises(sagebwd.SpecError, match=r"dq_sums = fp16 .* under 'deterministic'"):
        sagebwd.Spec(precision="gradients16", dq_sums="fp16")
    with pytest.raises(sagebwd.SpecError, match=r"unknown format of dQ's sums 'fp8'.*fp32, fp16"):
        sagebwd.Spec(**fused, dq_sums="fp8")


def test_sums_of_dp_in_fp16():
    spec = sagebwd.Spec(dp_sums="fp16")
    assert spec.dp_sums == "fp16" and " dp_sums=fp16 " in str(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec != sagebwd.Spec()
    assert "dp_sums" not in str(sagebwd.Spec())
    with pytest.raises(sagebwd.SpecError, match=r"dp_sums = fp16 .* with dq_sums = fp16"):
        sagebwd.Spec(precision="gradients16", deterministic=False, dq_sums="fp16", dp_sums="fp16")
    with pytest.raises(sagebwd.SpecError, match=r"unknown format of dP's sums 'fp8'.*fp32, fp16"):
        sagebwd.Spec(dp_sums="fp8")


def test_nobody_else_looks_inside_the_mask():
    """prebuild() has several values of an option, wherever it stands; messages name them.
    crossover_tokens() has an argument of its own by such a name."""
    inside = {field.name for field in dataclasses.fields(options.Mask)}
    folder = Path(sagebwd.__file__).parent
    found = set()
    rooms = folder / "core", folder / "lists", folder / "numerics"
    for path in (path for room in rooms for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            words = (getattr(node, name, None) for name in ("id", "attr", "arg", "value"))
            if inside & {word for word in words if isinstance(word, str)}:
                found.add(path.stem)
    assert found == {"options", "keywords", "numerics", "prebuilding", "crossover"}


def test_head_dimensions_are_those_of_the_library():
    built = []
    for dim in range(1, 600):
        try:
            built.append(sagebwd.Spec(head_dim=dim).head_dim)
        except sagebwd.SpecError:
            continue
    assert built == list(range(32, 513, 8))
    nearest = {1: 64, 64: 64, 65: 128, 128: 128, 129: 256, 300: 512, 600: 512}
    assert {d: options.width_of(d) for d in nearest} == nearest


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim", 81), ("dtype", "fp32"), ("causal", "left"), ("granularity", "tensor"),
     ("precision", "fp8"), ("group_q", 7)],
)  # fmt: skip
def test_spec_errors_name_the_value(field, value):
    with pytest.raises(sagebwd.SpecError, match=str(value)):
        sagebwd.Spec(**{field: value})
