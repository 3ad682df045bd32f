"""Gradients of parts of the keys, as in ring attention: each way to have them right."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled, relative  # noqa: E402
from packed_inputs import firsts, packed, spans_of  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_combining import HEADS, HEADS_KV, exact  # noqa: E402

from sagebwd.core import combining, options  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

#: The least error of dQ that lacks its row sum; that of the others is below .05.
WRONG = 0.15


def make(tokens=96):
    """Keys whose means differ from part to part, and are not zero."""
    generator = torch.Generator().manual_seed(0)

    def randn(heads):
        return torch.randn(2, heads, tokens, 64, generator=generator)

    q, k, v, dout = randn(HEADS), randn(HEADS_KV), randn(HEADS_KV), randn(HEADS)
    k += 2 + torch.linspace(-1, 1, tokens)[:, None]
    dlse = torch.randn(2, HEADS, tokens, generator=generator)
    return [t.bfloat16() for t in (q, k, v, dout)], dlse


def wanted(q, k, v, dout, dlse, causal):
    """out, lse and gradients in FP64."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = exact(*leaves, causal=causal)
    given = [dout.double(), torch.zeros_like(lse) if dlse is None else dlse.double()]
    return out, lse, *torch.autograd.grad([out, lse], leaves, given)


def ring(q, k, v, dout, ranks, causal, how, **chosen):
    """Ranks compute the same: each has a part of the queries, and the keys' parts come round.

    `how`: "mean", one for all parts; "part", with their own; "naive".
    """
    chosen |= {"k_mean": k.float().mean(2)} if how == "mean" else {}
    outs, lses, dqs = [], [], []
    dk, dv = ([torch.zeros(t.shape) for t in x.chunk(ranks, 2)] for x in (k, v))
    for rank, (q_r, dout_r) in enumerate(zip(q.chunk(ranks, 2), dout.chunk(ranks, 2))):
        parts = {}
        for c, (k_c, v_c) in enumerate(zip(k.chunk(ranks, 2), v.chunk(ranks, 2))):
            if not causal or c <= rank:
                mask = "top-left" if causal and c == rank else False
                parts[c] = (q_r, k_c, v_c), {"causal": mask, **chosen}
        forward = {c: sagebwd.attention_forward(*x, **given) for c, (x, given) in parts.items()}
        out, lse = sagebwd.merge(forward.values())
        dq = torch.zeros(q_r.shape)
        for c, (inputs, given) in parts.items():
            part = forward[c] if how == "part" else None
            gradients = sagebwd.attention_backward(dout_r, *inputs, out, lse, part=part, **given)
            for to, gradient in zip((dq, dk[c], dv[c]), gradients):
                to += gradient
        for to, x in zip((outs, lses, dqs), (out, lse, dq)):
            to.append(x)
    return [torch.cat(x, 2) for x in (outs, lses, dqs, dk, dv)]


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_gives_what_the_whole_gives(ranks, causal, granularity):
    (q, k, v, dout), _ = make()
    expected = wanted(q, k, v, dout, None, causal)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = sagebwd.attention(*leaves, causal=causal, granularity=granularity)
    whole = [relative(x, y) for x, y in
             zip(torch.autograd.grad(out, leaves, dout), expected[2:])]  # fmt: skip
    for how in ("mean", "part"):
        found = ring(q, k, v, dout, ranks, causal, how, granularity=granularity)
        errors = [relative(x, y) for x, y in zip(found, expected)]
        assert errors[0] < 0.03 and errors[1] < 3e-3, how
        for error, of_whole in zip(errors[2:], whole):
            assert error < 1.1 * of_whole, how
    naive = ring(q, k, v, dout, ranks, causal, "naive", granularity=granularity)
    assert relative(naive[2], expected[2]) > WRONG


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("k_mean", [False, True])
def test_parts_that_some_queries_do_not_see_and_a_gradient_of_lse(layout, k_mean):
    """As in the second half of the keys, of which the first queries see none."""
    (q, k, v, dout), dlse = make()
    expected = wanted(q, k, v, dout, dlse, True)

    def swapped(*tensors):
        return [t.transpose(1, 2) if layout == "bshd" else t for t in tensors]

    mean = k.float().mean(2) if k_mean else None
    parts = []
    for at, n, mask in ((0, 32, "top-left"), (32, 64, "bottom-right")):
        inputs = swapped(q, k[:, :, at : at + n], v[:, :, at : at + n])
        given = {"causal": mask, "layout": layout, "k_mean": mean}
        parts.append((inputs, given, sagebwd.attention_forward(*inputs, **given)))
    assert (parts[1][2][1][..., :32] == -torch.inf).all()
    out, lse = sagebwd.merge([part for *_, part in parts], layout=layout)
    gradients = [
        sagebwd.attention_backward(*swapped(dout), *inputs, out, lse, dlse=dlse, part=part, **given)
        for inputs, given, part in parts
    ]
    assert all(g.isfinite().all() for of_part in gradients for g in of_part)
    dq, dk, dv = zip(*(swapped(*g) for g in gradients))
    for x, y in zip((sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)), expected[2:]):
        assert relative(x, y) < 0.03


def test_by_autograd_each_part_has_its_own_mean_or_one():
    (q, k, v, dout), dlse = make()
    expected = wanted(q, k, v, dout, dlse, False)[2:]
    for mean in (None, k.float().mean(2)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        parts = [sagebwd.attention(leaves[0], k_c, v_c, k_mean=mean, return_lse=True)
                 for k_c, v_c in zip(*(t.chunk(3, 2) for t in leaves[1:]))]  # fmt: skip
        found = torch.autograd.grad(sagebwd.merge(parts), leaves, (dout, dlse))
        for x, y in zip(found, expected):
            assert relative(x, y) < 0.03


def test_all_keys_are_a_part_too():
    (q, k, v, dout), dlse = make()
    whole = sagebwd.attention_forward(q, k, v)
    for given in (None, dlse):
        expected = sagebwd.attention_backward(dout, q, k, v, *whole, dlse=given)
        found = sagebwd.attention_backward(dout, q, k, v, *whole, dlse=given, part=whole)
        for x, y in zip(found, expected):
            assert torch.equal(x, y) if given is None else relative(x, y) < 1e-3


def test_in_exact_arithmetic_nothing_is_left():
    """Kernels in FP64, that put back mean(K) times dlse; FP32 is what is between them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 40, 64, generator=generator, dtype=torch.float64)
                     for _ in range(4))  # fmt: skip
    k += 3
    dlse = torch.randn(1, 2, 40, generator=generator)
    mean = k.mean(2, keepdim=True)

    def forward(keys):
        s = q @ k[:, :, keys].mT / 8
        return s.softmax(-1) @ v[:, :, keys], s.logsumexp(-1)

    def dq(keys, dout, out, lse, dlse, mean):
        p = (q @ k[:, :, keys].mT / 8 - lse[..., None]).exp()
        ds = p * (dout @ v[:, :, keys].mT - (dout * out).sum(-1, keepdim=True) + dlse[..., None])
        return (ds @ (k[:, :, keys] - mean) + dlse[..., None] * mean) / 8

    everything = slice(0, 40)
    out, lse = forward(everything)
    for given, of_one_mean in ((torch.zeros_like(dlse), 1e-12), (dlse, None)):
        expected = dq(everything, dout, out, lse, given, 0 * mean)
        ways = {"mean": 0, "part": 0, "naive": 0}
        for keys in (slice(0, 7), slice(7, 39), slice(39, 40)):
            of_out, of_lse = forward(keys)
            own = k[:, :, keys].mean(2, keepdim=True)
            given_part = (of_out, of_lse.float()), dout, out, lse.float(), given
            ways["part"] += dq(keys, *combining.of_part(*given_part), own)
            ways["naive"] += dq(keys, dout, out, lse, given, own)
            ways["mean"] += dq(keys, dout, out, lse, given, mean)
        assert relative(ways["part"], expected) < 1e-6
        assert relative(ways["naive"], expected) > WRONG
        if of_one_mean:
            assert relative(ways["mean"], expected) < of_one_mean
        else:  # it would count for each part: refused
            assert relative(ways["mean"], expected) > WRONG


def test_shares_beyond_floats_range_are_none():
    out, of_out = torch.ones(1, 1, 4, 64), torch.full((1, 1, 4, 64), 2.0)
    dout = torch.ones(1, 1, 4, 64)
    lse = torch.tensor([[[100.0, -torch.inf, 5.0, 200.0]]])
    of_lse = torch.tensor([[[-100.0, -torch.inf, -torch.inf, 200.0]]])
    of_out[..., 1:3, :] = 0
    of_dout, *_, of_dlse = combining.of_part((of_out, of_lse), dout, out, lse)
    assert not of_dout[..., :3, :].any() and not of_dlse[..., :3].any()
    assert torch.equal(of_dout[..., 3, :], dout[..., 3, :]) and of_dlse[..., 3].item() == 64


@pytest.mark.parametrize("how", ["mean", "part"])
def test_parts_of_packed_sequences(how):
    lengths_q, lengths_k = (20, 9, 6), (24, 10, 0)
    (q, k, v), dout, where = packed(lengths_q, lengths_k)
    where.pop("cu_seqlens_k")
    k = (k + 2).detach()
    spans = [slice(first, first + n) for _, (first, n) in spans_of(lengths_q, lengths_k)]
    means = torch.stack([k[span].float().mean(0).nan_to_num() for span in spans])
    given = where | ({"k_mean": means} if how == "mean" else {})
    q, v, parts = q.detach(), v.detach(), []
    for part in (0, 1):
        pieces = [range(s.start, s.stop)[part::2] for s in spans]
        index = torch.tensor([i for piece in pieces for i in piece])
        firsts_k = {"cu_seqlens_k": firsts([len(piece) for piece in pieces])}
        parts.append((index, {**given, **firsts_k}))
    forward = [sagebwd.attention_forward(q, k[i], v[i], **x) for i, x in parts]
    out, lse = sagebwd.merge(forward)
    found = [torch.zeros(t.shape) for t in (q, k, v)]
    for of_part, (i, x) in zip(forward, parts):
        part = of_part if how == "part" else None
        dq, dk, dv = sagebwd.attention_backward(dout, q, k[i], v[i], out, lse, part=part, **x)
        found[0] += dq
        found[1][i], found[2][i] = dk.float(), dv.float()
    for (first, m), keys in zip((s[0] for s in spans_of(lengths_q, lengths_k)), spans):
        queries = slice(first, first + m)
        if keys.start == keys.stop:
            assert not found[0][queries].any() and (lse[:, queries] == -torch.inf).all()
            continue
        one = [t[part].transpose(0, 1)[None] for t, part in
               ((q, queries), (k, keys), (v, keys), (dout, queries))]  # fmt: skip
        expected = wanted(*one, None, False)[2:]
        for x, span, y in zip(found, (queries, keys, keys), expected):
            assert relative(x[span].transpose(0, 1)[None], y) < 0.03


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_mean_of_the_keys_changes_no_bit_and_another_only_roundings(layout):
    (q, k, v, dout), _ = make()
    inputs = [t.transpose(1, 2) if layout == "bshd" else t for t in (q, k, v)]
    dout = dout.transpose(1, 2) if layout == "bshd" else dout
    token = 1 if layout == "bshd" else 2

    def run(k_mean):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out, lse = sagebwd.attention(*leaves, k_mean=k_mean, layout=layout, return_lse=True)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    mean = inputs[1].double().mean(token).float()
    expected = run(None)
    assert all(map(torch.equal, run(mean), expected))
    moved = mean + 0.3 * torch.randn(mean.shape, generator=torch.Generator().manual_seed(2))
    for x, y in zip(run(moved), expected):
        assert 0 < relative(x, y) < 0.03
    # Any strides will do: of one mean for the whole batch, say.
    one = mean[:1].expand_as(mean)
    assert all(map(torch.equal, run(one), run(one.contiguous())))


def test_refusals_say_what_is_wanted():
    (q, k, v, dout), dlse = make()
    out, lse = sagebwd.attention_forward(q, k, v)
    mean = k.float().mean(2)

    def refused(match, k_mean=mean, error=sagebwd.SpecError, **chosen):
        for call in (sagebwd.attention, sagebwd.attention_forward):
            with pytest.raises(error, match=match):
                call(q, k, v, k_mean=k_mean, **chosen)
        with pytest.raises(error, match=match):
            sagebwd.emulation.emulated_attention(q, k, v, k_mean=k_mean, **chosen)

    def backward_refused(match, error=sagebwd.SpecError, **given):
        with pytest.raises(error, match=match):
            sagebwd.attention_backward(dout, q, k, v, out, lse, **given)

    shape = r"k_mean is .*it must be \(batch or packed sequences, .*, head_dim\) = \(2, 2, 64\)"
    for wrong in (mean[:1], mean[:, :1], mean[..., :32], mean.bfloat16(), mean.double(),
                  mean.to("meta")):  # fmt: skip
        refused(shape, wrong)
        backward_refused(shape, k_mean=wrong)
    refused("smooth_k", smooth_k=False)
    refused(r"requires grad.*k_mean\.detach\(\)", mean.clone().requires_grad_())
    backward_refused("k_mean and dlse without part", k_mean=mean, dlse=dlse)
    backward_refused("part is a float; pass", TypeError, part=1.0)
    backward_refused("out of part has shape", part=(out, lse[0]))
    backward_refused("lse of part is a float", TypeError, part=(out, 1.0))
    backward_refused("out of part is .* as that of all keys", part=(out[:, :2], lse[:, :2]))
    backward_refused("dlse is .* as that of all keys", part=(out, lse), dlse=dlse[:1])
    with pytest.raises(TypeError, match="k_mean is a list"):
        sagebwd.attention(q, k, v, k_mean=[0.0])
    with pytest.raises(sagebwd.SpecError, match="smooth_k=False"):
        torch.ops.sagebwd.forward(*(t.to("meta") for t in (q, k, v)), None, "bhsd", "smooth_k=no",
                                  None, None, None, None, mean.to("meta"))  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_opcheck(backward):
    (q, k, v, dout), _ = make(24)
    inputs = [t.requires_grad_(not backward) for t in (q, k, v)]
    given = (None, "bhsd", options.text_of({}), None, None, None, None, k.detach().float().mean(2))
    arguments, operator = (*inputs, *given), torch.ops.sagebwd.forward.default
    if backward:
        arguments = (dout, *inputs, *operator(*arguments), None, *given)
        operator = torch.ops.sagebwd.backward.default
    torch.library.opcheck(operator, arguments, test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
        "test_aot_dispatch_dynamic"))  # fmt: skip


def test_compiled_it_is_the_same():
    (q, k, v, dout), _ = make()
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def layer(q, k, v):
        mean = k.detach().float().mean(2)
        parts = [sagebwd.attention(q, k[:, :, part], v[:, :, part], k_mean=mean, return_lse=True)
                 for part in (slice(0, 64), slice(64, 96))]  # fmt: skip
        return sagebwd.merge(parts)[0]

    assert_alike(compiled(layer), layer, leaves, dout)
