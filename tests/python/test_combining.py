"""Parts of the keys merged, and learned sinks, against softmax in FP64."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled, relative  # noqa: E402
from packed_inputs import packed  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

HEADS, HEADS_KV = 4, 2


def make(m=48, n=96, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v, dout = (randn(2, heads, tokens, 64).bfloat16() for heads, tokens in
                     ((HEADS, m), (HEADS_KV, n), (HEADS_KV, n), (HEADS, m)))  # fmt: skip
    return (q, k, v), dout, randn(HEADS) * 2 + 3


def exact(q, k, v, sink=None, causal=False):
    """(out, lse) of a softmax that sees `sink` beside the scores, in FP64."""
    q, k, v = q.double(), *(t.double().repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    s = q @ k.mT / 8
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    return torch.softmax(s, -1)[..., : v.shape[2]] @ v, s.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_sink_takes_its_part_and_its_gradient(layout, causal):
    inputs, dout, sink = make(96)
    leaves = [t.clone().requires_grad_() for t in (*inputs, sink)]
    expected, expected_lse = exact(*leaves, causal=causal)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    q, k, v = (t.transpose(1, 2) if layout == "bshd" else t for t in leaves[:3])
    out, lse = sagebwd.attention(q, k, v, sink_logits=leaves[3], layout=layout, causal=causal,
                                 return_lse=True)  # fmt: skip
    out = out.transpose(1, 2) if layout == "bshd" else out
    assert out.dtype == torch.bfloat16 and relative(out, expected) < 0.02
    assert float((lse - expected_lse).detach().abs().max()) < 0.02
    *got, of_sink = torch.autograd.grad(out, leaves, dout)
    for x, y in zip(got, wanted):
        assert relative(x, y) < 0.03
    # A sum over all rows, whose terms nearly cancel: judged by their size.
    part = torch.exp(sink.double()[:, None] - expected_lse.detach())
    terms = part * (dout * expected.detach()).sum(-1)
    assert float((of_sink - wanted[3]).norm()) < 0.05 * float(terms.norm())


def test_a_sink_beside_packed_sequences():
    inputs, dout, where = packed((20, 9), (24, 9))
    sink = torch.tensor([0.0, 1.0, 4.0, -9.0], requires_grad=True)
    out = sagebwd.attention(*inputs, sink_logits=sink, **where)
    for queries, keys in ((slice(0, 20), slice(0, 24)), (slice(20, 29), slice(24, 33))):
        q, k, v = (t[part].transpose(0, 1)[None]
                   for t, part in zip(inputs, (queries, keys, keys)))  # fmt: skip
        assert relative(out[queries].transpose(0, 1)[None], exact(q, k, v, sink)[0]) < 0.02
    assert torch.autograd.grad(out, sink, dout)[0].abs().min() > 0


def test_a_query_without_keys_leaves_all_to_the_sink():
    (q, k, v), dout, sink = make(32, 16)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    out, lse = sagebwd.attention(*leaves[:3], sink_logits=leaves[3], causal="bottom-right",
                                 return_lse=True)  # fmt: skip
    assert not out[:, :, :16].any() and torch.equal(lse[0, :, 0], sink)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merged_parts_are_the_whole(layout):
    (q, k, v), dout, _ = make()
    expected, _ = exact(q, k, v)

    def swapped(t):
        return t.transpose(1, 2) if layout == "bshd" else t

    q, k, v, dout = map(swapped, (q, k, v, dout))
    token = 1 if layout == "bshd" else 2
    # One mean, of all keys, is taken from each part's.
    smooth = k - k.mean(token, keepdim=True)
    parts = [(smooth.narrow(token, at, n), v.narrow(token, at, n)) for at, n in ((0, 64), (64, 32))]
    chosen = {"smooth_k": False, "layout": layout}
    out, lse = sagebwd.merge(
        [sagebwd.attention_forward(q, *part, **chosen) for part in parts], layout=layout)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative(swapped(out), expected) < 0.02
    gradients = [sagebwd.attention_backward(dout, q, *part, out, lse, **chosen) for part in parts]
    leaves = [swapped(t).clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(exact(*leaves)[0], leaves, swapped(dout).double())
    got = (sum(g[0] for g in gradients), *(torch.cat([g[i] for g in gradients], token)
                                           for i in (1, 2)))  # fmt: skip
    for x, y in zip(got, wanted):
        assert relative(swapped(x), y) < 0.03


def test_merge_is_differentiable_and_knows_of_nothing_seen():
    inputs, dout, _ = make(96)
    leaves = [t.clone().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(exact(*leaves, causal=True)[0], leaves, dout.double())
    q, k, v = leaves
    first = sagebwd.attention(q, k[:, :, :48], v[:, :, :48], causal="top-left", return_lse=True)
    last = sagebwd.attention(q, k[:, :, 48:], v[:, :, 48:], causal="bottom-right",
                             return_lse=True)  # fmt: skip
    assert (last[1][..., :48] == -torch.inf).all()
    out, _ = sagebwd.merge([first, last])
    for x, y in zip(torch.autograd.grad(out, leaves, dout), wanted):
        assert relative(x, y) < 0.03
    nothing = torch.zeros(1, 1, 2, 64), torch.full((1, 1, 2), -torch.inf)
    out, lse = sagebwd.merge([nothing, nothing])
    assert not out.any() and (lse == -torch.inf).all()


def test_refusals_say_what_is_wanted():
    (q, k, v), _, sink = make()
    out, lse = sagebwd.attention(q, k, v, return_lse=True)

    def refused(match, call, error=sagebwd.SpecError):
        with pytest.raises(error, match=match):
            call()

    refused("no parts", lambda: sagebwd.merge([]))
    for match, parts in {
        "parts is a Tensor; pass a list of": out, "parts is an int": 5,
        "part 0 is a Tensor; pass": [q, q], "part 0 is a tuple of 1": [(q,)],
        "part 1 is a tuple of 3": [(out, lse), (out, lse, None)],
    }.items():  # fmt: skip
        refused(match, lambda parts=parts: sagebwd.merge(parts), TypeError)
    refused("part is a Tensor", lambda: sagebwd.attention_backward(
        out, q, k, v, out, lse, part=out), TypeError)  # fmt: skip
    refused("part 0 has out of .* and part 1 of", lambda: sagebwd.merge(
        [(out, lse), (out[:, :, :5], lse[:, :, :5])]))  # fmt: skip
    refused("out of part 0 has shape .* lse of part 0", lambda: sagebwd.merge([(out, lse[0])]))
    refused("lse of part 0 is a float", lambda: sagebwd.merge([(out, 1.0)]), TypeError)
    refused(r"shape \(2,\).*pass \(4,\), one logit", lambda: sagebwd.with_sink(out, lse, sink[:2]))
    refused("a floating type", lambda: sagebwd.with_sink(out, lse, sink.int()))
    refused("sink_logits is a list", lambda: sagebwd.with_sink(out, lse, [1.0]), TypeError)
    refused("did you mean 'sink_logits'", lambda: sagebwd.attention(q, k, v, s_aux=sink), TypeError)
    refused("no KV cache.*scaled_dot", lambda: sagebwd.attention(q, k, v, k_cache=k), TypeError)
    refused("has score='50.0", lambda: sagebwd.attention(q, k, v, softcap=30.0),
            TypeError)  # fmt: skip


def test_compiled_it_is_the_same():
    inputs, dout, sink = make(96)
    leaves = [t.clone().requires_grad_() for t in (*inputs, sink)]

    def layer(q, k, v, sink):
        parts = [sagebwd.attention(q, k[:, :, part], v[:, :, part], return_lse=True)
                 for part in (slice(0, 64), slice(64, 96))]  # fmt: skip
        return sagebwd.with_sink(*sagebwd.merge(parts), sink)[0]

    assert_alike(compiled(layer), layer, leaves, dout)
