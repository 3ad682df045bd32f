"""Norm and RoPE in FP64 by other formulas: complex numbers, and autograd of each step."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")


def drawn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def table(*shape, seed=5, device="cpu"):
    """Cosines and sines of drawn angles, times a factor, as YaRN has one."""
    angles = 3 * drawn(*shape, seed=seed, device=device)
    return 1.1 * angles.cos(), 1.1 * angles.sin()


def exact_side(x, gain=None, normed=True, inv_rms=None, rope=None, style="halves", begin=0,
               eps=1e-6):  # fmt: skip
    """y of (batch, heads, tokens, channels) in FP64."""
    y = x.double()
    if normed:
        rms = torch.sqrt(torch.linalg.vector_norm(y, dim=-1) ** 2 / x.shape[-1] + eps)
        if inv_rms is not None:
            rms = 1 / inv_rms.double().reshape(x.shape[0], -1, x.shape[2])
        y = y / rms[..., None]
    if gain is not None:
        y = torch.einsum("bhtc,hc->bhtc", y, gain.double().expand(x.shape[1], x.shape[-1]))
    if rope is None:
        return y
    pairs = rope[0].shape[-1]
    turn = torch.complex(*(t.double() for t in rope)).reshape(-1, 1, x.shape[2], pairs)
    part = y[..., begin : begin + 2 * pairs]
    axes = (pairs, 2) if style == "interleaved" else (2, pairs)
    part = part.unflatten(-1, axes)
    if style == "halves":
        part = part.mT
    turned = torch.view_as_real(torch.view_as_complex(part.contiguous()) * turn)
    turned = (turned.mT if style == "halves" else turned).flatten(-2)
    return torch.cat([y[..., :begin], turned, y[..., begin + 2 * pairs :]], -1)


def exact(q, k, *, q_norm=None, k_norm=None, norm_eps=1e-6, q_inv_rms=None, k_inv_rms=None,
          rope=None, rope_k=None, rope_style="halves", rope_begin=0, layout="bhsd"):  # fmt: skip
    """`sagebwd.qk_norm_rope` in FP64."""
    sides = ((q, q_norm, q_inv_rms, rope), (k, k_norm, k_inv_rms, rope_k or rope))
    made = []
    for x, norm, inv_rms, of in sides:
        y = exact_side(x.transpose(1, 2) if layout == "bshd" else x,
                       norm if isinstance(norm, torch.Tensor) else None,
                       norm is not None or inv_rms is not None, inv_rms, of, rope_style, rope_begin,
                       norm_eps)  # fmt: skip
        made.append(y.transpose(1, 2) if layout == "bshd" else y)
    return tuple(made)


#: Keywords by name, of heads of 64 channels, 4 heads on 2, 37 queries and 50 keys in a batch of 2.
#: Tensors are made for each call, so that each test may require gradients.
def calls(device="cpu", dtype=torch.float32, channels=64):
    def gain(*shape, seed):
        return 1 + 0.3 * drawn(*shape, seed=seed, device=device)

    def tables(pairs, batch=()):
        of = {name: table(*batch, tokens, pairs, seed=seed, device=device)
              for name, tokens, seed in (("rope", 37, 5), ("rope_k", 50, 6))}  # fmt: skip
        return of

    def inv_rms(*shape, seed):
        return 1 + 0.2 * drawn(*shape, seed=seed, device=device)

    whole, part = channels // 2, channels // 4
    return {
        "shared gains": dict(q_norm=gain(channels, seed=1), k_norm=gain(channels, seed=2),
                             **tables(whole)),
        "gains of heads": dict(q_norm=gain(4, channels, seed=1), k_norm=gain(2, channels, seed=2),
                               norm_eps=0.01, **tables(whole, (2,))),
        "one norm": dict(q_norm=True, **tables(part // 4 * 4), rope_begin=8),
        "interleaved": dict(q_norm=gain(channels, seed=1).to(dtype), k_norm=True,
                            rope_style="interleaved", **tables(whole)),
        "interleaved part": dict(rope_style="interleaved", rope_begin=4, **tables(6, (1,))),
        "given": dict(q_norm=gain(channels, seed=1), q_inv_rms=inv_rms(2, 37, seed=3),
                      k_inv_rms=inv_rms(2, 2, 50, seed=4), **tables(whole)),
        "no rope": dict(q_norm=gain(channels, seed=1), k_norm=gain(2, channels, seed=2)),
        "nothing": {},
    }  # fmt: skip


NAMES = tuple(calls())


def inputs(dtype, device="cpu", channels=64, layout="bhsd", slices=False):
    """q and k, which have a token of zeros. `slices`: of one tensor with both, and gaps."""
    q, k = (drawn(2, heads, tokens, channels, seed=seed) + 0.2
            for heads, tokens, seed in ((4, 37, 7), (2, 50, 8)))  # fmt: skip
    for t in (q, k):
        t[0, 0, 3] = 0
    q, k = (t.to(device=device, dtype=dtype) for t in (q, k))
    if slices:
        q, k = (torch.nn.functional.pad(t.transpose(1, 2), (8, 16)).transpose(1, 2)[..., 8:-16]
                for t in (q, k))  # fmt: skip
    return (q.transpose(1, 2), k.transpose(1, 2)) if layout == "bshd" else (q, k)


def learned(given):
    """The names of what gets gradients among a call's keywords."""
    return [name for name in ("q_norm", "k_norm", "q_inv_rms", "k_inv_rms")
            if isinstance(given.get(name), torch.Tensor)]  # fmt: skip


def with_gradients(function, q, k, given, weights):
    """(results, gradients of q, k and what is learned)."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    given = dict(given)
    for name in learned(given):
        given[name] = given[name].detach().requires_grad_()
    results = function(q, k, **given)
    leaves = [q, k, *(given[name] for name in learned(given))]
    loss = sum((y.double() * w).sum() for y, w in zip(results, weights))
    return results, torch.autograd.grad(loss, leaves)


def weights_like(q, k, dtype):
    """Returns the gradient of y, which a type rounds to itself."""
    return [drawn(*t.shape, seed=9 + i, device=t.device).to(dtype).double()
            for i, t in enumerate((q, k))]  # fmt: skip


def assert_near(found, wanted, name, last=None):
    """`last`: the relative size of half of the last bit, with which the result is rounded once."""
    found, wanted = found.detach(), wanted.detach().double()
    assert found.shape == wanted.shape and found.isfinite().all(), name
    # A gain's gradient is a sum over all tokens, in FP32.
    floor = 2e-5 * max(1.0, float(wanted.abs().max())) if last is not None else 1e-10
    apart = (found.double() - wanted).abs() - (last or 0) * wanted.abs()
    assert apart.max() <= floor, f"{name}: {float(apart.max())} over {floor}"


#: Half of the last bit.
LAST = {torch.bfloat16: 2.0**-8 * 1.01, torch.float16: 2.0**-11 * 1.01, torch.float32: 0.0,
        torch.float64: None}  # fmt: skip


def assert_call(function, name, dtype, device="cpu", channels=64, layout="bhsd", slices=False):
    """Results and gradients of a call against FP64; what the call gave."""
    given = calls(device, dtype, channels)[name]
    q, k = inputs(dtype, device, channels, layout, slices)
    weights = weights_like(q, k, dtype)
    found, gradients = with_gradients(lambda q, k, **of: function(q, k, layout=layout, **of), q, k,
                                      given, weights)  # fmt: skip
    # It is FP64, so that autograd does not round the gradients.
    in_fp64 = given | {of: given[of].double() for of in learned(given)}
    wanted, expected = with_gradients(lambda q, k, **of: exact(q, k, layout=layout, **of),
                                      q.double(), k.double(), in_fp64, weights)  # fmt: skip
    for side, y, of in zip("qk", found, wanted):
        assert y.dtype == dtype and y.is_contiguous()
        assert_near(y, of, f"y of {side}", LAST[dtype])
    names = ["q", "k", *learned(given)]
    for of, g, e in zip(names, gradients, expected):
        narrow = of in "qk" or g.dtype == torch.bfloat16 or g.dtype == torch.float16
        last = LAST[g.dtype]
        assert_near(g, e, f"the gradient of {of}",
                    last if narrow else None if g.dtype == torch.float64 else 1e-5)  # fmt: skip
    return found, gradients
