"""Kernels of norm and RoPE on a simulated GPU, whose memory is that of PyTorch's CPU tensors,
against FP64."""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import simulator_needed  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.core import forms, front, front_kernels  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import front_inputs  # noqa: E402
import warm  # noqa: E402


class _Operators:
    """Stands for torch.ops.sagebwd: CPU tensors take the kernels that they would take on a GPU."""

    def __init__(self):
        self.ran = []

    def _call(self, name, *given):
        q, k, *rest = given[-15:] if name == "_forward" else given[2:-1]
        assert front_kernels._suits(q, k, rest[4], *rest[10:])
        self.ran.append(name)
        return getattr(front_kernels, name)(*given)

    def front_forward(self, *given):
        return self._call("_forward", *given)

    def front_backward(self, *given):
        return self._call("_backward", *given)


@pytest.fixture
def kernels(monkeypatch):
    operation, operators = forms.operation, _Operators()
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    monkeypatch.setattr(front, "operators", lambda: operators)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    assert torch.ones(3).new_empty(3).isnan().all()
    yield operators.ran
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", front_inputs.NAMES)
@pytest.mark.parametrize(
    "dtype, channels, of",
    [
        (torch.bfloat16, 64, {}),
        (torch.float16, 128, dict(layout="bshd")),
        (torch.bfloat16, 72, dict(slices=True)),
    ],
    ids=["D64_bf16", "D128_fp16_bshd", "D72_bf16_slices"],
)
def test_results_and_gradients_are_near_fp64(kernels, name, dtype, channels, of):
    def twice():
        return front_inputs.assert_call(sagebwd.qk_norm_rope, name, dtype, channels=channels, **of)

    found = twice()
    assert kernels == ["_forward", "_backward"]
    for first, second in zip(found, twice()):
        assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_tables_that_no_kernel_reads_are_copied(kernels):
    """Tables may have 16 bits or every second number, or lie at an odd place."""
    q, k = front_inputs.inputs(torch.bfloat16)
    cos, sin = front_inputs.table(50, 64)
    for change in (
        lambda t: t[:, :32].bfloat16(),
        lambda t: t[:, ::2],
        lambda t: torch.nn.functional.pad(t[:, :32], (1, 0))[:, 1:],
        lambda t: t[0, :32].expand(50, 32),
    ):
        rope_k = change(cos), change(sin)
        rope = tuple(t[:37] for t in rope_k)
        found = sagebwd.qk_norm_rope(q, k, q_norm=True, rope=rope, rope_k=rope_k)
        wanted = front_inputs.exact(q, k, q_norm=True, rope=rope, rope_k=rope_k)
        for y, of in zip(found, wanted):
            front_inputs.assert_near(y, of, "y", front_inputs.LAST[torch.bfloat16])
    assert kernels == ["_forward"] * 4


@pytest.mark.parametrize(
    "back",
    [
        lambda t: t.half() if t.shape[:2] == (2, 2) else t,  # k
        lambda t: t[:40] if t.dim() == 1 else t,  # the gain
        lambda t: t[:, :8] if t.shape[:2] == (2, 37) else t,  # a table
    ],
    ids=["k", "gain", "table"],
)
def test_hooks_that_bring_back_other_tensors_are_refused(kernels, back):
    """Kernels are told addresses, and would not know."""
    q, k = (t.requires_grad_() for t in front_inputs.inputs(torch.bfloat16))
    gain = torch.ones(64, requires_grad=True)
    given = dict(q_norm=gain, rope=front_inputs.table(37, 32), rope_k=front_inputs.table(50, 32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), back):
        found = sagebwd.qk_norm_rope(q, k, **given)
    with pytest.raises(sagebwd.SpecError, match="bring back what it was given"):
        torch.autograd.grad(found[0].sum(), (q, gain))


def test_tokens_of_zeros_give_no_nan(kernels):
    q, k = torch.zeros(1, 2, 300, 64).bfloat16(), torch.zeros(1, 1, 3, 64).bfloat16()
    q.requires_grad_()
    found = sagebwd.qk_norm_rope(q, k, q_norm=torch.ones(64), k_norm=True)
    (gradient,) = torch.autograd.grad(found[0].sum(), q)
    assert not any(t.any() for t in found) and gradient.isfinite().all() and gradient.any()


def test_eps_may_be_zero(kernels):
    """A block may have fewer tokens than it could have, and 1/rms of none is infinite."""
    q, k = (t + 0.25 for t in front_inputs.inputs(torch.bfloat16))  # no token is 0

    def called(eps):
        leaves = [q.detach().requires_grad_(), torch.ones(64, requires_grad=True)]
        found = sagebwd.qk_norm_rope(leaves[0], k, q_norm=leaves[1], norm_eps=eps)[0]
        return found.detach(), *torch.autograd.grad(found.float().square().sum(), leaves)

    for x, y in zip(called(0.0), called(1e-30)):
        assert x.isfinite().all() and torch.equal(x, y)


def test_built_kernels_serve_where_nothing_may_be_compiled(tmp_path):
    """An operation is built with its norm and RoPE, and an error names the command that does."""
    cases = ["-q", "-p", "no:cacheprovider", __file__, "-k", "fp64 and D64_bf16 and gains"]
    program = ["-c", f"import pytest, sys; sys.exit(pytest.main({cases}))"]
    environment = {**os.environ, "SAGEBWD_CACHE_DIR": str(tmp_path / "cache")}
    offline = {**environment, "SAGEBWD_OFFLINE": "1"}
    refused = warm.run(program, env=offline)
    assert refused.returncode == 1
    assert "sagebwd prebuild --arch sm_90a --spec 'd64 bf16 " in refused.stdout
    build = ["-c", "import sagebwd; sagebwd.build('sm_90a', head_dim=64)"]
    assert warm.run(build, env=environment).returncode == 0
    served = warm.run(program, env=offline)
    assert served.returncode == 0 and "2 passed" in served.stdout, served.stdout
