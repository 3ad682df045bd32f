"""torch.ops.sagebwd.sparse_linear_forward and .sparse_linear_backward: SLA2's attention as one
operation of the kernels, and its function of autograd.

`bits` are lists as in `lists.list_ops`. `alpha` is float32 of (batch or 1, heads or 1, shares or
1), of which each stands for `alpha_tokens` queries one behind the other. The kernels take it as 0
for queries that list nothing and, in a spec of linear=complement, as 1 for those that list
everything; there dalpha is 0, which is float32 of (batch, heads, queries). With `of_rest` the
numbers are not alpha but rest, the logarithm of what a query's other keys weigh: alpha is
sigmoid(lse - rest), and dalpha the gradient of rest.

The backward takes exact attention's output, or with `of_rest` the mixed one, as `kept`. Calls of
very many queries have a backward of some heads at a time: the memory of copies and sums, which lie
between the kernels, is that of some heads alone. Without `of_rest` they keep neither sparse_out nor
lse, and form both again. Other calls keep `sums`, the linear branch's sums of blocks as bytes, which
take as much memory as V of 128 channels per 128 queries; they are empty where none are kept.
"""

import torch

from sagebwd.core import direct, forms, ops, options, transforms, watching
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import DTYPES, check_backward, problem_of
from sagebwd.core.once import once
from sagebwd.lists import blocks, list_ops
from sagebwd.sla import estimated_kernels
from sagebwd.sla.parts import of_heads, save, saved

#: The most parts of a call, and the fewest queries of all heads of a call that has parts: four of
#: them, as each launches all kernels.
PARTS = 8
LEAST_QUERIES = 1 << 20

CHANNELS = (64, 128)
_MOST_IN_A_GRID = 65535

_library = ops.library()
_OPTIONS = (
    "Tensor bits, Tensor alpha, int alpha_tokens, bool of_rest, bool keeps_sums, "
    "float? softmax_scale, str layout, str spec"
)
_library.define(
    f"sparse_linear_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> "
    "(Tensor out, Tensor sparse_out, Tensor lse, Tensor sums)",
    tags=ops.TAGS,
)
_library.define(
    "sparse_linear_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? kept, "
    f"Tensor? lse, Tensor? sums, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)",
    tags=ops.TAGS,
)


def take(q, v, sizes):
    """Whether there are kernels for (batch, heads, tokens, channels) tensors and a block size."""
    return (
        q.device.type in ops.DEVICES
        and q.dtype in DTYPES
        and q.shape[3] == v.shape[3]
        and q.shape[3] in CHANNELS
        and max(q.shape[:2]) <= _MOST_IN_A_GRID
        and set(sizes) <= set(blocks.SIZES)
    )


def _check_alpha(alpha, tokens, problem, device):
    """SpecError for shares that are not those of a problem."""
    batch, heads, _, queries, _ = problem
    if tokens < 1:
        raise options.SpecError(f"alpha_tokens={tokens}: pass how many queries share an alpha, 1 "
                                "or more")  # fmt: skip
    shares = blocks.count_of(queries, tokens)
    shape = tuple(alpha.shape)
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads)
    if not fits or shape[2] not in (1, shares) or alpha.dtype != torch.float32:
        raise options.SpecError(
            f"alpha is {shape} {alpha.dtype}; {queries} queries need float32 of ({batch} or 1, "
            f"{heads} or 1, {shares} or 1), one for {tokens} of them"
        )
    if alpha.device != device:
        raise options.SpecError(f"alpha is on {alpha.device} and q on {device}: move it")


def _steps(alpha):
    return (step if size > 1 else 0 for size, step in zip(alpha.shape, alpha.stride()))


class _MixedForm(list_ops.ListedForm):
    """A `ListedForm` whose passes also take alpha, sums and, at the end, sparse_out or dalpha."""

    _OUTPUTS = 2

    def __init__(self, bits, alpha, q, k, v, tokens, of_rest, keeps_sums, softmax_scale, layout,
                 text):  # fmt: skip
        if list_ops.checked(text).linear == "none":
            raise options.SpecError(f"spec={text!r} has no linear attention: add linear=complement "
                                    "or linear=all, or call block_sparse_forward")  # fmt: skip
        problem = problem_of(q, k, v, layout, ops.DEVICES)
        _check_alpha(alpha, tokens, problem, q.device)
        super().__init__(bits, q, k, v, softmax_scale, layout, text,
                         (*_steps(alpha), tokens, of_rest, keeps_sums))  # fmt: skip
        kept = keeps_sums and not self._empty
        self.bytes_of_sums = self._kernels.kept_sums_bytes(self._problem) if kept else 0

    def forward(self, q, k, v, bits, alpha):
        """(out, sparse_out, lse, sums)."""
        sums = q.new_empty(self.bytes_of_sums, dtype=torch.uint8)
        if self._empty:
            out, lse = super().forward(q, k, v)
            return out, torch.zeros_like(out), lse, sums
        sparse_out = self._new_like(q)
        packing = bits, alpha, sums if self.bytes_of_sums else None, sparse_out
        out, lse = super().forward(q, k, v, packing=packing)
        return out, sparse_out, lse, sums

    def new_gradients(self, q, k, v):
        """Memory for dq, dk, dv and dalpha."""
        rows = q.new_empty(self._rows, dtype=torch.float32)
        return self._new_like(q), self._new_like(k), self._new_like(v), rows

    def backward(self, to, dout, q, k, v, kept, lse, sums, bits, alpha):
        """Writes dq, dk, dv and dalpha."""
        if self._empty:
            for t in to:
                t.zero_()
            return
        *to, dalpha = to
        if not self.bytes_of_sums:
            sums = None
        elif sums.data_ptr() & 15 or not sums.is_contiguous():  # hooks may bring back such
            sums = sums.clone(memory_format=torch.contiguous_format)
        packing = bits, alpha, sums, dalpha
        super().backward(dout, q, k, v, kept, lse, None, packing=packing, to=to)


_forms = forms.Table()


def _form_of(bits, alpha, q, k, v, *told):
    bits = list_ops.as_kernels_read(bits)
    form = _forms.of((bits, alpha, q, k, v), told,
                     lambda: _MixedForm(bits, alpha, q, k, v, *told))  # fmt: skip
    return form, bits


def _forward(q, k, v, bits, alpha, *told):
    form, bits = _form_of(bits, alpha, q, k, v, *told)
    return form.forward(q, k, v, bits, alpha)


def _backward(dout, q, k, v, kept, lse, sums, bits, alpha, *told):
    form, bits = _form_of(bits, alpha, q, k, v, *told)
    to = form.new_gradients(q, k, v)
    _, of_rest, keeps_sums, _, layout, _ = told
    if (kept is None) != (lse is None) or (of_rest and kept is None):
        raise options.SpecError("kept and lse belong together: pass both, or neither, which are "
                                "then formed again, and with of_rest both")  # fmt: skip
    if kept is not None:
        check_backward(dout, q, k, v, kept, lse, None, layout, ops.DEVICES)
    else:
        _check_for_parts(dout, q, layout)
    if keeps_sums and kept is None:
        raise options.SpecError("keeps_sums=True without kept: pass kept and lse as well, or "
                                "keeps_sums=False in both passes")  # fmt: skip
    _check_sums(sums, keeps_sums, form.bytes_of_sums, q)
    if kept is None or (of_rest and layout == "bhsd" and not keeps_sums and in_parts(q) > 1):
        for part in _parts(dout, q, k, v, kept, lse, bits, alpha, to):
            _backward_of_part(*part, *told)
    else:
        form.backward(to, dout, q, k, v, kept, lse, sums, bits, alpha)
    if watching.watchers:
        watching.backward_ran(form)
    return to


def _check_sums(sums, keeps_sums, size, q):
    """SpecError for sums that are not a forward's. `size`: their bytes."""
    if not keeps_sums:
        if sums is not None and sums.numel():
            raise options.SpecError("sums are given: pass keeps_sums=True in both passes, and kept "
                                    "and lse with them, or None")  # fmt: skip
    elif sums is None or (sums.numel(), sums.dtype, sums.device) != (size, torch.uint8, q.device):
        about = None if sums is None else f"{sums.dtype} of {tuple(sums.shape)} on {sums.device}"
        raise options.SpecError(f"sums is {about}; with keeps_sums=True it must be what the forward "
                                f"gave, {size} bytes on {q.device}")  # fmt: skip


def _check_for_parts(dout, q, layout):
    """SpecError for what `_parts` would divide wrongly."""
    if layout != "bhsd":
        raise options.SpecError(f"layout={layout!r} without kept: pass 'bhsd', or what the "
                                "forward gave")  # fmt: skip
    if (dout.shape, dout.dtype, dout.device) != (q.shape, q.dtype, q.device):
        raise options.SpecError(f"dout is {dout.dtype} of {tuple(dout.shape)} on {dout.device}; it "
                                f"must be like q, {q.dtype} of {tuple(q.shape)} on {q.device}")  # fmt: skip


def in_parts(q):
    """How many parts a call's backward has."""
    count = q.shape[0] * q.shape[1] * q.shape[2] // LEAST_QUERIES
    return 1 if count < 1 else min(PARTS, 4 * count)


def _parts(dout, q, k, v, kept, lse, bits, alpha, to):
    """Views of tensors of (batch, heads, tokens, channels), whose results have no gaps."""
    (batch, heads_kv), group = k.shape[:2], q.shape[1] // k.shape[1]
    count = in_parts(q)
    step_h = min(heads_kv, max(1, batch * heads_kv // count))
    step_b = max(1, batch // count) if step_h == heads_kv else 1
    dq, dk, dv, dalpha = to
    for first in range(0, batch, step_b):
        b = slice(first, first + step_b)
        for head in range(0, heads_kv, step_h):
            h = slice(head, head + step_h)
            of_q = slice(h.start * group, h.stop * group)
            of_queries = (t if t is None else t[b, of_q] for t in (kept, lse))
            yield ((dq[b, of_q], dk[b, h], dv[b, h], dalpha[b, of_q]), dout[b, of_q], q[b, of_q],
                   k[b, h], v[b, h], *of_queries,
                   *(of_heads(t, b, h, heads_kv) for t in (bits, alpha)))  # fmt: skip


def _backward_of_part(to, dout, q, k, v, kept, lse, bits, alpha, *told):
    if kept is None:
        *_, softmax_scale, layout, spec = told
        exact = " ".join(word for word in spec.split() if not word.startswith("linear="))
        kept, lse = list_ops.forward(q, k, v, bits, softmax_scale, layout, exact)
    form, bits = _form_of(bits, alpha, q, k, v, *told)
    form.backward(to, dout, q, k, v, kept, lse, None, bits, alpha)


for _key in ops.BACKENDS:
    _library.impl("sparse_linear_forward", _forward, _key)
    _library.impl("sparse_linear_backward", _backward, _key)


def _check_told(problem, q, bits, alpha, alpha_tokens, softmax_scale, spec):
    told = list_ops.checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    check_scale(softmax_scale, q.shape[3], told)
    list_ops.check_bits(bits, problem, (told.sparse_q, told.sparse_kv), q.device)
    _check_alpha(alpha, alpha_tokens, problem, q.device)


def bytes_of_sums(spec, problem):
    """Returns kept_sums_bytes() of sizes that torch.compile may not know yet. A block of queries,
    or a head, has a matrix in 16 bits and a vector in FP32; a head has parts of its keys' mean."""
    batch, heads, heads_kv, queries, keys = problem
    if 0 in (batch, queries, keys):  # no kernel runs
        return 0
    channels, by_head = spec.head_dim, spec.linear == "all"
    sums = heads_kv if by_head else heads * blocks.count_of(queries, spec.sparse_q)
    chunk = torch.sym_max(256, blocks.count_of(blocks.count_of(keys, 16), 64) * 64)
    has_mean = spec.smooth_k and spec.dp_sums == "fp32"
    parts = heads_kv * blocks.count_of(keys, chunk) if has_mean else 0
    return batch * channels * (sums * (2 * channels + 4) + parts * 4)


def _new_rows(q, problem):
    return q.new_empty((problem[0], problem[1], problem[3]), dtype=torch.float32)


@torch.library.register_fake("sagebwd::sparse_linear_forward", lib=_library)
def _forward_fake(q, k, v, bits, alpha, alpha_tokens, of_rest, keeps_sums, softmax_scale, layout,
                  spec):  # fmt: skip
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    _check_told(problem, q, bits, alpha, alpha_tokens, softmax_scale, spec)
    told = list_ops.checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    sums = q.new_empty(bytes_of_sums(told, problem) if keeps_sums else 0, dtype=torch.uint8)
    return q.new_empty(q.shape), q.new_empty(q.shape), _new_rows(q, problem), sums


@torch.library.register_fake("sagebwd::sparse_linear_backward", lib=_library)
def _backward_fake(dout, q, k, v, kept, lse, sums, bits, alpha, alpha_tokens, of_rest, keeps_sums,
                   softmax_scale, layout, spec):  # fmt: skip
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    _check_told(problem, q, bits, alpha, alpha_tokens, softmax_scale, spec)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), _new_rows(q, problem)


# ---- gradients -----------------------------------------------------------------------------------


def keeps_sums(*leaves):
    """Whether a forward of q, k, v and alpha, which may be None, keeps sums for a backward."""
    has_backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
    return has_backward and in_parts(leaves[0]) == 1


class Mixed(torch.autograd.Function):
    """The mixed output of (batch, heads, tokens, channels) tensors, differentiable in q, k, v and
    alpha. With `mask`, the lists once more as bool, and the blocks' `sizes` alpha is estimated, and
    what is given as alpha is beta, of (heads,), or None. `told`: the operators' other arguments."""

    @staticmethod
    def forward(ctx, q, k, v, alpha, bits, mask, sizes, told):
        ctx.told, ctx.sizes, of_rest, estimate = told, sizes, mask is not None, ()
        if of_rest:
            beta = alpha
            alpha, *kept = estimated_kernels.forward(q, k, mask, sizes, told[3])
            if beta is not None:
                alpha.add_(beta.to(alpha.dtype)[:, None])
            estimate = beta, mask, *kept
        given = q, k, v, bits, alpha
        run = torch.ops.sagebwd.sparse_linear_forward if direct.is_watched(*given) else _forward
        out, sparse_out, lse, sums = run(*given, *told)
        forms_again = in_parts(q) > 1 and not of_rest
        kept = (None, None, None) if forms_again else (out if of_rest else sparse_out, lse, sums)
        save(ctx, *given, *kept, *estimate)
        return out

    @staticmethod
    def backward(ctx, dout):
        transforms.refuse_batches(dout)
        transforms.refuse_tangents(dout)
        q, k, v, bits, alpha, kept, lse, sums, *estimate = saved(ctx)
        given = dout, q, k, v, kept, lse, sums, bits, alpha
        is_watched = direct.is_watched(*(t for t in given if t is not None))
        run = torch.ops.sagebwd.sparse_linear_backward if is_watched else _backward
        dq, dk, dv, d_alpha = run(*given, *ctx.told)
        learned = alpha
        if estimate:
            learned, *estimate = estimate
            dq, dk = estimated_kernels.added((dq, dk), d_alpha, q, *estimate, ctx.sizes, ctx.told[3])
        if not ctx.needs_input_grad[3]:
            d_alpha = None
        elif estimate:
            d_alpha = d_alpha.sum((0, 2)).to(learned.dtype)
        else:
            d_alpha = _of_shares(d_alpha, alpha.shape, ctx.told[0])
        return *once((dq, dk, dv, d_alpha), dout, q, k, v, learned), None, None, None, None


def _of_shares(dalpha, shape, tokens):
    """The sums of each query's gradient over what shares a number."""
    queries = dalpha.shape[2]
    if shape[2] not in (1, queries):
        dalpha = torch.nn.functional.pad(dalpha, (0, -queries % tokens))
        dalpha = dalpha.unflatten(2, (-1, tokens)).sum(3)
    return dalpha.sum_to_size(shape)
