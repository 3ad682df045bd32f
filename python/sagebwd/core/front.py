"""`sagebwd.qk_norm_rope`: what a layer does between its projections and attention."""

import torch

from sagebwd.core import direct, front_arguments, front_direct, ops, options, transforms
from sagebwd.core.front_kernels import wide
from sagebwd.core.keywords import known_keywords
from sagebwd.core.once import once

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def operators():
    """The operators of `front_kernels`. Tests put others in their place."""
    return torch.ops.sagebwd


class _Front(torch.autograd.Function):
    """Kernels run it at once where it has a `form` of front_direct. Otherwise operators do, whose
    arguments are given."""

    @staticmethod
    def forward(ctx, form, q, k, *given):
        ctx.form, ctx.told = form, given[8:]
        ctx.read = None  #: by backwards, what attention's has read of the saved tensors
        tensors = (q, k, *given[:8])
        if form is None:
            found = operators().front_forward(q, k, *given)
        else:
            if form.casts:  # no tensor that is saved: it may change meanwhile, as if cast outside
                ctx.gains = [t for t in given[:2] if t is not None and t.requires_grad]
            tensors = form.made(tensors)
            found = form.forward(tensors)
        ctx.save_for_backward(*tensors)
        # Attention forms no gradient of keys, say, of which nothing is learned.
        constant = [y for i, y in enumerate(found) if not any(ctx.needs_input_grad[1 + i : 7 : 2])]
        if len(constant) == 1:
            ctx.mark_non_differentiable(*constant)
        return found

    @staticmethod
    def backward(ctx, dy_q, dy_k):
        form, tensors, needs = ctx.form, _tensors_of(ctx), ctx.needs_input_grad[1:]
        # With create_graph=True a node that refuses is left.
        if torch.is_grad_enabled() or not _may_launch(form, tensors, dy_q, dy_k):
            found = _backward_by_operators(ctx, form, tensors, needs, dy_q, dy_k)
        else:
            found = form.backward((dy_q, dy_k), tensors, needs)
        found = found if form is None else form.cast_back(found)
        return (None, *found, *(None,) * (len(needs) - 6))


def _tensors_of(node):
    """The saved tensors of a node, in its backward, where attention's may have read them."""
    read = node.read and node.read.pop(torch._C._current_graph_task_id(), None)
    return read[0] if read else node.saved_tensors


def formed_again(node, tensors):
    """Forms what a node has given once more, from its saved tensors, without a graph."""
    form = node.form
    if _may_launch(form, tensors):
        return form.forward(tensors)
    taken = tensors if form is None else form.as_operators_take(tensors)
    with ops.no_autocast(tensors[0].device.type):
        return operators().front_forward(*taken, *node.told)


def _may_launch(form, tensors, *gradients):
    """Whether kernels may be told the saved tensors of a call at once; hooks may have replaced
    them."""
    if form is None:
        return False
    is_watched = direct.is_watched(*gradients, *(t for t in tensors if t is not None))
    return not is_watched and form.saved(tensors) and form.reads(tensors)


def _backward_by_operators(ctx, form, tensors, needs, dy_q, dy_k):
    """Gradients of q, k, gains and 1/rms, those of gains in FP32."""
    transforms.refuse_batches(dy_q, dy_k)
    transforms.refuse_tangents(dy_q, dy_k)
    taken = tensors if form is None else form.as_operators_take(tensors)
    with ops.no_autocast(dy_q.device.type):
        found = operators().front_backward(
            dy_q.detach(), dy_k.detach(), *(t if t is None else t.detach() for t in taken),
            *ctx.told, [needs[i] for i in range(2, 6)],
        )  # fmt: skip
    found = [g if need else None for g, need in zip(found, needs)]
    given = (dy_q, dy_k, *(t for t in tensors[:6] if t is not None))
    return once(found, *given, *getattr(ctx, "gains", ()))


@front_arguments.described
@known_keywords(front_arguments.OTHERWISE)
def qk_norm_rope(
    q, k, *, q_norm=None, k_norm=None, norm_eps=1e-6, q_inv_rms=None, k_inv_rms=None, rope=None,
    rope_k=None, rope_style="halves", rope_begin=0, layout="bhsd",
):  # fmt: skip
    """RMSNorm of each head of queries and keys (QK-norm), and RoPE, in one pass over each.

    n = x / sqrt(mean(x^2) + norm_eps) * gain over the channels of a head (RMSNorm, arXiv
    1910.07467), then pairs of channels are rotated by their token's angles (RoPE, arXiv
    2104.09864). SageBwd (arXiv 2603.02170) finds QK-norm necessary at many tokens a step. All is
    computed in FP32 (FP64 for tensors of FP64) and rounded once, so that it is nearer to the exact
    result than modules that round behind the norm as well. The backward forms everything again from
    q and k, gives the same bits in every run, and cannot be differentiated again.

    bfloat16 and float16 on a CUDA GPU from compute capability 8.0 on, with a head_dim that is a
    multiple of 8 from 32 to 512, a rope_begin that is a multiple of 4 and whole fours of channels
    in each half (interleaved: of two pairs), take kernels. All else takes PyTorch's operations.

    Args:
        q: (batch, heads, queries, head_dim), of any floating type, on any device.
        k: (batch, heads_kv, keys, head_dim), of the same; heads must be a multiple of heads_kv.
        {arguments}
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.

    Returns:
        (q, k) of the inputs' shapes and types, contiguous, differentiable once in q, k, the gains
        and given 1/rms, by autograd alone: torch.func is refused. Autocast changes no type.

    Raises:
        SpecError (a ValueError), TypeError.
    """
    given = key = form = None
    if not torch.compiler.is_compiling():
        told = norm_eps, rope_style, rope_begin, layout, q_norm is not None, k_norm is not None
        given = front_direct.tensors_of(q, k, q_norm, k_norm, q_inv_rms, k_inv_rms, rope, rope_k)
        key = front_direct.key_of(given, *told)
        form = front_direct.known_form(key, given)
    if form is not None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given[:6]):
            return _Front.apply(form, *given, *form.told)
        return form.forward(form.made(given))
    checked = _checked(q, k, q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k,
                       rope_style, rope_begin, layout)  # fmt: skip
    with ops.no_autocast(checked[0].device.type):
        found = _Front.apply(None, *checked)
    front_direct.remember(key, given, checked)
    return found


def _checked(q, k, q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style,
             rope_begin, layout):  # fmt: skip
    """The operators' arguments."""
    options.check_layout(layout)
    _check_tensors(q, k, layout)
    transforms.refuse_tangents(q, k, *(t for t in (q_norm, k_norm, q_inv_rms, k_inv_rms)
                                if isinstance(t, torch.Tensor)))  # fmt: skip
    transforms.refuse_transforms("qk_norm_rope")
    eps, begin = front_arguments.check_numbers(
        q_norm, k_norm, norm_eps, rope, rope_k, rope_style, rope_begin)  # fmt: skip
    with ops.no_autocast(q.device.type):
        gains = [
            _gain(name, of, t, layout)
            for name, of, t in (("q_norm", q_norm, q), ("k_norm", k_norm, k))
        ]
        inv_rms = [_inv_rms(name, of, t, layout) for name, of, t in
                   (("q_inv_rms", q_inv_rms, q), ("k_inv_rms", k_inv_rms, k))]  # fmt: skip
        tables = [*_table("rope", rope, q, layout, begin)]
        if rope_k is None:
            _check_shared_table(rope, q, k, layout)
            tables += _table("rope", rope, k, layout, begin)
        else:
            tables += _table("rope_k", rope_k, k, layout, begin)
        if tables[0] is not None and tables[0].shape[-1] != tables[2].shape[-1]:
            raise options.SpecError(
                f"rope has {tables[0].shape[-1]} pairs of channels and rope_k "
                f"{tables[2].shape[-1]}: pass tables of as many"
            )
        normed = [norm is not None or of is not None
                  for norm, of in ((q_norm, q_inv_rms), (k_norm, k_inv_rms))]  # fmt: skip
        shared = (_once_more(*both) for both in ((q, k), gains, inv_rms))
        (q, k), gains, inv_rms = shared
        return (q, k, *gains, *inv_rms, *tables, normed, eps, begin, rope_style == "interleaved",
                layout)  # fmt: skip


def _once_more(first, second):
    """Both, where one tensor stands for both as two: torch.compile takes none twice."""
    return first, second if second is None or second is not first else second.view_as(second)


def _check_tensors(q, k, layout):
    for name, t in (("q", q), ("k", k)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {options.a_kind(t)}; pass a torch tensor")
        if t.is_nested:
            raise options.SpecError(
                f"{name} is a nested tensor: pass its values as (1, tokens, heads, head_dim), with "
                "layout='bshd'"
            )
        if type(t).__name__ == "DTensor":
            raise options.SpecError(
                f"{name} is a DTensor: each rank norms and rotates its own tokens and heads. Wrap "
                "the call in torch.distributed.tensor.experimental.local_map, or pass "
                f"{name}.to_local()"
            )
        if t.dtype not in _FLOATING:
            raise options.SpecError(
                f"{name} is {t.dtype}: pass torch.bfloat16, torch.float16, torch.float32 or "
                "torch.float64"
            )
        if t.dim() != 4:
            raise options.SpecError(
                f"{name} has rank {t.dim()} (shape {tuple(t.shape)}): pass (batch, heads, tokens, "
                "head_dim), or (batch, tokens, heads, head_dim) with layout='bshd'"
            )
    if q.dtype != k.dtype or q.device != k.device:
        raise options.SpecError(f"q is {q.dtype} on {q.device} and k {k.dtype} on {k.device}: pass "
                                "one dtype on one device")  # fmt: skip
    (heads, _), (heads_kv, _) = (_heads_and_tokens(t, layout) for t in (q, k))
    if not heads_kv or not heads or heads % heads_kv:
        raise options.SpecError(
            f"q has {heads} heads and k has {heads_kv}; the first must be a positive multiple of "
            "the second (is layout= right?)"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise options.SpecError(
            f"q of {tuple(q.shape)} and k of {tuple(k.shape)} do not belong together: pass one "
            "batch and one head_dim"
        )


def _heads_and_tokens(t, layout):
    return (t.shape[1], t.shape[2]) if layout == "bhsd" else (t.shape[2], t.shape[1])


def check_floats(name, t, like, wanted):
    """TypeError and SpecError for what are no floating numbers on the tensor's device."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(t)}; pass {wanted}")
    if t.dtype not in _FLOATING or t.device != like.device:
        raise options.SpecError(f"{name} is {t.dtype} on {t.device}: pass floating numbers on "
                                f"{like.device}")  # fmt: skip


def _gain(name, gain, x, layout):
    """The gain in the type of arithmetic, or None."""
    if gain is None or gain is True:
        return None
    if gain is False:
        raise options.SpecError(f"{name}=False: pass None for no norm")
    check_floats(name, gain, x, "the norm's gain, True for a norm without gain, or None")
    heads, channels = _heads_and_tokens(x, layout)[0], x.shape[3]
    if tuple(gain.shape) not in ((channels,), (heads, channels)):
        raise options.SpecError(f"{name} has shape {tuple(gain.shape)}: pass ({channels},), or "
                                f"({heads}, {channels}) for a gain of each head")  # fmt: skip
    return gain.to(wide(x.dtype)).contiguous()


def _inv_rms(name, inv_rms, x, layout):
    if inv_rms is None:
        return None
    check_floats(name, inv_rms, x, "1/rms of each token, or None")
    heads, tokens = _heads_and_tokens(x, layout)
    if tuple(inv_rms.shape) not in ((x.shape[0], tokens), (x.shape[0], heads, tokens)):
        raise options.SpecError(
            f"{name} has shape {tuple(inv_rms.shape)}: pass ({x.shape[0]}, {tokens}), or "
            f"({x.shape[0]}, {heads}, {tokens}) for one of each head"
        )
    return inv_rms.to(wide(x.dtype)).contiguous()


def _check_shared_table(rope, q, k, layout):
    queries, keys = (_heads_and_tokens(t, layout)[1] for t in (q, k))
    if rope is not None and queries != keys:
        raise options.SpecError(
            f"{queries} queries and {keys} keys have tables of their own: pass rope_k=(cos, sin) "
            f"of ({keys}, pairs) for the keys"
        )


def _table(name, given, x, layout, begin):
    """Cosines and sines of (batch, tokens, pairs) in the type of arithmetic; two of None."""
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{name} is {options.a_kind(given)}; pass (cos, sin), two torch tensors, "
                        "such as (f.real, f.imag) of a complex table")  # fmt: skip
    tokens, channels = _heads_and_tokens(x, layout)[1], x.shape[3]
    made = []
    for of, t in zip(("cos", "sin"), given):
        check_floats(f"{name}'s {of}", t, x, "a torch tensor")
        if torch.is_grad_enabled() and t.requires_grad:
            raise options.SpecError(
                f"{name}'s {of} requires grad, but tables get no gradient: pass {of}.detach()"
            )
        if t.dim() not in (2, 3) or t.shape[-2] != tokens or (
            t.dim() == 3 and t.shape[0] not in (1, x.shape[0])
        ):  # fmt: skip
            raise options.SpecError(
                f"{name}'s {of} has shape {tuple(t.shape)}: pass ({tokens}, pairs) or "
                f"({x.shape[0]}, {tokens}, pairs) (is layout={layout!r} right?)"
            )
        pairs = t.shape[-1]
        front_arguments.check_pairs(f"{name}'s {of}", pairs, begin, channels)
        t = t.to(wide(x.dtype))
        made.append(t.expand(x.shape[0], tokens, pairs))
    if made[0].shape != made[1].shape:
        raise options.SpecError(
            f"{name}'s cos has {made[0].shape[-1]} pairs and its sin {made[1].shape[-1]}: pass as "
            "many"
        )
    return made
