"""Both branches as one operation: what it computes, what it keeps, and its peak of memory."""

import gc
import weakref

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import drawn  # noqa: E402
from stand_in import listed_kernels_on_the_cpu  # noqa: E402, F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sagebwd.core import forms, ops, watching  # noqa: E402
from sagebwd.lists import list_ops  # noqa: E402
from sagebwd.sla import estimated_kernels, mixed, parts  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def apart(tensors, alpha, **given):
    """Each branch and the mixture are functions of their own here."""
    return sagebwd.sparse_linear_attention(*tensors, alpha=alpha, return_branches=True, **given)[0]


def gradients(out, leaves, dout):
    return torch.autograd.grad(out, leaves, dout)


def sixteen_bit(heads=4, heads_kv=2, tokens=700):
    torch.manual_seed(0)
    tensors = [torch.randn(1, h, tokens, 64, dtype=torch.bfloat16).requires_grad_()
               for h in (heads, heads_kv, heads_kv)]  # fmt: skip
    mask = torch.rand(1, heads, -(-tokens // 128), -(-tokens // 64)) < 0.3
    mask[:, :, 1], mask[:, :, 2] = False, True
    return tensors, mask, torch.randn(1, heads, tokens, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("alpha", [0.3, "estimated"])
@pytest.mark.parametrize("form", ["mask", "indices"])
def test_kernels_have_the_same_part_in_it(listed_kernels_on_the_cpu, alpha, form):  # noqa: F811
    """The outputs have the same bits; gradients of both branches are added before they are rounded,
    in place of after."""
    tensors, mask, dout = sixteen_bit()
    given = dict(block_mask=mask)
    if form == "indices":
        order = (~mask).int().argsort(-1).int()
        given = dict(block_indices=order, block_counts=mask.sum(-1, dtype=torch.int32))
    given |= dict(granularity="row", rotate=False, precision="qk16")
    out = sagebwd.sparse_linear_attention(*tensors, alpha=alpha, **given)
    expected = apart(tensors, alpha, **given)
    assert torch.equal(out, expected)
    for x, y in zip(gradients(out, tensors, dout), gradients(expected, tensors, dout)):
        assert (x - y).norm() < 0.003 * y.norm()
    once, again = listed_kernels_on_the_cpu[0], set(listed_kernels_on_the_cpu)
    assert again == {once} and all(word in once for word in (
        "causal=none", "precision=qk16", "rotate=no", "sparse_q=128", "sparse_kv=64"))  # fmt: skip


def test_what_kernels_say_is_nan_is_nan(listed_kernels_on_the_cpu):  # noqa: F811
    tensors, mask, _ = sixteen_bit()
    indices = torch.zeros(1, 1, mask.shape[2], 1, dtype=torch.int32)
    indices[0, 0, 3] = mask.shape[3]
    for alpha in (0.0, 0.3, "estimated"):
        out = sagebwd.sparse_linear_attention(*tensors, alpha=alpha, block_indices=indices)
        assert torch.equal(out.isnan().all(-1), out.isnan().any(-1))
        assert torch.equal(out.isnan()[0, 2, :, 5], torch.arange(700) // 128 == 3)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it have had at once."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, torch.Tensor):
                self._add(t.untyped_storage())
        return found

    def at_most(self, more=0):
        self.most = max(self.most, self.now + more)

    def _add(self, storage):
        at, size = storage.data_ptr(), storage.nbytes()
        if at in self.known or not size:
            return
        self.known.add(at)
        self.now += size
        self.at_most()

        def gone():
            self.known.discard(at)
            self.now -= size

        weakref.finalize(storage, gone)


def measured(function, tensors, dout):
    """(bytes that are kept for the backward beside inputs and output, the peak), by the size of
    V."""
    of_v = tensors[2].numel() * tensors[2].element_size()
    known, kept = {t.untyped_storage().data_ptr() for t in tensors}, {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    gc.collect()
    with Peak([*tensors, dout]) as Workspace.peak:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = function(*tensors)
        known.add(out.untyped_storage().data_ptr())
        found = gradients(out, tensors, dout)
    assert len(found) == 3
    bytes_kept = sum(size for at, size in kept.items() if at not in known)
    return bytes_kept / of_v, Workspace.peak.most / of_v


class Workspace:
    """Kernels that compute nothing and take the memory of real ones, whose backward has five copies
    of a byte an element. The memory inside of an operator is hidden from `peak`."""

    peak = None

    def forward(self, q, k, v, packing):
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(self, dout, q, k, v, *rest, packing):
        copies = sum(t.numel() for t in (q, q, k, k, dout))
        found = tuple(map(torch.zeros_like, (q, k, v)))
        self.peak.at_most(copies + sum(t.numel() * t.element_size() for t in found))
        return found


class MixedWorkspace:
    """The same for both branches as one operation: plans of 32,768 tokens in blocks of 128 ask for
    3.6 times V of a backward's part."""

    def __init__(self, keeps_sums):
        self.keeps_sums, self.bytes_of_sums = keeps_sums, 0

    def forward(self, q, k, v, bits, alpha):
        if self.keeps_sums:  # a matrix and a vector per block of 128 queries
            of_block = q.shape[3] * (2 * q.shape[3] + 4)
            self.bytes_of_sums = q.shape[1] * -(-q.shape[2] // 128) * of_block
        sums = torch.zeros(self.bytes_of_sums, dtype=torch.uint8)
        return torch.zeros_like(q), torch.zeros_like(q), torch.zeros(q.shape[:3]), sums

    def new_gradients(self, q, k, v):
        return *map(torch.zeros_like, (q, k, v)), torch.zeros(q.shape[:3])

    def backward(self, to, dout, q, k, v, kept, *rest):
        assert all(t.is_contiguous() for t in to) and kept.shape == q.shape
        whole = sum(t.untyped_storage().nbytes() for t in to)
        is_part = to[0].untyped_storage().nbytes() > 2 * to[0].numel()
        if Workspace.peak:  # parts form their exact output again
            Workspace.peak.at_most(whole + int((3.6 + is_part) * 2 * v.numel()))


@pytest.fixture
def idle_kernels(monkeypatch):
    """The kernels' way with kernels that compute nothing, on CPU tensors."""

    class Operation:
        def run_linear(self, *given):
            pass

        def estimated_parts(self, problem):
            return 1

    mixed_forms = {keeps: MixedWorkspace(keeps) for keeps in (False, True)}

    def mixed_form_of(bits, alpha, q, k, v, tokens, of_rest, keeps_sums, *rest):
        return mixed_forms[keeps_sums], bits

    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(list_ops, "_form_of", lambda q, k, v, bits, *_: (Workspace(), (bits,)))
    monkeypatch.setattr(mixed, "_form_of", mixed_form_of)
    monkeypatch.setattr(forms, "operation", lambda *told, **more: Operation())
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    for name in ("forward", "backward"):
        monkeypatch.setattr(estimated_kernels, name, getattr(estimated_kernels, f"_{name}"))

    def added(to, *given):
        return estimated_kernels._backward(*given, to[1].shape[2], to=to)

    monkeypatch.setattr(estimated_kernels, "added", added)


@pytest.mark.parametrize("alpha", [0.3, "estimated"])
def test_it_keeps_one_output_and_has_a_lower_peak(idle_kernels, alpha, monkeypatch):
    """Figures are sizes of V, without inputs. The output and three gradients are 4 of the peak."""
    monkeypatch.setattr(parts, "PART_BYTES", 1)  # a head at a time, whose matrices are .3 V here
    tensors, mask, dout = sixteen_bit(heads=64, heads_kv=64, tokens=1024)

    def fused(*tensors):
        return sagebwd.sparse_linear_attention(*tensors, alpha=alpha, block_mask=mask)

    kept, peak = measured(fused, tensors, dout)
    kept_apart, peak_apart = measured(lambda *t: apart(t, alpha, block_mask=mask), tensors, dout)
    print(f"alpha={alpha}: kept {kept:.2f} and {kept_apart:.2f}, "
          f"peak {peak - 4:.2f} and {peak_apart - 4:.2f} beside output and gradients")  # fmt: skip
    assert kept < 1.75 and kept_apart > 2  # sums of half of V, and an output or its like
    assert peak - 4 <= 5.3 < peak_apart - 4


@pytest.mark.parametrize(
    "heads, alpha", [(13, 0.3), (24, 0.3), (16, "rows"), (13, "estimated"), (24, "estimated")])
def test_kernels_leave_room_for_output_and_gradients_alone(idle_kernels, monkeypatch, heads, alpha):
    """5 times V, of which 4 are the output and the three gradients."""
    tensors = [torch.zeros(1, heads, 1024, 128, dtype=torch.bfloat16).requires_grad_()
               for _ in range(3)]  # fmt: skip
    mask, dout = torch.zeros(1, heads, 8, 8, dtype=torch.bool), torch.zeros_like(tensors[0])
    alpha = drawn(heads, 8, dtype=torch.float32) if alpha == "rows" else alpha

    def call(*tensors):
        return sagebwd.sparse_linear_attention(*tensors, alpha=alpha, block_mask=mask,
                                               block_size=(128, 128))  # fmt: skip

    _, whole = measured(call, tensors, dout)
    monkeypatch.setattr(mixed, "LEAST_QUERIES", 1024)
    kept, peak = measured(call, tensors, dout)
    print(f"kept {kept:.2f}, peak {peak:.2f}, and {whole:.2f} with all heads at once")
    assert kept < 1.1 and peak < 5 and whole > 7


@pytest.mark.parametrize("alpha", [0.3, "estimated"])
def test_watchers_hear_of_one_backward(idle_kernels, monkeypatch, alpha):
    class Watcher:
        heard = ()

        def backward_ran(self, call, tensors):
            self.heard += ((call, tensors),)

    monkeypatch.setattr(watching, "watchers", (Watcher(),))
    monkeypatch.setattr(mixed, "LEAST_QUERIES", 1)
    tensors, mask, dout = sixteen_bit()
    out = sagebwd.sparse_linear_attention(*tensors, alpha=alpha, block_mask=mask)
    gradients(out, tensors, dout)
    assert [tensors for _, tensors in watching.watchers[0].heard] == [()]
