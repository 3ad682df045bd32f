"""Score functions beside all that they go with, against FP64, for tests here and on a GPU.

Each check takes the device. `Case` has a score function twice: as attention takes it, and on scores
in FP64.
"""

import functools
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import equal, results  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

#: Relative L2 of INT8 attention's results, as LIMIT of tests/gpu_python/exact.py, which says why.
LIMIT = 0.05
#: PyTorch forms the gradients of tables, of products of 16 bits with sums in FP32.
TABLE_LIMIT = 0.01
HEADS, HEADS_KV, LONGEST = 4, 2, 1024


@dataclass
class Case:
    """`exact` takes FP64 scores of (batch, heads, queries, keys) and the FP64 tables by name."""

    text: str
    exact: object
    tables: dict = field(default_factory=dict)

    def tables_on(self, device):
        return {name: t.detach().clone().to(device).requires_grad_()
                for name, t in self.tables.items()}


def behind(scores):
    """q - k, of (queries, keys)."""
    q, k = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return q[:, None] - k


def _of_heads(t):
    return t[:, None, None]


CASES = {
    "softcap": Case("5.0 * tanh(s / 5.0)", lambda s: 5 * torch.tanh(s / 5)),
    "alibi": Case("s - slope[h] * abs(q - k)",
                  lambda s, slope: s - _of_heads(slope * 1.0) * behind(s).abs(),
                  {"slope": torch.tensor([0.2, 0.05, 0.01, 0.002])}),
    "bias by distance": Case(
        "s + bias[h, k - q + 1023]", lambda s, bias: s + bias[:, LONGEST - 1 - behind(s)],
        {"bias": torch.sin(torch.arange(HEADS * (2 * LONGEST - 1))).view(HEADS, -1)}),
    "temperature": Case("s * t[h]", lambda s, t: s * _of_heads(t),
                        {"t": torch.tensor([0.5, 0.8, 1.0, 1.2])}),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


def inputs(device, queries, keys, channels, dtype, batch=2):
    """(q, k, v, dout); the keys have a mean, which smoothing subtracts."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, queries), (HEADS_KV, keys), (HEADS_KV, keys), (HEADS, queries)
    q, k, v, dout = (torch.randn(batch, *shape, channels, generator=generator) for shape in shapes)
    q, k, v, dout = (t.to(device).to(dtype) for t in (q, k + 0.5, v, dout))
    return [t.requires_grad_() for t in (q, k, v)], dout


def exact(q, k, v, change, seen):
    """(out, lse) in FP64; 0 and -inf for queries that see nothing."""
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    scores = change(q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def _window(device, queries, keys):
    at = behind(torch.empty(queries, keys, device=device))
    return dict(causal="top-left", window_left=40), (at >= 0) & (at <= 40)


def _documents(device, queries, keys):
    of_q, of_k = (torch.arange(n, device=device) // 70 for n in (queries, keys))
    mask = masks.trace_mask("a[q] == c[k]", {"a": of_q, "c": of_k})
    return dict(mask=mask), of_q[:, None] == of_k


def _causal(device, queries, keys):
    shift = keys - queries
    at = behind(torch.empty(queries, keys, device=device))
    return dict(causal="bottom-right"), at + shift >= 0


def _nothing(device, queries, keys):
    return {}, torch.ones(queries, keys, dtype=torch.bool, device=device)


BESIDE = {"nothing": _nothing, "causal": _causal, "window": _window, "documents": _documents}


def near(found, wanted, limit, name):
    off = (found.double() - wanted).norm() / wanted.norm()
    assert off < limit, f"{name} is off by {float(off)}"


def check(name, device, *, queries=300, keys=300, channels=64, dtype=torch.bfloat16,
          beside="nothing", **options):  # fmt: skip
    """Both results and all gradients, of tables too, through out and lse."""
    case = CASES[name]
    leaves, dout = inputs(device, queries, keys, channels, dtype)
    given, seen = BESIDE[beside](device, queries, keys)
    tables = case.tables_on(device)
    score = masks.trace_score(case.text, tables) if tables else case.text
    wide = [t.detach().double().requires_grad_() for t in (*leaves, *tables.values())]
    named = dict(zip(tables, wide[3:]))
    out, lse = sagebwd.attention(*leaves, score=score, return_lse=True, **given, **options)
    right, right_lse = exact(*wide[:3], functools.partial(case.exact, **named), seen)
    dlse = torch.cos(torch.arange(lse.numel(), device=device)).view(lse.shape)
    sees = seen.any(-1)
    dlse = dlse * sees
    found = torch.autograd.grad((out, lse), (*leaves, *tables.values()), (dout, dlse))
    wanted = torch.autograd.grad((right, right_lse.masked_fill(~sees, 0.0)), wide,
                                 (dout.double(), dlse.double()))  # fmt: skip
    near(out, right, LIMIT, "out")
    assert (lse - right_lse)[..., sees].abs().max() < 0.1
    for of, x, y in zip(("dq", "dk", "dv"), found, wanted):
        near(x, y, LIMIT, of)
    for of, x, y in zip(tables, found[3:], wanted[3:]):
        near(x, y, TABLE_LIMIT, of)


def check_packed(device):
    """Sequences give the bits that they give alone, where no tensor is indexed."""
    (q, k, v), dout = inputs(device, 250, 250, 64, torch.bfloat16, batch=1)
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v)]
    starts = torch.tensor([0, 130, 250], dtype=torch.int32, device=device)
    given = dict(score="5.0 * tanh(s / 5.0) + (k - q) / 100.0", causal=True)
    out = sagebwd.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, **given)
    dout = dout[0].transpose(0, 1).contiguous()
    found = [out, *torch.autograd.grad(out, packed, dout)]
    for own in (slice(0, 130), slice(130, 250)):
        alone = [t.detach()[own].transpose(0, 1)[None].contiguous().requires_grad_()
                 for t in packed]  # fmt: skip
        out = sagebwd.attention(*alone, **given)
        of = dout[own].transpose(0, 1)[None].contiguous()
        for x, y in zip(found, (out, *torch.autograd.grad(out, alone, of))):
            assert torch.equal(x[own], y[0].transpose(0, 1))


def attending(name, device):
    """(a function of q, k, v and tables, all of these, dout)"""
    case = CASES[name]
    leaves, dout = inputs(device, 200, 200, 64, torch.bfloat16)
    tables = case.tables_on(device)

    def attend(q, k, v, *given):
        named = dict(zip(tables, given or tables.values()))
        score = masks.trace_score(case.text, named) if named else case.text
        return sagebwd.attention(q, k, v, causal=True, score=score)

    return attend, [*leaves, *tables.values()], dout


def check_compiled(name, device, backend):
    """One graph has it all; it reads the tables when it runs."""
    attend, leaves, dout = attending(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert equal(results(compiled, leaves, dout), results(attend, leaves, dout))
    with torch.no_grad():
        for table in leaves[3:]:
            table.mul_(0.5)
    assert equal(results(compiled, leaves, dout), results(attend, leaves, dout))


def check_checkpointed(name, device, reentrant):
    attend, leaves, dout = attending(name, device)
    wanted = results(attend, leaves, dout)[1:]
    checkpoint(attend, *leaves, use_reentrant=reentrant).backward(dout)
    assert equal([t.grad for t in leaves], wanted)


def check_repeated(name, device):
    """Each call gives the same bits."""
    attend, leaves, dout = attending(name, device)
    first = results(attend, leaves, dout)
    for _ in range(5):
        assert equal(results(attend, leaves, dout), first)
