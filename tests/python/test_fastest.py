"""precision='fastest': what it stands for on each GPU, and that no spec says anything else."""

import numpy as np
import pytest

import sagebwd
from sagebwd import _core, reference
from sagebwd.core import fastest, options

DEFAULT = ("six-of-seven", "fp32")
HOPPER, GEFORCE = ("gradients16", "fp32"), ("six-of-seven", "fp16")
RTX_4090 = (8, 9, "NVIDIA GeForce RTX 4090")
H100 = (9, 0, "NVIDIA H100 80GB HBM3")


def words(gpu, keeps_dp_sums=False, **given):
    return _core.fastest_precision(*gpu, keeps_dp_sums, **{"head_dim": "64", **given})


@pytest.mark.parametrize(("gpu", "expected"), [
    (H100, HOPPER),
    ((9, 0, "NVIDIA H200"), HOPPER),
    ((9, 0, "NVIDIA GH200 480GB"), HOPPER),
    ((9, 0, "NVIDIA H20"), DEFAULT),
    ((8, 0, "NVIDIA A100-SXM4-80GB"), DEFAULT),
    ((8, 6, "NVIDIA GeForce RTX 3090"), GEFORCE),
    ((8, 6, "NVIDIA RTX A6000"), DEFAULT),
    ((8, 7, "Orin"), DEFAULT),
    (RTX_4090, GEFORCE),
    ((8, 9, "NVIDIA L40S"), DEFAULT),
    ((10, 0, "NVIDIA B200"), DEFAULT),
    ((12, 0, "NVIDIA GeForce RTX 5090"), GEFORCE),
    ((12, 0, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"), DEFAULT),
    ((12, 1, "NVIDIA GB10"), DEFAULT),
])  # fmt: skip
def test_by_gpu(gpu, expected):
    assert words(gpu) == expected
    assert words(gpu, dtype="fp16", head_dim="128", causal="top-left") == expected
    kept = words(gpu, keeps_dp_sums=True, dp_sums="fp32")
    assert kept == (expected[0], "fp32")


@pytest.mark.parametrize(("gpu", "given", "expected"), [
    (RTX_4090, {"head_dim": "256"}, DEFAULT),
    (RTX_4090, {"score": "s/2.0"}, DEFAULT),
    (RTX_4090, {"granularity": "block"}, GEFORCE),
    (H100, {"head_dim": "256"}, HOPPER),
    (H100, {"score": "s/2.0"}, HOPPER),
    (H100, {"smooth_q": "yes"}, DEFAULT),
    (H100, {"gradient_kernels": "fused"}, DEFAULT),
    (H100, {"gradient_kernels": "fused", "deterministic": "no"}, HOPPER),
    (H100, {"dq_sums": "fp16", "deterministic": "no"}, HOPPER),
])  # fmt: skip
def test_what_options_exclude(gpu, given, expected):
    assert words(gpu, **given) == expected
    precision, dp_sums = expected
    spec = sagebwd.Spec(**{name: value for name, value in given.items()
                           if name not in ("deterministic", "smooth_q", "head_dim")},
                        head_dim=int(given.get("head_dim", 64)), smooth_q="smooth_q" in given,
                        deterministic="deterministic" not in given, precision=precision,
                        dp_sums=dp_sums)  # fmt: skip
    arch = _core.arch_for_capability(*gpu[:2])
    assert _core.emit(spec, arch, True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_errors_are_at_most_a_percent_larger(head_dim):
    given = sagebwd.named_inputs("gaussian", seq_q=512, heads=1, head_dim=head_dim)
    exact = reference.exact(*given)

    def errors(precision, dp_sums):
        found = reference.emulate(*given, precision=precision, dp_sums=dp_sums)
        return [np.linalg.norm(found[name] - exact[name]) for name in ("dq", "dk", "dv")]

    default = errors(*DEFAULT)
    for chosen in HOPPER, GEFORCE:
        assert all(e <= 1.01 * d for e, d in zip(errors(*chosen), default))


def test_every_list_and_mask_has_kernels_of_the_words():
    """Calls ask without saying that they have lists, intervals, a mask or packed sequences."""
    more = ({"sparse_q": 64, "sparse_kv": 64}, {"intervals": 2}, {"mask": "q>=k"}, {"packed": True})
    for gpu, (precision, dp_sums) in ((RTX_4090, GEFORCE), (H100, HOPPER)):
        arch = _core.arch_for_capability(*gpu[:2])
        for head_dim in (64, 128):
            for given in more:
                spec = sagebwd.Spec(head_dim=head_dim, precision=precision, dp_sums=dp_sums,
                                    **given)  # fmt: skip
                assert _core.emit(spec, arch, True)


@pytest.mark.parametrize("call", [
    lambda: sagebwd.Spec(precision="fastest"),
    lambda: sagebwd.Spec("d64 fastest"),
    lambda: sagebwd.emit("sm_90a", precision="fastest"),
    lambda: sagebwd.bench(precision=["qk16", "fastest"]),
    lambda: options.plan_of("fastest"),
], ids=["Spec", "line", "emit", "bench", "plan"])  # fmt: skip
def test_refused_where_no_gpu_is_known(call):
    with pytest.raises(sagebwd.SpecError, match=r"none is known here.*fastest_precision\(\)"):
        call()


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that the driver seems to have."""
    found = []
    monkeypatch.setattr(_core, "driver", lambda: {
        "missing": "" if found else "no driver", "devices": [gpu[:2] for gpu in found],
        "names": [gpu[2].encode(errors="surrogateescape") for gpu in found]})  # fmt: skip
    fastest.gpu_of.cache_clear()
    yield found
    fastest.gpu_of.cache_clear()


def test_the_words_of_a_gpu(gpus):
    gpus += [H100, RTX_4090, (8, 9, "NVIDIA \udcff Future 9000")]
    assert sagebwd.fastest_precision(0) == {"precision": "gradients16", "dp_sums": "fp32"}
    assert sagebwd.fastest_precision(1) == {"precision": "six-of-seven", "dp_sums": "fp16"}
    default = {"precision": "six-of-seven", "dp_sums": "fp32"}
    assert sagebwd.fastest_precision(1, head_dim=256) == default
    assert sagebwd.fastest_precision(2) == default
    for given, message in (((3,), "device 3: there are 3 GPUs"), (("cuda:x",), "device='cuda:x'")):
        with pytest.raises(sagebwd.SpecError, match=message):
            sagebwd.fastest_precision(*given)
    with pytest.raises(sagebwd.SpecError, match="head dimension 260"):
        sagebwd.fastest_precision(1, head_dim=260)


def test_without_a_gpu(gpus):
    with pytest.raises(sagebwd.LibraryError, match="no driver. The fastest.*ask where the kernels"):
        sagebwd.fastest_precision()


# ---- calls ---------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.core import forms  # noqa: E402


@pytest.fixture
def texts(kernels_on_the_cpu, listed_kernels_on_the_cpu, monkeypatch, tiny_tensors):  # noqa: F811
    """The specs of calls, whose tensors are on the CPU as if that were an RTX 4090."""
    found = []
    read = options.spec_of_text

    def spec_of_text(text, **more):
        spec = read(text, **more)
        found.append(str(spec))
        return spec

    monkeypatch.setattr(options, "spec_of_text", spec_of_text)
    monkeypatch.setattr(fastest, "gpu_of", lambda number: RTX_4090)
    return found


def tensors(d=64, count=3, tokens=64):
    return [torch.randn(1, 2, tokens, d).bfloat16() for _ in range(count)]


def whole_mask(q):
    return torch.ones(1, 1, -(-q.shape[2] // 128), -(-q.shape[2] // 64), dtype=torch.bool)


def backward(q, k, v, **given):
    out, lse = sagebwd.attention_forward(q, k, v, **given)
    return sagebwd.attention_backward(torch.ones_like(q), q, k, v, out, lse, **given)


def in_sdpa(q, k, v, **given):
    with sagebwd.sdpa(**given):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


DOORS = {
    "attention": sagebwd.attention,
    "backward": backward,
    "sdpa": in_sdpa,
    "sageattn": sagebwd.sageattn,
    "flash_attn": lambda *qkv, **given: sagebwd.flash_attn_func(
        *(t.transpose(1, 2) for t in qkv), **given),
    "lists": lambda q, k, v, **given: sagebwd.block_sparse_attention(
        q, k, v, block_mask=whole_mask(q), **given),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_specs_have_the_words(door, texts):
    q, k, v = tensors()
    DOORS[door](q, k, v, precision="fastest")
    assert texts and all(" dp_sums=fp16" in text and "six-of-seven" in text for text in texts)
    texts.clear()
    q, k, v = tensors(tokens=80)
    DOORS[door](q, k, v, precision="fastest", dp_sums="fp32")
    assert texts and not any("dp_sums" in text for text in texts)


def test_a_score_function_gets_fp32_sums(texts):
    sagebwd.attention(*tensors(), precision="fastest", score="s / 2.0")
    assert texts and not any("dp_sums" in text for text in texts)


def test_the_precision_of_hopper_in_sla(texts, monkeypatch):
    monkeypatch.setattr(fastest, "gpu_of", lambda number: H100)
    q, k, v = tensors(count=3, tokens=128)
    given = dict(alpha=0.5, block_mask=whole_mask(q))
    sagebwd.sparse_linear_attention(q, k, v, precision="fastest", **given)
    assert any("gradients16" in text for text in texts)
    module = sagebwd.nn.SparseLinearAttention(64, 2, seq_len=128, precision="fastest")
    assert "precision='fastest'" in repr(module)
    texts.clear()
    module(q, k, v)
    assert any("gradients16" in text for text in texts)


def test_compiled_calls_have_one_graph(texts):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def layer(q, k, v):
        return sagebwd.attention(q * 1, k, v, precision="fastest", causal=True)

    for tokens in (96, 80, 72):  # not as many as channels, which PyTorch would take for a rule
        given = tensors(tokens=tokens)
        assert torch.equal(layer(*given), sagebwd.attention(*given, causal=True, dp_sums="fp16"))
    assert counter.frame_count == 1
    assert any(" dp_sums=fp16" in text for text in texts)


def test_warming_up(gpus, monkeypatch):
    gpus += [H100, RTX_4090]
    lines = []

    class Operation:
        def __init__(self, device, text):
            lines.append((device, text))

        def warmup(self, backward, sizes):
            pass

    monkeypatch.setattr(forms, "operation", Operation)
    sagebwd.warmup(device="cuda:1", head_dim=64, precision="fastest")
    sagebwd.warmup(device=torch.device("cuda", 0), head_dim=64, precision="fastest")
    (one, geforce), (zero, hopper) = lines
    assert (one, zero) == (1, 0) and "precision=gradients16" in hopper
    assert "precision=six-of-seven" in geforce and "dp_sums=fp16" in geforce


def test_models_are_given_it():
    from sagebwd.integrations._options import Chosen

    chosen = Chosen()
    chosen.use(precision="fastest", granularity="block")
    assert chosen.options == {"precision": "fastest", "granularity": "block"}
    with pytest.raises(sagebwd.SpecError, match="granularity"):
        chosen.use(precision="fastest", granularity="rows")
