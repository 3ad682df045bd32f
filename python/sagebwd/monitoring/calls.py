"""Answers what a monitor asks about a call, of the kernels or of the emulation."""

import functools
import weakref

import torch

from sagebwd.core import options
from sagebwd.core.forms import Form

_LISTS = "lists of blocks (block_sparse_attention and SLA2)"


class Call:
    """A form of calls.

    Args:
        key: equal for calls of one form.
        layout: of its tensors.
        sizes: (batch, heads, heads_kv, queries, keys), as the tensors have them.
        head_dim, dtype: of q.
        chosen: the options as a `Spec`, or the emulation's `Rules`.
        scale: the softmax scale.
        unsupported: what a monitor does not measure, in words, or ''.
        has_intervals: whether keys have intervals of queries that do not see them.
        tables: rows and columns of each tensor that a `Spec`'s mask and score index.
    """

    def __init__(self, key, layout, sizes, head_dim, dtype, chosen, scale, unsupported="",
                 has_intervals=False, tables=()):  # fmt: skip
        self.has_intervals, self._tables = has_intervals, tables
        self.key, self.layout, self.sizes = key, layout, sizes
        self.head_dim, self.dtype, self.scale = head_dim, dtype, scale
        self._chosen, self.unsupported = chosen, unsupported

    @functools.cached_property
    def rules(self):
        """The emulation's `Rules` of these calls."""
        from sagebwd.numerics.expressions import Expressions
        from sagebwd.numerics.numerics import Rules

        if isinstance(self._chosen, Rules):
            return self._chosen
        spec = self._chosen
        windows = [None if w is None or w < 0 else w for w in (spec.window_left, spec.window_right)]
        same = ("granularity", "group_q", "group_kv", "smooth_k", "smooth_q", "smooth_v", "rotate",
                "sink_keys", "dp_sums")  # fmt: skip
        has_any = spec.mask or spec.score
        return Rules(
            options.Mask(spec.causal, *windows), self.scale, plan=options.plan_of(spec.precision),
            dtype=self.dtype, math=torch.float32, **{name: getattr(spec, name) for name in same},
            expressions=Expressions(spec.mask, spec.score, self._tables) if has_any else None,
        )  # fmt: skip

    def told(self, packing):
        """(intervals, tables, where sequences lie) of what a call tells as `packing`: None, () and
        () where there are none (core/watching.py)."""
        of = self.rules.expressions
        if self.has_intervals:
            return packing[1], (), ()
        if of is not None and (of.mask or of.sizes):
            return None, packing[1:] if of.mask else packing, ()
        return None, (), packing

    def takes_smooth_q(self, packing):
        """Whether `attention` would take such a call with smooth_q=True."""
        *_, sequences = self.told(packing)
        return not (self.has_intervals or self.rules.expressions
                    or any(t is not None for t in sequences))  # fmt: skip

    def described(self):
        """As a dict of plain values: sizes, and the options of a `Spec`."""
        names = ("batch", "heads", "heads_kv", "queries", "keys")
        rules = self.rules
        of = rules.expressions
        return {
            **dict(zip(names, self.sizes)), "head_dim": self.head_dim,
            "dtype": options.dtype_name(self.dtype), "softmax_scale": self.scale,
            "causal": rules.mask.causal, "window_left": rules.mask.window_left,
            "window_right": rules.mask.window_right, "granularity": rules.granularity,
            "mask": of.mask if of else "", "score": of.score if of else "",
            "smooth_k": rules.smooth_k, "smooth_q": rules.smooth_q,
            "smooth_v": rules.smooth_v, "rotate": rules.rotate,
            "precision": options.precision_of(rules.plan) or ",".join(sorted(rules.plan)),
        }  # fmt: skip


#: Calls of forms, while these exist.
_known = weakref.WeakKeyDictionary()


def call_of(form):
    """The `Call` of a `forms.Form`, or of an `emulation.Emulated`."""
    if not isinstance(form, Form):
        return _of_emulation(form)
    if form not in _known:
        _known[form] = _of_form(form)
    return _known[form]


def _of_form(form):
    softmax_scale, layout, text = form.given
    q, k, v = form.shapes
    if layout == "bshd":
        q, k, v = ((s[0], s[2], s[1], s[3]) for s in (q, k, v))
    spec = options.spec_of_text(text, head_dim=q[3], dtype=form.dtype)
    return Call(
        ("kernels", form.given, q, k, v, form.dtype), layout, (*q[:2], k[1], q[2], k[2]), q[3],
        form.dtype, spec, options.check_softmax_scale(softmax_scale, q[3]),
        _LISTS if spec.sparse_q and not (spec.intervals or spec.mask) else "", spec.intervals != 0,
        getattr(form, "table_sizes", ()),
    )  # fmt: skip


def _of_emulation(form):
    rules, (q, k, _) = form.rules, form.shapes
    return Call(("emulation", rules, *form.shapes, form.has_intervals), "bhsd",
                (*q[:2], k[1], q[2], k[2]), q[3], rules.dtype, rules, rules.scale,
                _LISTS if form.has_lists else "", form.has_intervals)  # fmt: skip
