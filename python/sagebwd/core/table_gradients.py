"""torch.ops.sagebwd.table_gradients: what tensors that a score function indexes get.

With S = score(s), P = softmax(S), dP = dO V^T and dS = P (dP - rowsum(P dP) + dlse), the gradient
of a number is the sum of dS times its coefficient over all (b, h, q, k) that read it. No kernel has
it: PyTorch forms s and dP again, 16-bit products with FP32 sums, for a part of the queries at a
time. P is not that of the kernels' lse, whose roundings would leave rows of dS that do not sum to
zero, and a table's sums are small differences. This takes time in proportion to all scores, hidden
ones too, several times that of the kernels' backward, and memory in proportion to the keys.
"""

import functools

import torch

from sagebwd.core import mask_ops, max_logits, once, ops, options, seams, transforms
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import problem_of
from sagebwd.core.expressions import checked, facts_of, operands_of

#: How many scores are formed at a time, if that is a query of each head at least.
SCORES = 1 << 24

_library = ops.library()
_library.define(
    "table_gradients(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? dlse, Tensor tables, "
    "SymInt[] sizes, float? softmax_scale, str layout, str spec, str names) -> Tensor",
    tags=ops.TAGS)  # fmt: skip
#: Whether torch.bmm of 16 bits gives FP32: from PyTorch 2.8 on, on a GPU.
_GIVES_SUMS = "dtype" in torch.ops.aten.bmm.overloads()


def attention(q, k, v, more, softmax_scale, layout, spec, of_score):
    """The results of `masked_forward`, or of that with largest scores, with gradients also of the
    tensors of the score that require grad. `more`: tables, sizes and bits. SpecError where there is
    no gradient of these."""
    named = {name: t for name, t in of_score.items() if t.requires_grad}
    if not torch.compiler.is_compiling():  # else the operator's shapes are asked for
        _check(spec, ",".join(named))
    transforms.refuse_tangents(q, k, v, *named.values())
    tables, sizes, bits = more
    given = tuple(sizes), softmax_scale, layout, spec, ",".join(named)
    return _Attention.apply(q, k, v, tables, bits, given, *named.values())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tables, bits, given, *trained):
        sizes, *told, names = given
        forward = max_logits.operator_of("masked_forward", told[-1])
        out, lse, *more = forward(q, k, v, tables, sizes, bits, *told)
        ctx.mark_non_differentiable(*more)
        ctx.save_for_backward(q, k, v, out, lse, tables, bits, *trained)
        ctx.given = given
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse, *more

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        q, k, v, out, lse, tables, bits, *trained = ctx.saved_tensors
        unwanted = (None,) * (6 + len(trained))
        if dout is None and dlse is None:
            return unwanted
        if dout is None:
            dout = torch.zeros_like(out)
        sizes, *told, names = ctx.given
        passed = dout, q, k, v, out, lse, dlse
        gradients = None, None, None
        if any(ctx.needs_input_grad[:3]):
            gradients = torch.ops.sagebwd.masked_backward(*passed, tables, sizes, bits, *told)
        with torch.no_grad():
            flat = torch.ops.sagebwd.table_gradients(dout, q, k, v, dlse, tables, sizes, *told,
                                                     names)  # fmt: skip
            each = torch.split(flat, [t.numel() for t in trained])
            each = tuple(x.view(t.shape).to(t.dtype) for x, t in zip(each, trained))
        return *gradients, *unwanted[:3], *once.once(each, *passed[:-1], *trained)


@functools.cache
def _check(spec, names):
    seams.table_sums().check_trainable(checked(spec).score, names.split(","))


def _count(sizes, spec, names):
    """How many numbers the named tensors have."""
    wanted, pairs = names.split(","), zip(sizes[::2], sizes[1::2])
    return sum(rows * columns for (name, _, is_score), (rows, columns) in
               zip(facts_of(spec)[0], pairs) if is_score and name in wanted)  # fmt: skip


def _table_gradients(dout, q, k, v, dlse, tables, sizes, softmax_scale, layout, spec, names):
    problem_of(q, k, v, layout, ops.DEVICES)
    _check(spec, names)
    if layout == "bshd":
        dout, q, k, v = (t.transpose(1, 2) for t in (dout, q, k, v))
    k, v = k.contiguous(), v.contiguous()  # once, and not for each part
    told, wanted = checked(spec), names.split(",")
    each = mask_ops.each_of(tables, sizes)
    of_mask, of_score = operands_of(told.mask, told.score, each, sizes)
    sums = {name: torch.zeros(t.numel(), dtype=torch.float64, device=q.device)
            for name, t in of_score.items() if name in wanted}  # fmt: skip
    batch, heads, queries, channels = q.shape
    keys = k.shape[2]
    scale = channels**-0.5 if softmax_scale is None else softmax_scale
    each = max(1, SCORES // max(1, batch * heads * keys))
    expressions = seams.table_sums()
    for first in range(0, queries if batch * keys else 0, each):
        rows = slice(first, min(first + each, queries))
        places = _places(batch, heads, rows, keys, q.device)
        places["s"] = _products(q[:, :, rows], k).double() * scale
        seen = expressions.visible(told, places, keys - queries, of_mask)
        scores = expressions.scores(told.score, places, of_score)
        p = torch.where(seen, scores.float(), -torch.inf).softmax(-1)
        p = torch.where(seen, p, 0.0)  # a query that sees no key has NaN
        dp = _products(dout[:, :, rows], v)
        delta = (p * dp).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[:, :, rows, None]
        ds = (p * (dp - delta)).double()
        expressions.add_gradients(told.score, ds, places, of_score, sums)
    return torch.cat(list(sums.values())).float()


def _products(x, y):
    """x y^T with FP32 sums; heads of x may share those of y."""
    batch, heads, rows, channels = x.shape
    heads_kv = y.shape[1]
    x = x.reshape(batch * heads_kv, -1, channels)
    y = y.reshape(batch * heads_kv, -1, channels)
    if x.is_cuda and _GIVES_SUMS:
        found = torch.bmm(x, y.mT, out_dtype=torch.float32)
    else:
        found = x.float() @ y.float().mT
    return found.view(batch, heads, rows, -1)


def _places(batch, heads, rows, keys, device):
    """b, h, q and k, int32 that broadcast to (batch, heads, queries, keys)."""
    ranges = (0, batch), (0, heads), (rows.start, rows.stop), (0, keys)
    return {name: torch.arange(*of, dtype=torch.int32, device=device).view(
        [-1 if i == axis else 1 for i in range(4)])
        for axis, (name, of) in enumerate(zip("bhqk", ranges))}  # fmt: skip


for _key in ("CUDA", "CPU"):
    _library.impl("table_gradients", _table_gradients, _key)


@torch.library.register_fake("sagebwd::table_gradients", lib=_library)
def _fake(dout, q, k, v, dlse, tables, sizes, softmax_scale, layout, spec, names):
    problem_of(q, k, v, layout, ops.DEVICES)
    check_scale(softmax_scale, q.shape[3], options.spec_of_text(
        spec, head_dim=int(q.shape[3]), dtype=q.dtype))  # fmt: skip
    _check(spec, names)
    return tables.new_empty(_count(sizes, spec, names), dtype=torch.float32)
