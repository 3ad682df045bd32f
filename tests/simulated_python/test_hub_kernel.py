"""The kernel for the Hub on a simulated GPU: with FP64, with sagebwd.attention, and loaded by the
Hub's own library and by transformers, where these are installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from simulator_needed import FOLDER  # noqa: E402
from test_linear_branch import kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

import sagebwd  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))

import hub_kernel  # noqa: E402

LIBRARY = FOLDER.parent / "hub-library/libsagebwd.so"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not LIBRARY.exists():
        pytest.skip("needs the target sagebwd_hub")
    there = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, ROOT / "hub/write.py", LIBRARY, there], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return there


@pytest.fixture(scope="module")
def loaded(folder):
    return hub_kernel.by_hand(folder)


def of(kernel, name):
    """A module of the kernel's package."""
    return sys.modules[f"{kernel.__name__}.{name}"]


@pytest.fixture
def kernel(loaded, monkeypatch):
    """It takes CPU tensors, as the simulator does."""
    passes = of(loaded, "_passes")
    monkeypatch.setattr(passes, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(passes, "index_of", lambda device: 0)
    monkeypatch.setattr(passes, "stream_of", lambda device: 0)
    return loaded


@pytest.mark.parametrize("name", hub_kernel.CASES)
def test_it_computes_what_the_package_computes(kernel, name):
    found = hub_kernel.check_case(kernel, name, "cpu")
    hub_kernel.check_bits(sagebwd, name, "cpu", found)


def test_packed_sequences(kernel):
    hub_kernel.check_packed(kernel, "cpu")


FLASH = {
    "a window": dict(causal=True, window_size=(20, 20)),
    "both sides": dict(window_size=(10, 5)),
    "a cap": dict(causal=True, softcap=2.0, softmax_scale=0.3),
    "what asks for nothing": dict(dropout_p=0.0, alibi_slopes=None, deterministic=True),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FLASH)
def test_flash_attentions_functions_are_those_of_the_package(kernel, name, packed):
    q, k, v = (t.transpose(1, 2).detach() for t in hub_kernel.inputs("plain", "cpu")[0])
    function, given = "flash_attn_func", [q, k, v]
    if packed:
        firsts = torch.tensor([0, 60, 130], dtype=torch.int32)
        function = "flash_attn_varlen_func"
        given = [*(t[0].contiguous() for t in (q, k, v)), firsts, firsts]
    found, expected = (getattr(of, function)(*given, return_attn_probs=True, **FLASH[name])
                       for of in (kernel, sagebwd))  # fmt: skip
    assert all(map(torch.equal, found[:2], expected[:2])) and found[2] is expected[2] is None


def test_packed_sequences_with_sinks(kernel):
    """transformers calls them s_aux, in the dtype of the queries."""
    q, k, v = (t[0].transpose(0, 1).contiguous().detach().requires_grad_()
               for t in hub_kernel.inputs("plain", "cpu")[0])  # fmt: skip
    sinks = torch.tensor([1.0, -0.5, 2.0, 0.0]).bfloat16().requires_grad_()
    firsts = torch.tensor([0, 60, 130], dtype=torch.int32)
    out = kernel.flash_attn_varlen_func(q, k, v, firsts, firsts, 70, 70, s_aux=sinks)
    expected = sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts,
                                 sink_logits=sinks)  # fmt: skip
    gradients = (torch.autograd.grad(o.float().square().sum(), (q, k, v, sinks))
                 for o in (out, expected))  # fmt: skip
    assert max(hub_kernel.distances([out], [expected.double()])) < 1e-2
    assert max(hub_kernel.distances(*gradients)) < 2e-2


def test_compilers_see_no_break(kernel):
    hub_kernel.check_compiled(kernel, "cpu", "aot_eager")


def test_the_operators_keep_pytorchs_rules(kernel):
    (q, k, v), *_ = hub_kernel.inputs("plain", "cpu")
    words = "causal=none six-of-seven"
    torch.library.opcheck(of(kernel, "_ops").forward.default,
                          (q, k, v, None, None, None, "bhsd", words),
                          test_utils=("test_schema", "test_autograd_registration",
                                      "test_faketensor"))  # fmt: skip


def test_inputs_are_not_copied(kernel, monkeypatch):
    (q, k, v), *_ = hub_kernel.inputs("bshd", "cpu")
    seen = []
    native = of(kernel, "_native")
    monkeypatch.setattr(native.Operation, "run", lambda self, args, *more: seen.append(
        (args.q.data, args.k.data, args.v.data)))  # fmt: skip
    kernel.attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert seen == [(q.data_ptr(), k.data_ptr(), v.data_ptr())]


def test_no_queries_and_no_keys(kernel):
    q, k = torch.zeros(1, 2, 0, 64).bfloat16(), torch.zeros(1, 2, 5, 64).bfloat16()
    assert kernel.attention(q, k, k).shape == q.shape
    out, lse = kernel.attention(k, q, q, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())


def test_it_is_differentiated_once(kernel):
    (q, k, v), dout, *_ = hub_kernel.inputs("plain", "cpu")
    (dq,) = torch.autograd.grad(kernel.attention(q, k, v), q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="once"):
        dq.sum().backward()


X = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
REFUSED = {
    "torch.float32: torch.bfloat16 and": lambda f: f.attention(X.float(), X, X),
    "four dimensions are supported": lambda f: f.attention(X[0], X[0], X[0]),
    "k must have one head_dim": lambda f: f.attention(X, X[..., :32], X[..., :32]),
    "a multiple is supported": lambda f: f.attention(X, X.repeat(1, 2, 1, 1),
                                                     X.repeat(1, 2, 1, 1)),
    r"Pass q\.contiguous\(\)": lambda f: f.attention(X.mT.contiguous().mT, X, X),
    "supported are six-of-seven, ": lambda f: f.attention(X, X, X, precision="fp8"),
    "multiples of 8 from 32": lambda f: f.attention(*[X[..., :20].contiguous()] * 3),
    "causal=True is ambiguous": lambda f: f.attention(X[:, :, :4], X, X, causal=True),
    "layout='sbhd': pass 'bhsd'": lambda f: f.attention(X, X, X, layout="sbhd"),
    "dropout is not supported": lambda f: f.flash_attn_func(X, X, X, 0.1),
    "window_size=3: pass": lambda f: f.flash_attn_func(X, X, X, window_size=3),
    r"pass a tensor of \(2,\)": lambda f: f.attention(X, X, X, sink_logits=torch.zeros(3)),
    "int32 of": lambda f: f.flash_attn_varlen_func(X[0], X[0], X[0], torch.zeros(2),
                                                   torch.zeros(2)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_errors_say_what_is_supported(kernel, message):
    with pytest.raises(kernel.SpecError, match=message):
        REFUSED[message](kernel)


def test_tensors_on_the_cpu_are_refused(loaded):
    with pytest.raises(loaded.SpecError, match="the kernels need a CUDA GPU"):
        loaded.attention(*[X[:, :, :3]] * 3)


# ---- loaded by others, each in a process of its own ----------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, hub_kernel, workspaces
torch.Tensor.new_empty = workspaces.aligned(torch.Tensor.new_empty)
def on_the_cpu(kernel):
    passes = sys.modules[kernel.__name__ + "._passes"]
    passes.DEVICES, passes.index_of, passes.stream_of = ("cpu",), lambda _: 0, lambda _: 0
    return kernel
"""
BY_KERNELS = """
kernel = on_the_cpu(hub_kernel.by_kernels(sys.argv[2]))
for name in ("causal", "bshd"):
    hub_kernel.check_case(kernel, name, "cpu")
from kernels import get_loaded_kernels
metadata = get_loaded_kernels()[0].metadata
print(metadata.id == kernel.__name__, metadata.backend.archs[0])
"""
BY_TRANSFORMERS = """
from kernels import get_kernel
on_the_cpu(get_kernel("sagebwd/attention", version=1))
hub_kernel.check_model("sagebwd/attention", "cpu")
print("True 8.0")
"""


def needs_kernels():
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("needs the package kernels of the Hub")


@pytest.mark.parametrize("code", [BY_KERNELS, BY_TRANSFORMERS], ids=["kernels", "transformers"])
def test_the_hubs_library_loads_it(folder, code):
    needs_kernels()
    if code is BY_TRANSFORMERS and not hub_kernel.transformers_takes_kernels():
        pytest.skip("needs the package kernels of the Hub as transformers takes it")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + code, ROOT / "tests/python", folder],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"sagebwd/attention={folder}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 8.0"
