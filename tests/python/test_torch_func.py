"""torch.func's transforms: gradients, vmap, and what refuses them."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401
from test_direct import check, explicit, shortcuts  # noqa: E402, F401
from test_dispatch import known  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

#: PyTorch's vmap warns where an operator has no rule, and calls it by turns.
OF_VMAP = pytest.mark.filterwarnings("error:There is a performance drop")


@OF_VMAP
def test_vmap_and_grad_of_torch_func(known):  # noqa: F811
    inputs, dout, expected = known
    inputs = [t.detach() for t in inputs]

    def loss(q, k, v, dout):
        return (sagebwd.attention(q, k, v).float() * dout.float()).sum()

    found = torch.func.grad(loss, (0, 1, 2))(*inputs, dout)
    check((expected[0], None, *found), expected)
    both = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None, 0))
    q = torch.stack([inputs[0], inputs[0] * 2])
    found = both(q, *inputs[1:], torch.stack([dout, dout]))
    check((None, None, *(t[0] for t in found)), expected)
    check((None, None, *(t[1] for t in found)), explicit((q[1], *inputs[1:]), dout))
    out, pullback = torch.func.vjp(lambda *qkv: sagebwd.attention(*qkv), *inputs)
    check((out, None, *pullback(dout)), expected)
    (rows,) = torch.func.vmap(torch.func.vjp(lambda q: sagebwd.attention(q, *inputs[1:]),
                                             inputs[0])[1])(torch.stack([dout, 0 * dout]))
    assert torch.equal(rows[0], expected[2]) and not rows[1].any()


def test_torch_func_is_differentiated_further_out_and_once(known):  # noqa: F811
    inputs, dout, expected = known

    def loss(q):
        return (sagebwd.attention(q, *inputs[1:]).float() * dout.float()).sum()

    gradient, value = torch.func.grad_and_value(loss)(inputs[0])
    # Plain autograd outside of torch.func: of the value it is known, of the gradient refused.
    check((None, None, *torch.autograd.grad(value, inputs, retain_graph=True)), expected)
    for twice in (
        lambda: torch.autograd.grad(gradient.sum(), inputs[0]),
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(inputs[0].detach()),
    ):
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            twice()


def test_the_emulation_refuses_torch_func(known):  # noqa: F811
    inputs = [t.detach() for t in known[0]]

    def loss(q):
        return sagebwd.emulation.emulated_attention(q, *inputs[1:]).sum()

    for transformed in (torch.func.grad(loss), torch.func.vjp):
        arguments = (loss, inputs[0]) if transformed is torch.func.vjp else inputs[:1]
        with pytest.raises(sagebwd.SpecError, match="no rules for torch.func's transforms"):
            transformed(*arguments)


@OF_VMAP
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("places", [(0, 0, 0), (1, 2, 4), (0, None, None)], ids=str)
def test_vmap_of_the_operators(kernels_on_the_cpu, layout, places):  # noqa: F811
    """One call if all tensors have the mapped dimension, and else one for each element; every
    result is that of the element's own call."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, 4, 24, 64) if layout == "bhsd" else (2, 24, 4, 64)
    each = [[torch.randn(shape, generator=generator).bfloat16() for _ in range(3)] for _ in "abc"]
    given = [each[0][i] if place is None else torch.stack([one[i] for one in each], place)
             for i, place in enumerate(places)]  # fmt: skip
    used = torch.tensor([[24, 9], [24, 24], [1, 7]]).int()
    mean = torch.randn(3, 2, 4, 64, generator=generator)

    def attend(q, k, v, used, mean):
        more = dict(causal="top-left", seqused_q=used, seqused_k=used, k_mean=mean)
        return sagebwd.attention(q, k, v, layout=layout, return_lse=True, **more)

    def launches():
        return sum(kernels.launches for kernels in kernels_on_the_cpu.values())

    before = launches()
    found = torch.func.vmap(attend, (*places, 0, 0))(*given, used, mean)
    assert launches() - before == (3 if None in places else 1)
    for i in range(3):
        own = [one if place is None else one.select(place, i).contiguous()
               for one, place in zip(given, places)]  # fmt: skip
        for x, y in zip(found, attend(*own, used[i], mean[i])):
            assert torch.equal(x[i], y)


@OF_VMAP
def test_vmap_of_packed_sequences_of_vmap_and_of_nothing(known):  # noqa: F811
    inputs = [t.detach() for t in known[0]]
    firsts = torch.tensor([0, 10, 24]).int()

    def packed(q, k, v):
        return sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts)

    q, k, v = (t.transpose(1, 2) for t in inputs)
    found = torch.func.vmap(packed)(q, k, v)
    for i in range(2):
        assert torch.equal(found[i], packed(q[i], k[i], v[i]))
    many = [torch.stack([torch.stack([t, 2 * t]), torch.stack([3 * t, 4 * t])]) for t in inputs]
    found = torch.func.vmap(torch.func.vmap(sagebwd.attention))(*many)
    for i in range(2):
        for j in range(2):
            assert torch.equal(found[i, j], sagebwd.attention(*(t[i, j] for t in many)))
    with pytest.raises(sagebwd.SpecError, match=r"q has rank 3 \(shape \(4, 24, 64\)\)"):
        torch.func.vmap(sagebwd.attention)(*inputs)


@OF_VMAP
def test_the_older_vmap(known):  # noqa: F811
    """is_grads_batched, and jacobian(vectorize=True), which use it."""
    inputs, dout, expected = known
    out = sagebwd.attention(*inputs)
    batched = torch.autograd.grad(out, inputs, torch.stack([dout, 0 * dout]), is_grads_batched=True)
    check((out, None, *(g[0] for g in batched)), expected)
    assert not any(g[1].any() for g in batched)

    def corner(q):
        return sagebwd.attention(q, *inputs[1:])[0, 0, :1, :2]

    found, wanted = (torch.autograd.functional.jacobian(corner, inputs[0], vectorize=vectorize)
                     for vectorize in (True, False))  # fmt: skip
    assert torch.equal(found, wanted)


TANGENTS = ("a Hessian times a vector", "keys", "the gradient of out", "mapped keys", "lists",
            "mapped gradients of out")  # fmt: skip


def further_out(q, k, v, dout):
    """Gradients of torch.func whose inputs have tangents of a level further out, by name: functions
    of one tensor, and where to differentiate them."""
    grad, vmap = torch.func.grad, torch.func.vmap

    def loss(q, k, weight=1.0, attend=sagebwd.attention, **more):
        return (attend(q, k, v, **more).float() * dout.float() * weight).sum()

    lists = dict(attend=sagebwd.block_sparse_attention, block_mask=torch.ones(1, 1, 1, 1).bool())
    one = torch.ones(())
    return dict(zip(TANGENTS, (
        (grad(lambda q: loss(q, k)), q),
        (lambda k: grad(loss)(q, k), k),
        (lambda weight: grad(loss)(q, k, weight), one),
        (vmap(lambda k: grad(loss)(q, k)), torch.stack([k, k])),
        (lambda weight: grad(lambda q: loss(q, k, weight, **lists))(q), one),
        (lambda weight: torch.func.jacrev(
            lambda q: (sagebwd.attention(q, k, v)[0, 0, :2, 0].float() * weight))(q), one),
    )))  # fmt: skip


@OF_VMAP
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_a_level_further_out_are_refused(
    known, listed_kernels_on_the_cpu, name  # noqa: F811
):
    """Within an autograd function PyTorch shows none, and they would be lost in silence."""
    inputs, dout, _ = known
    function, at = further_out(*(t.detach() for t in inputs), dout)[name]

    def derivative(tangent):
        return torch.func.jvp(function, (at,), (tangent,))

    each = at.expand(2, *at.shape)
    for once in (lambda: derivative(at), lambda: torch.func.vmap(derivative)(each)):
        with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            once()


def test_a_tangent_beside_a_gradient_of_torch_func_is_none_of_its(known):  # noqa: F811
    inputs, dout, expected = known
    inputs = [t.detach() for t in inputs]

    def scaled(factor):
        gradient = torch.func.grad(
            lambda q: (sagebwd.attention(q, *inputs[1:]).float() * dout.float()).sum())(inputs[0])
        return factor * gradient.float()  # fmt: skip

    value, tangent = torch.func.jvp(scaled, (torch.ones(()),), (torch.full((), 2.0),))
    assert torch.equal(value, expected[2].float()) and torch.equal(tangent, 2 * value)
