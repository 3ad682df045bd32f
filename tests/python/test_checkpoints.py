"""Activation checkpoints of both kinds, inside and around every door to the kernels.

The backward computes the same attention again, whichever thread does it.
"""

import functools
import threading

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from packed_inputs import packed  # noqa: E402
from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sagebwd.integrations import pytorch  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "listed_kernels_on_the_cpu",
                                     "tiny_tensors")  # fmt: skip

KINDS = pytest.mark.parametrize("reentrant", [False, True])


def make(heads_kv=2, layout="bhsd"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 24, 64) for heads in (4, heads_kv, heads_kv)]
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [t.transpose(1, 2).contiguous() if layout == "bshd" else t for t in tensors]


def merged(q, k, v):
    parts = [sagebwd.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
             for at in (slice(0, 16), slice(16, 24))]  # fmt: skip
    return sagebwd.merge(parts)


def of_lse(q, k, v):
    return sagebwd.attention(q, k, v, causal=True, return_lse=True)[1]


def with_sink(q, k, v):
    sink = torch.linspace(-1, 1, 4) + q.float().mean()
    return sagebwd.attention(q, k, v, causal=True, sink_logits=sink)


def joined(q, k, v):
    """The tensors side by side, as the packed drop-ins take them."""
    return torch.stack([q, k, v], 2)


def varlen(q, k, v):
    return sagebwd.flash_attn_varlen_func(q, k, v, *packed()[2].values(), causal=True)


def sequences(q, k, v):
    return sagebwd.attention(q, k, v, return_lse=True, **packed()[2])


def padded(q, k, v):
    used = torch.tensor([24, 10], dtype=torch.int32)
    return sagebwd.attention(q, k, v, causal=True, seqused_q=used, seqused_k=used)


def in_a_context(q, k, v):
    with sagebwd.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def with_lists(function, **given):
    """The tensors come several times in a row: as two blocks of queries and three of keys."""
    mask = torch.tensor([[True, False, True], [False, True, True]])[None, None]

    def call(q, k, v):
        q, k, v = (t.repeat(1, 1, 6, 1)[:, :, :140] for t in (q, k, v))
        return function(q, k, v, block_mask=mask, **given)

    return call


DOORS = {
    "attention": (functools.partial(sagebwd.attention, causal=True), make),
    "out and lse": (functools.partial(sagebwd.attention, return_lse=True), make),
    "lse alone": (of_lse, make),
    "merge": (merged, make),
    "lse of merge": (lambda q, k, v: merged(q, k, v)[1], make),
    "sink logits": (with_sink, make),
    "padded": (padded, make),
    "packed": (sequences, lambda: packed()[0]),
    "lse of packed": (lambda q, k, v: sequences(q, k, v)[1], lambda: packed()[0]),
    "sdpa": (in_a_context, make),
    "sageattn": (sagebwd.sageattn, make),
    "flash": (sagebwd.flash_attn_func, functools.partial(make, layout="bshd")),
    "flash qkv": (lambda q, k, v: sagebwd.flash_attn_qkvpacked_func(joined(q, k, v), causal=True),
                  functools.partial(make, 4, "bshd")),
    "flash varlen": (varlen, lambda: packed()[0]),
    "lists": (with_lists(sagebwd.block_sparse_attention, return_lse=True), make),
    "SLA2": (with_lists(sagebwd.sparse_linear_attention, alpha=0.4), make),
    "SLA2, estimated": (with_lists(sagebwd.sparse_linear_attention, alpha="estimated"), make),
    "branches of SLA2": (with_lists(sagebwd.sparse_linear_attention, alpha=0.4,
                                    return_branches=True), make),
    "PyTorch's drop-in": (functools.partial(sagebwd.scaled_dot_product_attention, enable_gqa=True),
                          make),
}  # fmt: skip


def gradients_of(call, tensors):
    """They are of a sum over all results, by backward(), which checkpoints of both kinds take."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    finite = [r.where(r.isfinite(), 0) for r in results]  # of lse where a query sees nothing
    sum((r.float() ** 2).sum() for r in finite).backward()
    return [t.grad for t in leaves]


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@KINDS
@pytest.mark.parametrize("door", DOORS)
def test_every_door_inside_a_checkpoint(door, reentrant):
    call, tensors = DOORS[door]
    for _ in range(3):  # of later calls the form is known
        expected = gradients_of(call, tensors())
        found = gradients_of(
            lambda *qkv: checkpoint(call, *qkv, use_reentrant=reentrant), tensors())
        assert_equal(found, expected)


@pytest.mark.parametrize("door", DOORS)
def test_each_saved_tensor_is_read_once(door):
    call, tensors = DOORS[door]
    for _ in range(3):
        read = []

        def unpack(packed):
            read.append(packed[0])
            return packed[1]

        with torch.autograd.graph.saved_tensors_hooks(lambda t: (object(), t), unpack):
            gradients_of(call, tensors())
        assert read and len(read) == len(set(map(id, read)))


# ---- the context that serves PyTorch's function --------------------------------------------------


def layer(x):
    q, k, v = x.unbind()
    return torch.nn.functional.scaled_dot_product_attention(torch.sin(q), k, v, is_causal=True)


def stacked():
    return torch.stack(make(4)).requires_grad_()


@pytest.fixture
def expected():
    x = stacked()
    with sagebwd.sdpa():
        out = layer(layer(x).expand(3, -1, -1, -1, -1))
    out.float().square().sum().backward()
    return x.grad


def two_layers(reentrant, x):
    for _ in range(2):
        x = checkpoint(layer, x.expand(3, -1, -1, -1, -1) if x.dim() == 4 else x,
                       use_reentrant=reentrant)  # fmt: skip
    return x.float().square().sum()


@KINDS
@pytest.mark.parametrize("where", ["inside", "outside", "in a thread", "grad"])
def test_the_context_is_there_when_a_checkpoint_computes_again(expected, reentrant, where):
    if where == "grad" and reentrant:
        pytest.skip("PyTorch takes no torch.autograd.grad of such checkpoints")
    x = stacked()
    with sagebwd.sdpa() as mode:
        loss = two_layers(reentrant, x)
        assert mode.calls == 2
        if where == "inside":
            loss.backward()
        if where == "grad":
            (x.grad,) = torch.autograd.grad(loss, x)
    if where == "outside":
        loss.backward()
    if where == "in a thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert torch.equal(x.grad, expected) and mode.calls == 4
    # And it is over: here as in checkpoints.
    assert not pytorch._contexts()
    found, wanted = (stacked() for _ in range(2))
    two_layers(reentrant, found).backward()
    layer(layer(wanted).expand(3, -1, -1, -1, -1)).float().square().sum().backward()
    assert torch.equal(found.grad, wanted.grad) and mode.calls == 4


@KINDS
def test_a_checkpoint_around_the_context(expected, reentrant):
    def within(x):
        with sagebwd.sdpa():
            return layer(x)

    x = stacked()
    out = checkpoint(within, x, use_reentrant=reentrant).expand(3, -1, -1, -1, -1)
    checkpoint(within, out, use_reentrant=reentrant).float().square().sum().backward()
    assert torch.equal(x.grad, expected)


@KINDS
def test_contexts_in_contexts_and_what_they_leave_to_pytorch(reentrant):
    """The inner one's options, and its refusals handed on: the same in both computations."""

    def both(x):
        mask = torch.linspace(0, 1, 24 * 24, dtype=torch.bfloat16).view(24, 24)  # of no few kinds
        q, k, v = x.unbind()
        masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return layer(x) + masked

    def gradient(call):
        x = stacked()
        warned = pytest.warns(UserWarning, match="PyTorch computed")
        within = sagebwd.sdpa(precision="gradients16", fallback="torch")
        with warned, sagebwd.sdpa(fallback="torch") as outer, within as inner:
            loss = call(x).float().square().sum()
            loss.backward()
        return x.grad, outer, inner

    expected, outer, inner = gradient(both)
    assert (outer.calls, inner.calls) == (1, 2)
    found, outer, inner = gradient(lambda x: checkpoint(both, x, use_reentrant=reentrant))
    assert torch.equal(found, expected)
    assert (outer.calls, inner.calls, inner.fallbacks.total()) == (2, 4, 2)


def test_threads_have_contexts_of_their_own():
    """A checkpoint of one thread, which is in a context, and of another, which is not."""
    results, barrier = {}, threading.Barrier(2)

    def work(name, context):
        x = stacked()
        with context:
            loss = two_layers(False, x)
            barrier.wait(60)
            loss.backward()
        results[name] = x.grad

    mode = sagebwd.sdpa()
    threads = [threading.Thread(target=work, args=pair) for pair in
               (("sagebwd", mode), ("PyTorch", torch.enable_grad()))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mode.calls == 4
    assert not torch.equal(results["sagebwd"], results["PyTorch"])
    x = stacked()
    two_layers(False, x).backward()
    assert torch.equal(results["PyTorch"], x.grad)
