"""Masks of transformers: unwritten until somebody looks into them, told as keywords of attention.

A mask is compared with what the kernels would compute for these keywords, entry by entry, so a mask
that no keywords say is refused. Kernels of their own take a mask whose function is an expression.
"""

import torch

from sagebwd.core.options import SpecError
from sagebwd.integrations import _device_checks, _mask_expressions

try:
    from transformers import masking_utils
except ImportError:  # before 4.53
    masking_utils = None

#: Queries whose part of a mask is looked at at a time.
ROWS = 1024

#: Eager code says the first of these, and the device says the second in a graph.
_UNKNOWN = (
    "this mask is not that of {} attention{} with padding on the right ((batch, queries, keys) = "
    "{}), and {}. Pad on the right (tokenizer.padding_side = 'right'); for packed sequences pass "
    "cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True)) "
    "or position_ids that start again with each; for others use attn_implementation='sdpa'",
    "attention_mask is not that of {} attention{}, padded on the right: pad so, pass "
    "cu_seq_lens_q and cu_seq_lens_k for packed sequences, or use attn_implementation='sdpa'. "
    "Without torch.compile errors say more",
)
_UNKNOWN_BESIDE_PACKING = (
    "within the packed sequences this mask is not that of {} attention{} ((batch, queries, keys) = "
    "{}): leave attention_mask out where cu_seq_lens_q and cu_seq_lens_k are given, or use "
    "attn_implementation='sdpa'",
    "within packed sequences attention_mask is not that of {} attention{}: leave it out where "
    "cu_seq_lens_q and cu_seq_lens_k are given, or use attn_implementation='sdpa'",
)


class Pattern:
    """Which keys queries see.

    Args:
        shape: (batch, queries, keys); a batch of 1 is of all.
        shift: how many keys lie before that of the first query.
        rows: a function of the first query and a number of queries that gives their part of the
            mask, (batch, queries, keys).
        used: how many keys of each sequence, from the first on, are not padding; None: all.
        padded: whether `used` comes from a mask of padding, so that queries behind are padding too.
        expression: a function that gives the mask as an expression, or raises SpecError.
    """

    def __init__(self, shape, shift, device, rows, used=None, padded=True, expression=None):
        self.shape, self._shift, self._rows = shape, shift, rows
        self._device = torch.device(device)
        self._used, self._padded, self._expression = used, padded, expression
        self._told, self._checked = {}, {}

    @classmethod
    def of_interface(cls, batch, queries, keys, q_offset, kv_offset, attention_mask, **given):
        """The pattern of what transformers hands to a mask interface."""

        def rows(first, count):
            return masking_utils.sdpa_mask(
                batch_size=batch, q_length=count, kv_length=keys, kv_offset=kv_offset,
                q_offset=q_offset + first, attention_mask=attention_mask,
                allow_is_causal_skip=False, **given)[:, 0]  # fmt: skip

        def expression():
            return _mask_expressions.expression_of(
                given["mask_function"], attention_mask, keys, q_offset, kv_offset, given["device"]
            )

        used = None
        if attention_mask is not None:
            used = attention_mask[:, kv_offset : kv_offset + keys].sum(-1)
        return cls((batch, queries, keys), q_offset - kv_offset, given["device"], rows, used,
                   expression=expression)  # fmt: skip

    @classmethod
    def of_tensor(cls, mask):
        """The pattern of a boolean mask, (batch, 1, queries, keys), that somebody has written."""
        batch, _, queries, keys = mask.shape
        places = torch.arange(1, keys + 1, device=mask.device)
        used = (mask[:, 0].any(1) * places).amax(1)
        return cls((batch, queries, keys), keys - queries, mask.device,
                   lambda first, count: mask[:, 0, first : first + count], used, padded=False)

    def written(self):
        """The whole mask, (batch, 1, queries, keys)."""
        return self._rows(0, self.shape[1])[:, None]

    def told(self, causal, window, position_ids=None):
        """The mask as keywords of `sagebwd.attention`; SpecError where it is another one.

        `position_ids` that start again say where packed sequences do.
        """
        key = causal, window
        if key not in self._told:
            self._told[key] = self._tell(causal, window, position_ids)
        return self._told[key]

    def check_packed(self, causal, window, first_q, first_k):
        """SpecError unless within packed sequences the mask is that of these keywords."""
        key, given = (causal, window), (first_q, first_k)
        if self._checked.get(key, (None,))[0] is first_q and self._checked[key][1] is first_k:
            return
        same = self._is_packed(causal, window, first_q, first_k, beside=True)
        self._require(same, _UNKNOWN_BESIDE_PACKING, causal, window)
        self._checked[key] = given

    def _tell(self, causal, window, position_ids):
        _, m, n = self.shape
        shift, told, used = self._shift, {}, self._used
        if causal:
            told["causal"] = "bottom-right" if shift else "top-left"
        if window is not None:
            told["window_left"] = window - 1
            if not causal:
                told["window_right"] = window - 1
        # These count from the last queries and keys that are used.
        from_the_end = shift if causal else window is not None
        most = min(n, shift + m) if from_the_end else n
        if used is not None:
            used = used.clamp(max=most)
        elif most < n:
            used = torch.full(self.shape[:1], most, device=self._device)
        same = self._is_plain(causal, window, used)
        if used is not None and not self._is_unknown():
            same, short = torch.stack([same, (used < n).any()]).tolist()
            used = used if short else None
        elif not self._is_unknown():
            same = bool(same)
        if used is None and from_the_end and n - m != shift:
            same = self._no(same)
        if used is not None:
            told["seqused_k"] = used.int()
            if from_the_end:
                told["seqused_q"] = (used - shift).clamp(min=0).int()
                if not self._padded:
                    same = self._no(same)
        if same is False:
            packed = self._packed_by(position_ids, causal, window)
            return packed or self._as_expression(causal, window)
        self._require(same, _UNKNOWN, causal, window)
        return told

    def _as_expression(self, causal, window):
        """The keyword of a mask that kernels evaluate; SpecError where it is no expression."""
        batch, m, n = self.shape
        error = "nobody says it as a function of positions"
        if self._expression is not None:
            try:
                expression = self._expression()
                rows = _mask_expressions.rows_of(expression, batch, n, self._device)
                if self._is(rows):
                    kept = _mask_expressions.kept(expression, batch, m, n, self._device)
                    return {"causal": False, "mask": kept}
                error = f"as an expression, {expression.text!r}, it says something else"
            except SpecError as refusal:
                error = f"it is no expression: {refusal}"
        self._require(False, _UNKNOWN, causal, window, error)

    def _is_unknown(self):
        """Whether nobody can ask now what a mask holds: a graph is compiled, or the tensors are
        meta tensors, which hold nothing."""
        return torch.compiler.is_compiling() or self._device.type == "meta"

    def _no(self, same):
        return torch.zeros_like(same) if self._is_unknown() else False

    def _packed_by(self, position_ids, causal, window):
        """Keywords of packed sequences, all rows of the batch one after the other, or None."""
        batch, m, n = self.shape
        padded = self._padded and self._used is not None
        if padded or position_ids is None or m != n or position_ids.dim() != 2:
            return None
        if position_ids.shape[1] != m or position_ids.shape[0] not in (1, batch):
            return None
        goes_on = torch.zeros((batch, m), dtype=torch.bool, device=self._device)
        goes_on[:, 1:] = position_ids.to(self._device).diff(dim=-1) == 1
        firsts = (~goes_on.flatten()).nonzero().flatten()
        firsts = torch.cat([firsts, firsts.new_full((1,), batch * m)]).int()
        if not self._is_packed(causal, window, firsts, firsts, beside=False):
            return None
        told = {"cu_seqlens_q": firsts, "cu_seqlens_k": firsts}
        return told | packed_mask(causal, window)

    def _is_plain(self, causal, window, used):
        keys = torch.arange(self.shape[2], device=self._device)

        def seen(rows):
            behind = keys - rows[:, None] - self._shift
            visible = _visible(behind, causal, window)
            return visible if used is None else visible & (keys < used[:, None, None])

        return self._is(seen)

    def _is_packed(self, causal, window, first_q, first_k, beside):
        """Whether the mask is that of packed sequences; with `beside` what it says of keys of other
        sequences does not count."""
        batch, m, n = self.shape
        q_of, q_at = _places(first_q, batch * m, self._device)
        k_of, k_at = _places(first_k, batch * n, self._device)
        q_of, q_at = q_of.view(batch, m, 1), q_at.view(batch, m, 1)
        k_of, k_at = k_of.view(batch, 1, n), k_at.view(batch, 1, n)

        def seen(rows):
            together = q_of[:, rows] == k_of
            return together & _visible(k_at - q_at[:, rows], causal, window), together

        return self._is(lambda rows: seen(rows)[0],
                        (lambda rows: seen(rows)[1]) if beside else None)  # fmt: skip

    def _is(self, seen, where=None):
        m = self.shape[1]
        if torch.compiler.is_compiling():  # a loop would make a graph for each number of queries
            return self._are(0, m, seen, where)
        same = torch.ones((), dtype=torch.bool, device=self._device)
        for first in range(0, m, ROWS):
            same = same & self._are(first, min(first + ROWS, m), seen, where)
        return same

    def _are(self, first, end, seen, where):
        """`_is`, of these queries."""
        rows = torch.arange(first, end, device=self._device)
        given = self._rows(first, end - first)
        if where is not None:
            given = given & where(rows)
        return (given == seen(rows)).all()

    def _require(self, same, messages, causal, window, *more):
        message, on_device = messages
        kind = "causal" if causal else "bidirectional"
        within = f" in windows of {window}" if window is not None else ""
        if torch.compiler.is_compiling():  # nobody can wait for the GPU inside a graph
            _device_checks.require(same, on_device.format(kind, within))
        elif not self._is_unknown() and not same:
            raise SpecError(message.format(kind, within, tuple(self.shape), *more))


def visible_of(mask, keys):
    """A written mask, (batch, 1, queries, keys), as booleans; None for what is no such mask.

    Those of transformers before 4.53 are numbers that are added to scores: 0 or the least of their
    dtype, and of one key more than there are where nobody gave a mask of padding.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        return None
    if mask.is_floating_point():
        visible = mask == 0
        said = visible | (mask <= torch.finfo(mask.dtype).min)
        unknown = torch.compiler.is_compiling() or mask.is_meta
        if not unknown and not bool(said.all()):
            return None
        return visible[..., :keys]
    return mask if mask.dtype == torch.bool else None


def packed_mask(causal, window):
    """The mask of packed sequences as keywords of `sagebwd.attention`."""
    told = {"causal": "bottom-right" if causal else False}
    if window is not None:
        told["window_left"] = window - 1
        if not causal:
            told["window_right"] = window - 1
    return told


def _visible(behind, causal, window):
    """Whether keys are seen that lie so far behind a query's own."""
    visible = behind <= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        visible = visible & (behind > -window)
        if not causal:
            visible = visible & (behind < window)
    return visible


def _places(firsts, tokens, device):
    """Gives each token the number of its sequence, and its place counted from that one's end."""
    ends = firsts.to(device)[1:].contiguous()
    at = torch.arange(tokens, device=device, dtype=ends.dtype)
    of = torch.searchsorted(ends, at, right=True)
    return of, at - ends[of.clamp(max=len(ends) - 1)]


# ---- the stand-in --------------------------------------------------------------------------------

_ABOUT = {getattr(torch.Tensor, name).__get__ for name in
          ("shape", "dtype", "device", "ndim", "is_cuda", "is_meta", "is_nested", "is_sparse",
           "is_quantized", "layout", "requires_grad", "is_leaf", "grad", "grad_fn")}  # fmt: skip
_ABOUT |= {getattr(torch.Tensor, name) for name in
           ("dim", "size", "numel", "is_floating_point", "element_size", "get_device", "__len__",
            "__hash__")}  # fmt: skip
_SAME = {torch.Tensor.contiguous, torch.Tensor.detach, torch.Tensor.bool}


class Unwritten(torch.Tensor):
    """The tensor that stands for a pattern: it takes no memory until somebody looks into it, who
    then sees the mask."""

    @classmethod
    def of(cls, pattern):
        batch, m, n = pattern.shape
        zero = torch.zeros((), dtype=torch.bool, device=pattern._device)
        made = zero.expand(batch, 1, m, n).as_subclass(cls)
        made.pattern, made.mask = pattern, None
        return made

    def is_changed(self):
        """Whether somebody has written into it, so that the pattern is of another mask."""
        return self.mask is not None and self.mask._version != self.version

    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        named = named or {}
        if function in _ABOUT:
            return super().__torch_function__(function, types, given, named)
        if function in _SAME and isinstance(given[0], cls):
            return given[0]
        if function is torch.Tensor.to and given[0]._stays(*given[1:], **named):
            return given[0]
        given, named = torch.utils._pytree.tree_map_only(cls, cls._written, (given, named))
        return function(*given, **named)

    def _stays(self, *given, **named):
        if given and isinstance(given[0], torch.Tensor):
            device, dtype = given[0].device, given[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*given, **named)
        here = device is None or device == self.device
        return here and dtype in (None, torch.bool) and not named.get("copy")

    def _written(self):
        if self.mask is None:
            self.mask = self.pattern.written().contiguous()
            self.version = self.mask._version
        return self.mask
