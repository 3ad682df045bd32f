"""Kernels of an output's gate on a simulated GPU, against FP64."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn  # noqa: E402

from sagebwd import _core  # noqa: E402
from sagebwd.core import forms, gate  # noqa: E402

#: The share of a number by which rounding changes it at most, and FP32's errors before that.
LAST = {torch.bfloat16: 2.0**-8 * 1.01, torch.float16: 2.0**-11 * 1.01}


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that ran. Memory that nobody has written is NaN."""
    operation, ran = forms.operation, []
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    monkeypatch.setattr(gate, "may_run", lambda t: True)
    launch = gate._launch
    monkeypatch.setattr(gate, "_launch", lambda kernel, *rest: (
        ran.append(kernel.__name__), launch(kernel, *rest)))  # fmt: skip
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield ran
    torch.use_deterministic_algorithms(False)


def of_gate(*shape, dtype, part=False):
    """out, a gate whose sigmoid is anything from 2^-24 to 1, and a gradient; `part`: of more."""
    made = [drawn(*shape[:-1], shape[-1] * (2 if part else 1), seed=s, dtype=torch.float32) for s in range(3)]
    made[1] *= 5
    made = [t.to(dtype) for t in made]
    return [t[..., shape[-1]:] for t in made] if part else made


def assert_right(out, gates, gradient):
    leaves = [t.detach().requires_grad_() for t in (out, gates)]
    found = gate.gated(*leaves)
    found = found.detach(), *torch.autograd.grad(found, leaves, gradient)
    o, g, d = (t.double() for t in (out, gates, gradient))
    wanted = o * g.sigmoid(), d * g.sigmoid(), d * o * g.sigmoid() * (-g).sigmoid()
    for x, y in zip(found, wanted):
        assert x.shape == out.shape and x.dtype == out.dtype
        assert ((x.double() - y).abs() <= LAST[out.dtype] * y.abs() + 6e-8).all()
    return found


@pytest.mark.parametrize("dtype", LAST)
@pytest.mark.parametrize(
    "shape", [(2, 3, 130, 64), (1, 70, 2, 128), (37, 4, 256), (2, 2, 65, 72), (1, 1, 1, 32)]
)
def test_it_rounds_once(launches, shape, dtype):
    assert_right(*of_gate(*shape, dtype=dtype))
    assert launches == ["_gate", "gate_gradients"]


def test_parts_and_turned_tensors_are_read_where_they_lie(launches):
    out, gates, gradient = of_gate(2, 70, 3, 64, dtype=torch.bfloat16, part=True)
    turned = [t.transpose(1, 2) for t in (out, gates, gradient)]
    plain = [t.contiguous() for t in turned]
    for x, y in zip(assert_right(*turned), assert_right(*plain)):
        assert torch.equal(x, y)
    assert launches == ["_gate", "gate_gradients"] * 2


def test_what_lies_at_odd_places_is_copied(launches):
    odd = [torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape)
           for t in of_gate(1, 2, 40, 64, dtype=torch.float16)]  # fmt: skip
    assert odd[0].data_ptr() % 16
    assert_right(*odd)
    apart = [torch.stack([t, t], -1)[..., 0] for t in of_gate(1, 2, 40, 64, dtype=torch.float16)]
    assert_right(*apart)
    assert launches == ["_gate", "gate_gradients"] * 2


@pytest.mark.parametrize("turn", [
    lambda t: t.mT.contiguous().mT, lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
])  # fmt: skip
def test_gradients_lie_where_kernels_can_write_them(launches, turn):
    out, gates, gradient = of_gate(1, 2, 40, 64, dtype=torch.bfloat16)
    for x, y in zip(assert_right(turn(out), turn(gates), gradient),
                    assert_right(out, gates, gradient)):  # fmt: skip
        assert torch.equal(x, y)
    assert launches == ["_gate", "gate_gradients"] * 2


def test_hooks_that_bring_back_other_tensors_are_refused(launches):
    leaves = [t.requires_grad_() for t in of_gate(1, 2, 40, 64, dtype=torch.bfloat16)[:2]]
    for change in (lambda t: t[:, :, :39], lambda t: t.float()):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
            found = gate.gated(*leaves)
        with pytest.raises(ValueError, match="a hook for saved tensors has to bring back"):
            torch.autograd.grad(found.sum(), leaves)


def test_gates_at_infinity_open_or_shut(launches):
    out = torch.full((1, 1, 1, 32), 3.0, dtype=torch.bfloat16)
    gates = out.clone()
    gates[..., :8], gates[..., 8:16], gates[..., 16:24] = torch.inf, -torch.inf, torch.nan
    leaves = [out.requires_grad_(), gates.requires_grad_()]
    found = gate.gated(*leaves)
    of_out, of_gates = torch.autograd.grad(found, leaves, torch.ones_like(out))
    assert (found[..., :8] == 3).all() and (of_out[..., :8] == 1).all()
    assert (found[..., 8:16] == 0).all() and (of_gates[..., :16] == 0).all()
    assert found[..., 16:24].isnan().all() and of_gates[..., 16:24].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_refuse_to_be_differentiated(launches, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in of_gate(1, 2, 40, 64, dtype=torch.bfloat16)[:2]]
    found = torch.autograd.grad(gate.gated(*leaves).float().sum(), leaves, create_graph=True)
    for gradient in found:
        with pytest.raises(NotImplementedError, match="differentiated"):
            torch.autograd.grad(gradient.sum(), leaves, retain_graph=True)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_others_take_operations_of_pytorch(launches, dtypes):
    out, gates, _ = of_gate(1, 2, 40, 64, dtype=torch.float32)
    found = gate.gated(out.to(dtypes[0]), gates.to(dtypes[1]))
    assert found.dtype == dtypes[0] and not launches


def test_kernels_refuse_what_they_cannot_read_or_write(launches):
    t = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    place = t.data_ptr(), tuple(t.stride()[:3])
    operation, problem = forms.operation(0, "", head_dim=64, dtype=t.dtype), (1, 2, 2, 40, 40)

    def call(*places):
        _core.gate(operation, problem, places, 0)

    with pytest.raises(ValueError, match="gate: the address is null"):
        call(place, (0, place[1]), place)
    with pytest.raises(ValueError, match="gated: the address is not a multiple of 16 bytes"):
        call(place, place, (place[0] + 2, place[1]))
    with pytest.raises(ValueError, match="out: the token stride is 12 elements"):
        call((place[0], (5120, 2560, 12)), place, place)
    with pytest.raises(ValueError, match="gated.*out|out.*gated"):
        call(place, place, place)  # written where it is read
