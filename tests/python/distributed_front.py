"""Norm, RoPE and gate of sequences that ranks share, for tests here and on GPUs."""

import front_inputs
import torch
import torch.distributed as dist
from alike import relative
from distributed_ranks import device, draw, mesh_of

import sagebwd
from sagebwd import distributed

#: The most that the gradient of a gain may be off where few tokens share a scale.
GAINS = 0.05
LEARNED = ("q", "k", "v", "gate", "q_norm", "k_norm", "q_inv_rms", "k_inv_rms")
#: By name: what is drawn, options of attention, and arguments of norm and RoPE with their shapes.
#: M and N are the numbers of queries and keys, B is the batch, H and K are the numbers of heads.
CASES = {
    "one table": (dict(heads=8, heads_kv=2, tokens=101), dict(causal=True),
                  dict(q_norm="D", k_norm="D", rope=("M", 16))),
    "tables of each sequence": (
        dict(heads=4, heads_kv=4, tokens=66, batch=2, layout="bshd"),
        dict(causal=True, layout="bshd"),
        dict(q_norm="HD", k_norm="KD", norm_eps=0.01, rope=("BM", 16))),
    "given 1/rms": (dict(heads=4, heads_kv=2, tokens=50, dtype=torch.float16), {},
                    dict(q_norm="HD", q_inv_rms="BM", k_inv_rms="BKN", rope=("M", 16))),
    "other keys": (dict(heads=8, heads_kv=2, tokens=40, keys=90), dict(smooth_k=False),
                   dict(k_norm="D", rope=("M", 6), rope_k=("BN", 6), rope_begin=4,
                        rope_style="interleaved")),
}  # fmt: skip


def _sizes(drawn):
    given = {"batch": 1, "d": 32, **drawn}
    return dict(B=given["batch"], H=given["heads"], K=given["heads_kv"], D=given["d"],
                M=given["tokens"], N=given.get("keys", given["tokens"]))  # fmt: skip


def tensors_of(case):
    """(whole tensors by name, those that are learned first; other keywords; options)."""
    drawn, chosen, told = case
    sizes, found, keywords = _sizes(drawn), {}, {}
    (q, k, v, dout), _ = draw(**drawn)
    found |= dict(q=q, k=k, v=v, dout=dout)
    found["gate"] = front_inputs.drawn(*q.shape, seed=3, device=device())
    for seed, (name, x) in enumerate(told.items()):
        if name in ("rope", "rope_k"):
            cos, sin = front_inputs.table(*(sizes[axis] for axis in x[0]), x[1], seed=seed,
                                          device=device())  # fmt: skip
            found |= {f"{name} cos": cos, f"{name} sin": sin}
        elif isinstance(x, str) and name in LEARNED:
            shape = [sizes[axis] for axis in x]
            found[name] = 1 + 0.3 * front_inputs.drawn(*shape, seed=seed, device=device())
        else:
            keywords[name] = x
    return found, keywords, chosen


def axis_of(name, layout):
    """Gives the axis of tokens of a tensor; None for gains."""
    if name in ("q_norm", "k_norm"):
        return None
    if name.startswith("rope"):
        return -2
    return -1 if name.endswith("inv_rms") else 1 if layout == "bshd" else 2


def arguments_of(found):
    """The keywords of attention among tensors."""
    given = {name: t for name, t in found.items() if name in LEARNED[3:]}
    for name in ("rope", "rope_k"):
        if f"{name} cos" in found:
            given[name] = found[f"{name} cos"], found[f"{name} sin"]
    return given


def together(rank, method, ranks, case):
    """Whole out and gradients of what is learned by all ranks, by name; None of other ranks."""
    mesh = mesh_of(method, ranks)
    found, keywords, chosen = tensors_of(case)
    axes = {name: axis_of(name, chosen.get("layout")) for name in found}
    own = {name: t if axes[name] is None else distributed.shard(
        t, mesh, dim=axes[name], method=method) for name, t in found.items()}  # fmt: skip
    own = {name: t.detach().requires_grad_(name in LEARNED) for name, t in own.items()}
    out = distributed.attention(own["q"], own["k"], own["v"], mesh=mesh, method=method,
                                **arguments_of(own), **keywords, **chosen)  # fmt: skip
    learned = [name for name in LEARNED if name in own]
    gradients = torch.autograd.grad(out, [own[name] for name in learned],
                                    own["dout"].to(out.dtype))  # fmt: skip
    results = {"out": distributed.unshard(out.detach(), mesh, dim=axes["q"], method=method)}
    for name, gradient in zip(learned, gradients):
        if axes[name] is None:
            dist.all_reduce(gradient)
            results[name] = gradient
        else:
            results[name] = distributed.unshard(gradient, mesh, dim=axes[name], method=method)
    return results if rank == 0 else None


def _by_one(case, function, kind=None):
    found, keywords, chosen = tensors_of(case)
    found = {name: t if kind is None else t.to(kind) for name, t in found.items()}
    leaves = {name: t.requires_grad_() for name, t in found.items() if name in LEARNED}
    out = function(leaves["q"], leaves["k"], leaves["v"], chosen, **arguments_of(found), **keywords)
    gradients = torch.autograd.grad(out, list(leaves.values()), found["dout"].to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients))}


def alone(case):
    """One process computes the same: the GPU's by the arguments of attention, and the CPU's step by
    step."""

    def on_gpu(q, k, v, chosen, **given):
        return sagebwd.attention(q, k, v, **given, **chosen)

    def emulated(q, k, v, chosen, gate, **given):
        layout = chosen.get("layout", "bhsd")
        q, k = sagebwd.qk_norm_rope(q, k, layout=layout, **given)
        out = sagebwd.emulation.emulated_attention(q, k, v, **chosen)
        return (out.float() * gate.sigmoid()).to(out.dtype)

    return _by_one(case, on_gpu if device() == "cuda" else emulated)


def wrong_among(found, whole, exact, more):
    """The results of ranks that are further from FP64 than those of one process, and how far.

    A gain's gradient is a few sums over all tokens. If ranks have other groups of tokens with one
    scale than one process has, its error is another one by chance, of the same size. The gradient
    of a given 1/rms is what is left of a token's products with x: whatever is rounded counts as many
    times there as its error is larger than that of x's gradient.
    """
    assert found.keys() == whole.keys() == exact.keys()
    wrong = []
    for name, right in exact.items():
        assert found[name].shape == right.shape and found[name].dtype == whole[name].dtype
        error, of_one = relative(found[name], right), relative(whole[name], right)
        times = 1.0
        if name.endswith("inv_rms"):
            times = max(times, of_one / relative(whole[name[0]], exact[name[0]]))
        if not error < (GAINS if axis_of(name, None) is None else of_one + more * times):
            wrong.append((name, error, of_one))
    return wrong


def exactly(case):
    """PyTorch's operations compute the same in FP64."""

    def in_fp64(q, k, v, chosen, gate, **given):
        is_last = chosen.get("layout") == "bshd"
        q, k = front_inputs.exact(q, k, layout=chosen.get("layout", "bhsd"), **given)
        q, k, v = (t.transpose(1, 2) if is_last else t for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if chosen.get("causal"):
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = scores.softmax(-1) @ v
        return (out.transpose(1, 2) if is_last else out) / (1 + torch.exp(-gate))

    return _by_one(case, in_fp64, torch.float64)
