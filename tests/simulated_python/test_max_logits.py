"""return_max_logits=True, on a simulated GPU, against a search among FP64's scores."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.core import direct  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

TOKENS = 200
#: Of INT8 scores beside FP64's, relative to 1 and the number together.
OFF = 0.05


def positions():
    at = torch.arange(TOKENS)
    return at[:, None], at[None, :]


def listed_blocks():
    blocks = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    blocks[..., 0, 1] = blocks[..., 1, 0] = True
    return blocks


def hidden_from(start):
    """Each key is hidden from the queries from a number on."""
    return torch.full((1, 1, TOKENS, 1), start, dtype=torch.int32)


def in_lists():
    return listed_blocks()[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[
        :TOKENS, :TOKENS]  # fmt: skip


def below(q, k):
    return k <= q


#: By name: keywords of a call, which keys a query sees, and what becomes of FP64 scores.
CALLS = {
    "dense": ({}, None, None),
    "causal": ({"causal": True}, below, None),
    "intervals": ({"causal": True, "startend_row_indices": hidden_from(90)},
                  lambda q, k: (k <= q) & (q < 90), None),
    "mask": ({"mask": "q + k < 150"}, lambda q, k: q + k < 150, None),
    "score": ({"score": "2.0 * tanh(s / 2.0)"}, None, lambda s: 2 * torch.tanh(s / 2)),
    "lists": ({"block_mask": listed_blocks(), "block_size": (128, 128)},
              lambda q, k: in_lists(), None),
    "16 bits": ({"precision": "qk16"}, None, None),
    "no sink": ({"sink_keys": 0, "smooth_k": False}, None, None),
}  # fmt: skip
each = pytest.mark.parametrize("name", CALLS)


def attend(q, k, v, **told):
    return (sagebwd.block_sparse_attention if "block_mask" in told else sagebwd.attention)(
        q, k, v, **told)  # fmt: skip


def searched(q, k, seen=None, change=None):
    """The largest score of each head, in FP64; -inf where nothing is seen."""
    q, k = q.detach().double(), k.detach().double()
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    scores = scores if change is None else change(scores)
    if seen is not None:
        scores = scores.masked_fill(~seen(*positions()), -torch.inf)
    return scores.amax((0, 2, 3))


def near(found, expected):
    assert found.dtype == torch.float32 and not found.requires_grad
    finite = expected.isfinite()
    assert torch.equal(found[~finite].double(), expected[~finite])
    off = (found - expected)[finite].abs() / (1 + expected[finite].abs())
    assert bool((off < OFF).all())


def headroom(q, k):
    """Two steps of a score's INT32 sum: a channel is no larger than its vector is long."""
    longest = [t.detach().double().norm(dim=-1).max() / 127 for t in (q, k)]
    return 2 * longest[0] * longest[1] / q.shape[-1] ** 0.5


def with_mean():
    """Keys with a mean, which smoothing takes off."""
    q, k, v = made(TOKENS)
    with torch.no_grad():
        k += torch.linspace(-1, 1, k.shape[-1]).to(k.dtype)
    return q, k, v


@each
def test_is_found_and_changes_nothing(name):
    told, seen, change = CALLS[name]
    q, k, v = with_mean()
    expected = searched(q, k, seen, change)
    plain = attend(q, k, v, return_lse=True, **told)
    gradients = torch.autograd.grad(plain[0].float().square().sum() + plain[1].sum(), (q, k, v))
    for _ in range(2):  # the second call goes past the operators, where a call can
        out, lse, found = attend(q, k, v, return_lse=True, return_max_logits=True, **told)
        near(found, expected)
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
        again = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))
        assert all(map(torch.equal, again, gradients))
    with torch.no_grad():
        out, alone = attend(q, k, v, return_max_logits=True, **told)
    assert torch.equal(out, plain[0]) and torch.equal(alone, found)


@each
def test_is_that_of_the_emulation(name):
    told, _, _ = CALLS[name]
    q, k, v = with_mean()
    function = (sagebwd.emulation.emulated_block_sparse_attention if "block_mask" in told
                else sagebwd.emulation.emulated_attention)  # fmt: skip
    _, lse, expected = function(q, k, v, return_lse=True, return_max_logits=True, **told)
    assert torch.equal(function(q, k, v, return_max_logits=True, **told)[1], expected)
    _, found = attend(q, k, v, return_max_logits=True, **told)
    off = (2e-3 if "score" in told else 2e-5) * (1 + expected.abs())  # of a GPU's tanh
    assert bool((found >= expected - off).all())
    assert bool((found <= expected + off + headroom(q, k)).all())
    assert bool((expected <= lse.detach().amax((0, 2)) + 1e-5).all())


def test_packed_sequences_and_padded_batches():
    q, k, v = with_mean()
    starts = torch.tensor([0, 70, 70, TOKENS], dtype=torch.int32)
    packed = [t.detach()[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    sequence = torch.bucketize(torch.arange(TOKENS), starts, right=True)
    together = sequence[:, None] == sequence[None, :]
    out, lse, found = sagebwd.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts,
                                        return_lse=True, return_max_logits=True)  # fmt: skip
    near(found, searched(q[:1], k[:1], lambda *_: together))
    used = torch.tensor([50, 0], dtype=torch.int32)
    _, found = sagebwd.attention(q, k, v, seqused_k=used, return_max_logits=True)
    near(found, searched(q[:1], k[:1], lambda q, k: k < 50))


def test_layers_of_checkpoints_and_compilers_give_the_same():
    q, k, v = with_mean()

    def attention(q, k, v):
        return sagebwd.attention(q, k, v, causal=True, return_max_logits=True)

    out, expected = attention(q, k, v)
    for function in (lambda *given: checkpoint(attention, *given, use_reentrant=False),
                     torch.compile(attention, backend="aot_eager", fullgraph=True)):  # fmt: skip
        again, found = function(q, k, v)
        again.float().sum().backward()
        assert torch.equal(again, out) and torch.equal(found, expected)
        assert not found.requires_grad


def test_calls_past_the_operators_have_it(monkeypatch):
    q, k, v = with_mean()
    sagebwd.attention(q, k, v, return_max_logits=True)
    found = direct.attention(q, k, v, return_max_logits=True)
    assert found is not None and len(found) == 2 and not found[1].requires_grad
    assert len(direct.attention(q, k, v, return_max_logits=True, return_lse=True)) == 3


def test_vmap_gives_each_its_own():
    q, k, v = (t.detach() for t in with_mean())
    each = torch.stack([q, 2 * q]), torch.stack([k, k]), torch.stack([v, v])
    _, found = torch.func.vmap(lambda *given: sagebwd.attention(
        *given, return_max_logits=True))(*each)  # fmt: skip
    assert found.shape == (2, 2)
    for i in range(2):
        assert torch.equal(found[i], sagebwd.attention(*(t[i] for t in each),
                                                       return_max_logits=True)[1])  # fmt: skip


def test_norm_rope_gate_and_sinks_stand_beside_it():
    q, k, v = (t.detach() for t in with_mean())
    gain = torch.linspace(0.5, 1.5, 64)
    normed = sagebwd.qk_norm_rope(q, k, q_norm=gain, k_norm=gain)
    _, expected = sagebwd.attention(*normed, v, return_max_logits=True)
    _, found = sagebwd.attention(q, k, v, q_norm=gain, k_norm=gain, gate=torch.zeros_like(q),
                                 return_max_logits=True)  # fmt: skip
    assert torch.equal(found, expected)
    sinks = torch.full((2,), 100.0)
    _, found = sagebwd.attention(*normed, v, sink_logits=sinks, return_max_logits=True)
    assert torch.equal(found, expected)


def test_nothing_seen_and_nothing_there():
    q, k, v = with_mean()
    _, found = sagebwd.attention(q, k, v, mask="h == 0 & q >= 0", return_max_logits=True)
    assert found[0].isfinite() and found[1] == -torch.inf
    for lengths in ((0, TOKENS), (TOKENS, 0)):
        empty = [t.detach()[:, :, :n].contiguous()
                 for t, n in zip((q, k, v), (*lengths, lengths[1]))]  # fmt: skip
        assert torch.equal(sagebwd.attention(*empty, return_max_logits=True)[1],
                           torch.full((2,), -torch.inf))  # fmt: skip


def test_nan_is_seen_in_its_head():
    q, k, v = (t.detach() for t in with_mean())
    clean = sagebwd.attention(q, k, v, return_max_logits=True)[1]
    q = q.clone()
    q[1, 1, 33, 5] = torch.nan
    found = sagebwd.attention(q, k, v, return_max_logits=True)[1]
    assert found[1].isnan() and found[0] == clean[0]


@pytest.mark.parametrize("flag", [1, None, "yes"])
def test_other_flags_are_refused(flag):
    q, k, v = with_mean()
    with pytest.raises(sagebwd.SpecError, match=r"return_max_logits=.*True or False"):
        sagebwd.attention(q, k, v, return_max_logits=flag)
    with pytest.raises(sagebwd.SpecError, match=r"return_max_logits=.*True or False"):
        sagebwd.block_sparse_attention(q, k, v, block_mask=listed_blocks(),
                                       block_size=(128, 128), return_max_logits=flag)  # fmt: skip


def test_operators_want_the_option():
    q, k, v = with_mean()
    with pytest.raises(sagebwd.SpecError, match="does not have max_logits=yes"):
        torch.ops.sagebwd.forward_max_logits(q, k, v, None, "bhsd", "")
