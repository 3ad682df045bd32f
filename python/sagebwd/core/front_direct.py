"""Norm and RoPE of calls whose form has been checked before, without operators.

A form is all that decides whether a call is right and how kernels read it: dtypes, shapes, strides
and devices of all tensors, and the numbers. A call of a known form asks for the addresses'
alignment alone, allocates and launches, unless somebody looks on. `front` checks the first call of
a form. It also has all calls whose tensors kernels cannot take as they lie, and copies them.

Measured on one CPU core with a driver that launches nothing, and two gains of 16 bits: 34 us of a
forward and 175 us of forward and backward, where checks and operators take 129 and 378 us.
"""

import torch

from sagebwd import _core
from sagebwd.core import direct, forms
from sagebwd.core.front_kernels import are_fit, bhsd, readable, steps, tables, takes

#: Calls have these, by their keys; None where kernels would have to be given copies.
_known = {}


def tensors_of(q, k, q_norm, k_norm, q_inv_rms, k_inv_rms, rope, rope_k):
    """The tensors of a call in the order of `front_kernels`, with None for those that it does not
    have. None if its tables are no pairs."""
    given = rope, rope if rope_k is None else rope_k
    tables = [(None, None) if of is None else of for of in given]
    if any(type(of) not in (tuple, list) or len(of) != 2 for of in tables):
        return None
    gains = (None if gain is True else gain for gain in (q_norm, k_norm))
    return (q, k, *gains, q_inv_rms, k_inv_rms, *tables[0], *tables[1])


def key_of(tensors, *told):
    """All that decides the form of a call on such tensors with such further arguments; None if the
    call has to be checked whatever came before."""
    if tensors is None:
        return None
    if tensors[8] is tensors[6] and tensors[9] is tensors[7]:  # one table for both
        tensors = tensors[:8]
    if direct.is_watched(*[t for t in tensors if t is not None]):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[6:]):
        return None  # tables get no gradient
    try:
        about = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        # True and 1, and 1 and 1.0, are different here.
        key = (forms.family(), *told, *map(type, told), *about)
        hash(key)
    except (RuntimeError, TypeError):  # tensors without strides, or numbers without a hash
        return None
    return key


def known_form(key, tensors):
    """The `Form` of a call that may be launched at once, or None."""
    form = None if key is None else _known.get(key)
    return form if form is not None and form.reads(tensors) else None


def remember(key, given, checked):
    """Keeps the form of a call that has been checked.

    Args:
        key: what `key_of` gave, or None.
        given: `tensors_of` the call.
        checked: the arguments of the operators.
    """
    if key is None or key in _known:
        return
    if len(_known) >= forms.MOST_FORMS:
        _known.clear()
    _known[key] = Form(given, checked) if _lie_right(given, checked) else None


def _lie_right(given, checked):
    """Whether kernels take the tensors of a call, at any addresses that are multiples of 16 bytes,
    once gains are cast to FP32 and tables are made fit."""
    q, k, q_gain, k_gain, q_inv_rms, k_inv_rms, *_ = given
    if not takes(*checked):
        return False
    for t in (q, k):
        of_vectors = [step for size, step in zip(t.shape[:3], t.stride()) if size > 1]
        if t.stride(3) != 1 or any(step % 8 for step in of_vectors):
            return False
    for t in (q_gain, k_gain, q_inv_rms, k_inv_rms):
        if t is not None and not t.is_contiguous():
            return False
    return all(t is None or t.dtype == torch.float32 for t in (q_inv_rms, k_inv_rms))


def _address(t):
    return 0 if t is None else t.data_ptr()


def _of_batches(table):
    """Cosines and sines of (batch or 1, tokens, pairs), of as many sequences."""
    cos, sin = (t if t.dim() == 3 else t.unsqueeze(0) for t in table)
    return (cos, sin) if cos.shape == sin.shape else torch.broadcast_tensors(cos, sin)


def _about(t):
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


class _Side:
    """The arguments of kernels for the queries, or for the keys, without addresses."""

    def __init__(self, x, gain, inv_rms, table, normed, layout):
        y = torch.empty(x.shape, device="meta")
        self.y_stride = y.stride()
        self.x_steps, self.y_steps = (steps(bhsd(t, layout), 3) for t in (x, y))
        self.normed = normed
        self.gain_type = None if gain is None else gain.dtype
        self.casts = gain is not None and gain.dtype != torch.float32
        self.per_head = gain is not None and gain.dim() == 2
        self.inv_rms_per_head = inv_rms is not None and inv_rms.dim() == 3
        #: Whether tables are cast or copied.
        self.makes_table, self.table_steps = False, (0, 0)
        if table[0] is not None:
            cos, sin = _of_batches(table)
            are_wide = cos.dtype == sin.dtype == torch.float32
            self.makes_table = not are_wide or not are_fit(cos, sin)
            cos = tables(cos, sin)[0] if self.makes_table else cos
            self.table_steps = steps(cos, 2)
        batch, heads, tokens = bhsd(x, layout).shape[:3]
        self.like_rows = (batch, heads, tokens)

    def told(self, x, y, y_steps, gain, inv_rms, cos, sin):
        """A side as `_core.front` takes it, of tensors."""
        return ((x.data_ptr(), self.x_steps), (y.data_ptr(), y_steps), self.normed,
                (_address(gain), self.per_head), (_address(inv_rms), self.inv_rms_per_head),
                (_address(cos), _address(sin), *self.table_steps))  # fmt: skip

    def read(self, dy, layout):
        """A gradient that kernels can read, and its strides."""
        if dy.stride() == self.y_stride and not dy.data_ptr() & 15:
            return dy, self.y_steps
        dy = readable(dy)
        return dy, steps(bhsd(dy, layout), 3)


class Form:
    """Both passes over tensors of one form, which have to have it."""

    def __init__(self, given, checked):
        q, k = given[:2]
        #: Operators are told this besides tensors.
        self.told = normed, eps, begin, interleaved, layout = checked[10:]
        self._layout, self._eps, self._device = layout, eps, q.get_device()
        self._sides = [_Side(x, gain, inv_rms, table, of, layout)
                       for x, gain, inv_rms, table, of in zip(given[:2], given[2:4], given[4:6], (
                           given[6:8], given[8:]), normed)]  # fmt: skip
        of_q, of_k = (side.like_rows for side in self._sides)
        self._problem = (*of_q[:2], of_k[1], of_q[2], of_k[2])
        pairs = 0 if checked[6] is None else checked[6].shape[2]
        self._rope = begin, 2 * pairs, interleaved
        self._operation = forms.operation(self._device, "", head_dim=q.shape[3], dtype=q.dtype)
        #: Whether gains are cast.
        self.casts = any(side.casts for side in self._sides)
        self._makes_tables = any(side.makes_table for side in self._sides)
        with torch.no_grad():
            self._saved = [_about(t) for t in self.made(given)]
        self._part_floats = _core.front_part_floats(self._operation, self._problem)

    @staticmethod
    def reads(tensors):
        """Whether kernels can read what lies at these addresses."""
        places = 0
        for t in tensors:
            if t is not None:
                places |= t.data_ptr()
        return not places & 15

    def made(self, tensors):
        """The tensors of a call with gains and tables as kernels read them, which the passes take."""
        if self.casts:
            q, k, *gains = tensors[:4]
            gains = (t.to(torch.float32) if side.casts else t
                     for t, side in zip(gains, self._sides))  # fmt: skip
            tensors = (q, k, *gains, *tensors[4:])
        if self._makes_tables:
            of_q, of_k = tensors[6:8], tensors[8:]
            are_shared = of_q[0] is of_k[0] and of_q[1] is of_k[1]
            of_q = tables(*_of_batches(of_q)) if self._sides[0].makes_table else of_q
            if are_shared:
                of_k = of_q
            elif self._sides[1].makes_table:
                of_k = tables(*_of_batches(of_k))
            tensors = (*tensors[:6], *of_q, *of_k)
        return tensors

    def cast_back(self, gradients):
        """The gradients, those of gains in the gains' own types."""
        if not self.casts:
            return gradients
        dq, dk, *gains = gradients[:4]
        gains = (g.to(side.gain_type) if side.casts and g is not None else g
                 for g, side in zip(gains, self._sides))  # fmt: skip
        return (dq, dk, *gains, *gradients[4:])

    def saved(self, tensors):
        """Whether these are like the tensors of a call, which `made` gave."""
        return self._saved == [_about(t) for t in tensors]

    def as_operators_take(self, tensors):
        """Tables of each sequence of the batch, as the operators take them."""

        def of_batch(t):
            is_shared = t is not None and (t.dim() == 2 or (t.dim() == 3 and t.shape[0] == 1))
            return t.expand(self._problem[0], *t.shape[-2:]) if is_shared else t

        return (*tensors[:6], *map(of_batch, tensors[6:]))

    def _launch(self, kernel, tensors, ys, y_steps, *more):
        q, k, q_gain, k_gain, q_inv_rms, k_inv_rms, q_cos, q_sin, k_cos, k_sin = tensors
        of_q, of_k = self._sides
        kernel(
            self._operation, self._problem,
            of_q.told(q, ys[0], y_steps[0], q_gain, q_inv_rms, q_cos, q_sin),
            of_k.told(k, ys[1], y_steps[1], k_gain, k_inv_rms, k_cos, k_sin),
            self._eps, self._rope, *more, forms.stream_of(self._device),
        )  # fmt: skip

    def forward(self, tensors):
        """(y of q, y of k) of what `made` gave."""
        q, k = tensors[:2]
        of_q, of_k = self._sides
        ys = forms.contiguous_like(q), forms.contiguous_like(k)
        self._launch(_core.front, tensors, ys, (of_q.y_steps, of_k.y_steps))
        return ys

    def backward(self, dys, tensors, needs):
        """Gradients of q, k, the gains (FP32) and given 1/rms. `needs`: which of these are wanted;
        None stands for others."""
        (q, k), sides = tensors[:2], self._sides
        read = [side.read(dy, self._layout) for side, dy in zip(sides, dys)]
        dx = forms.contiguous_like(q), forms.contiguous_like(k)
        found, of, kept = [], [], []
        for i, side in enumerate(sides):
            dgain = dinv_rms = parts = None
            if needs[2 + i]:
                dgain = tensors[2 + i].new_empty(tensors[2 + i].shape)
                parts = dgain.new_empty(self._part_floats[i])
            if needs[4 + i]:
                dinv_rms = q.new_empty(side.like_rows, dtype=torch.float32)
            kept.append(parts)
            found.append((dgain, dinv_rms))
            floats = [_address(t) for t in (dgain, parts, dinv_rms)]
            of.append(((dx[i].data_ptr(), side.y_steps), floats))
        ys, y_steps = zip(*read)
        self._launch(_core.front_gradients, tensors, ys, y_steps, *of)
        gains, inv_rms = zip(*found)
        inv_rms = (t if t is None or side.inv_rms_per_head else t.sum(1)
                   for t, side in zip(inv_rms, sides))  # fmt: skip
        return (*(t if need else None for t, need in zip(dx, needs)), *gains, *inv_rms)
