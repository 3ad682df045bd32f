"""Second derivatives: each input that has a gradient either has a right one, or it is refused."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import BLOCKS, EXACT, drawn, inputs, listed  # noqa: E402

import sagebwd  # noqa: E402
from experiments import sparse_arms  # noqa: E402
from sagebwd.core import combining  # noqa: E402
from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402
from sagebwd.sla import mixing  # noqa: E402
from sagebwd.sla.exact import listed_attention  # noqa: E402
from sagebwd.sla.linear import linear_branch  # noqa: E402

(Q, K, V), _ = inputs(heads_kv=4)
SOFT = listed(1, 4, 3, 5) * 0.5 + 0.25
HARD = listed(1, 4, 3, 5)
TENSORS = dict(q=Q.detach(), k=K.detach(), v=V.detach())
WITH_MASK = TENSORS | dict(mask=SOFT)


def of_result(function, result):
    """One of the function's results."""
    return lambda **given: function(**given)[result]


def sla(q, k, v, **more):
    return sagebwd.sparse_linear_attention(q, k, v, block_mask=HARD, **EXACT, **more)


def gathered(q, k, v):
    """As many listed blocks for each block of queries, none of them short."""
    mask = torch.eye(2, dtype=torch.bool).expand(2, 4, 2, 2)
    q, k, v = q[:, :, :16], k[:, :, :8], v[:, :, :8]
    return sparse_arms._Gathered.apply(q, k, v, mask, 1, BLOCKS, 0.5, None)


def emulated(q, k, v):
    return emulation.emulated_attention(q, k, v, return_lse=True, math_dtype=torch.float64)


def emulated_lists(q, k, v):
    return emulation.emulated_block_sparse_attention(
        q, k, v, block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), return_lse=True)  # fmt: skip


#: Each has a function, its inputs that have gradients, and the number of its results.
FUNCTIONS = {
    "listed": (lambda q, k, v, mask: listed_attention(q, k, v, mask, BLOCKS, 0.5), WITH_MASK, 2),
    "linear": (lambda q, k, v, mask: [linear_branch(q, k, v, mask, BLOCKS)], WITH_MASK, 1),
    "rest": (lambda q, k, mask: [mixing.estimated_rest(q, k, mask, BLOCKS, 0.5)],
             dict(q=Q.detach(), k=K.detach(), mask=SOFT), 1),
    "mixed": (lambda sparse, linear, alpha: [mixing.mixed(sparse, linear, alpha)],
              dict(sparse=Q.detach(), linear=V.detach()[:, :, :1].expand_as(Q).clone(),
                   alpha=drawn(1, 4, 21).sigmoid()), 1),
    "whole": (lambda **x: [sla(**x)], TENSORS | dict(alpha=drawn(4, 3).sigmoid()), 1),
    "apart": (functools.partial(sla, return_branches=True),
              TENSORS | dict(alpha=drawn(4).sigmoid()), 4),
    "estimated": (lambda **x: [sla(alpha="estimated", **x)], TENSORS | dict(beta=drawn(4)), 1),
    "estimated apart": (functools.partial(sla, alpha="estimated", return_branches=True),
                        TENSORS | dict(beta=drawn(4)), 4),
    "gathered": (gathered, {name: t.float() for name, t in TENSORS.items()}, 2),
}  # fmt: skip
EMULATED = {"emulated": (emulated, 2), "emulated lists": (emulated_lists, 2)}
CASES = [(name, x, i) for name, (_, given, results) in FUNCTIONS.items()
         for x in given for i in range(results)]  # fmt: skip
LOSSES = {"linear": lambda out: (out * drawn(*out.shape, seed=9)).sum(),
          "square": lambda out: out.square().sum()}  # fmt: skip


def second_derivative(function, x, step=1e-5):
    """Along a direction, of a scalar function: (by autograd, by differences of first ones)."""
    x = x.detach().clone().requires_grad_()
    along = drawn(*x.shape, seed=3).to(x.dtype)

    def first(**more):
        (found,) = torch.autograd.grad(function(x), x, **more)
        return found

    (found,) = torch.autograd.grad((first(create_graph=True) * along).sum(), x)
    with torch.no_grad():
        x += step * along
    above = first()
    with torch.no_grad():
        x -= 2 * step * along
    return found, (above - first()) / (2 * step)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name, x, result", CASES)
def test_each_input_alone_is_refused(name, x, result, loss):
    """All that the first derivative depends on is in this one input, or in the output's."""
    function, given, _ = FUNCTIONS[name]

    def of_x(t):
        found = function(**given | {x: t})[result]
        seen = found.isfinite()
        return LOSSES[loss](found.masked_fill(~seen, 0))

    t = given[x].detach().clone().requires_grad_()
    if not of_x(t).requires_grad:  # such as lse, of v
        return
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        second_derivative(of_x, t)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("x", "qkv")
@pytest.mark.parametrize("name", EMULATED)
def test_each_input_of_the_emulation_alone_is_refused(name, x, loss):
    function, results = EMULATED[name]
    given = {name: drawn(1, 2, 24, 16, seed=i).bfloat16() for i, name in enumerate("qkv")}
    for result in range(results):
        t = given[x].clone().requires_grad_()
        out = function(**given | {x: t})[result].float()
        (first,) = torch.autograd.grad(LOSSES[loss](out), t, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
            first.sum().backward()


def module(alpha, **more):
    found = SparseLinearAttention(8, 2, density=0.5, alpha=alpha, block_size=(16, 16), seq_len=48,
                                  precision="exact", temperature=1.0, **more)  # fmt: skip
    return found.double()


@pytest.mark.parametrize("alpha, parameter", [
    (alpha, name) for alpha in ("block", "head", "estimated")
    for name in ("router.query_map", "router.key_map",
                 "beta" if alpha == "estimated" else "alpha_logit")])  # fmt: skip
@pytest.mark.parametrize("routing", ["stage 1", "soft", "straight-through"])
def test_each_parameter_of_the_module_alone_is_refused(alpha, parameter, routing):
    layer = module(alpha).requires_grad_(False)
    t = layer.get_parameter(parameter).requires_grad_()
    q, k, v = (drawn(1, 2, 48, 8, seed=i) for i in range(3))
    loss = layer.stage_one_loss(q, k, v) if routing == "stage 1" else (
        layer(q, k, v, routing=routing).square().sum())  # fmt: skip
    (first,) = torch.autograd.grad(loss, t, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize("function", [
    lambda scores: sagebwd.soft_top_blocks(scores, 0.4, 0.7).square().sum(),
    lambda scores: (sagebwd.soft_top_blocks(scores, 0.4, 0.7) * drawn(3, 7, seed=4)).sum(),
    lambda w: sagebwd.pooled_block_scores(Q.detach(), K.detach(), block_size=BLOCKS, key_map=w,
                                          query_map=w).square().sum(),
])  # fmt: skip
def test_what_is_not_refused_is_right(function):
    """The router: its scores, and its soft lists with their lambda."""
    shape = (4, 4) if function.__code__.co_varnames[0] == "w" else (3, 7)
    found, expected = second_derivative(function, drawn(*shape))
    assert expected.norm() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_that_of_a_sink_is_right():
    """In FP32, as logits of sinks are."""
    out, lse = drawn(1, 2, 8, 4).float(), drawn(1, 2, 8).float()

    def function(sink):
        found, whole = combining.with_sink(out, lse, sink)
        return found.square().sum() + whole.square().sum()

    found, expected = second_derivative(function, drawn(2).float(), step=1e-2)
    assert expected.norm() > 0.1
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)


def test_that_of_an_exchange_among_ranks_is_right(monkeypatch):
    """Ulysses of the study. Here the exchange is a product by a matrix, and back by its inverse."""
    from experiments import sharing
    from sagebwd.distributed import heads

    class Done:
        def __init__(self, found):
            self.wait = lambda: found

    turned = torch.linalg.qr(drawn(4, 4)).Q
    monkeypatch.setattr(heads, "to_heads", lambda x, *_: Done(x.detach() @ turned))
    monkeypatch.setattr(heads, "to_tokens", lambda x, *_: Done(x.detach() @ turned.mT))
    exchange = sharing.exchange_function().apply
    found, expected = second_derivative(
        lambda x: exchange(x, None, None, True).pow(3).sum(), drawn(2, 4))  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
