"""The kernels' calls on tensors of one form, which is checked and worked out once.

A form is all that a call says beside the data: options, layout and scale, and of q, k and v the
sizes, strides, dtypes and devices. Another call of the same form costs two allocations, one more
for the log-sum-exp, and the launches.
"""

import contextlib
import functools
import warnings

import torch

from sagebwd import _core
from sagebwd.core import options, watching
from sagebwd.core.arguments.shapes import contiguous_strides, required_operand
from sagebwd.core.arguments.tensors import check_k_mean, problem_of, readable
from sagebwd.core.sequences import check_packing

_forms = {}
#: The most forms that are kept. With more (lengths may keep changing) all are forgotten.
MOST_FORMS = 1024
#: The most strides of gradients that are kept.
MOST_STRIDES = 16

#: torch.cuda.current_stream(index).cuda_stream, without creating objects.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

contiguous_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
#: Nothing is written for tokens that belong to no sequence.
_zeros_like = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)

_family = ""


@contextlib.contextmanager
def kernels_of(family):
    """Within it all threads' calls run the kernels of a family ('mma', 'wgmma'), with its default
    tiles; '' stands for those that calls have without it. For measurements: the numerics are the
    same."""
    global _family
    before, _family = _family, family
    try:
        yield
    finally:
        _family = before


def family():
    """Returns what kernels_of() says now."""
    return _family


def operation(device, text, **tensors):
    """The `_core.Attention` of a device index and a line of options, made once. `tensors`: the
    head_dim and dtype of tensors, where the line does not say."""
    return _operation(_family, device, text, **tensors)


#: Windows may keep changing; only the latest operations are kept. They share kernels.
@functools.lru_cache(maxsize=256)
def _operation(family, device, text, **tensors):
    return _core.Attention(options.spec_of_text(text, **tensors), device, family)


def stream_of(device):
    """The address of a device index's current stream."""
    if _current_stream:
        return _current_stream(device)
    return torch.cuda.current_stream(device).cuda_stream


def known_form(q, k, v, softmax_scale, layout, text, packing=(), k_mean=None):
    """The `Form` of a call like one that has been checked before, or None."""
    try:
        return _forms.get(key_of(q, k, v, softmax_scale, layout, text, packing, k_mean))
    except (RuntimeError, TypeError):  # sparse and nested tensors have no strides; a list no hash
        return None


def form_of(q, k, v, softmax_scale, layout, text, devices, packing=(), k_mean=None):
    """The `Form` of a call; SpecError if no kernel supports it."""
    form = known_form(q, k, v, softmax_scale, layout, text, packing, k_mean)
    if form is None:
        form = Form(q, k, v, softmax_scale, layout, text, devices, packing, k_mean)
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[key_of(q, k, v, softmax_scale, layout, text, packing, k_mean)] = form
    return form


def key_of(q, k, v, softmax_scale, layout, text, packing=(), k_mean=None):
    """All that decides the form of a call. `text` may be whatever has a hash. In `packing` None
    stands for tensors that are not given."""
    key = (
        _family, text, layout, softmax_scale, q.shape, k.shape, v.shape, q.stride(), k.stride(),
        v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip
    if not packing and k_mean is None:
        return key
    more = (None if t is None else (t.shape, t.stride(), t.dtype, t.device)
            for t in (*packing, k_mean))  # fmt: skip
    return (*key, *more)


#: Addresses for a call that only has k_mean.
_NONE_MORE = (0,)


def _about(q, k, v):
    return (q.stride(), k.stride(), v.stride(), q.shape, k.shape, v.shape, q.dtype, k.dtype,
            v.dtype, q.get_device(), k.get_device(), v.get_device())  # fmt: skip


def _contiguous(t):
    return None if t is None else t.contiguous()


def _addresses_of(tensors):
    return [0 if t is None else t.data_ptr() for t in tensors]


def _alert_any_order():
    """Raises or warns as PyTorch's own operators without a deterministic implementation do."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "a call with deterministic=False adds dQ up in any order, and "
        "torch.use_deterministic_algorithms(True) is on: leave deterministic=False out, for its "
        "default gives the same bits in every run, or turn that off for this backward. A warning "
        "in place of this error: torch.use_deterministic_algorithms(True, warn_only=True)"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)


def about(t):
    """What of a tensor decides a form."""
    return t.shape, t.stride(), t.dtype, t.device


def saveable(t):
    """The tensor, or a copy of one that torch.inference_mode() has made, which autograd would not
    save for a backward. Compiled code gets it as it is."""
    if torch.compiler.is_compiling() or not is_unsaveable(t):
        return t
    return t.clone()


def is_unsaveable(t):
    """Whether `saveable` copies the tensor."""
    return t.is_inference() and not torch.is_inference_mode_enabled()


class Table:
    """The forms of a kind of call, by all that decides them."""

    def __init__(self):
        self._forms = {}

    @staticmethod
    def _key(tensors, told):
        return (_family, told, *map(about, tensors))

    def known(self, tensors, told):
        """The form of a call on such tensors with such further arguments, or None."""
        return self._forms.get(self._key(tensors, told))

    def of(self, tensors, told, make):
        """The form of such a call; `make` makes it."""
        key = self._key(tensors, told)
        form = self._forms.get(key)
        if form is None:
            form = make()
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        return form


class Form:
    """The passes over tensors of one form. Tensors given to them must have it."""

    #: Strides of lists of blocks, for sequences and for heads, of calls that have lists; and behind
    #: them of the shares of exact attention, and how many queries have one.
    _of_lists = ()
    _OUTPUTS = 1  #: how many tensors like out the forward writes
    #: The name of the operator that is its backward.
    of_backward = "backward"

    def __init__(self, q, k, v, softmax_scale, layout, text, devices, packing=(), k_mean=None):
        self.given = (softmax_scale, layout, text)  # as the operators take them
        self._problem = problem_of(q, k, v, layout, devices)
        batch, heads, heads_kv, seq_q, seq_kv = self._problem
        sequences = check_packing(self._problem, q.device, packing)
        check_k_mean(k_mean, (sequences or batch, heads_kv, q.shape[3]), q.device)
        self._packed = any(t is not None for t in packing)
        #: Whether only some tokens of each sequence of a batch are used.
        self._apart = self._packed and not sequences
        if self._apart:
            self._problem = (batch, heads, heads_kv, batch * seq_q, batch * seq_kv)
        elif self._packed:
            self._problem = (sequences, *self._problem[1:])
        self._new_like = _zeros_like if self._packed else contiguous_like
        self.as_many_queries_as_keys = seq_q == seq_kv
        self._scale = options.check_softmax_scale(softmax_scale, q.shape[3])
        self._layout = layout
        self._device = q.get_device()
        self.shapes, self.dtype = (tuple(q.shape), tuple(k.shape), tuple(v.shape)), q.dtype
        if self._packed:
            text += " packed=yes"
        self._kernels = operation(self._device, text, head_dim=q.shape[3], dtype=q.dtype)
        self._operands = [
            required_operand(name, t, layout)[1:] for name, t in (("q", q), ("k", k), ("v", v))
        ]
        self._like_q, self._like_k, self._like_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        self._like_out = (*self._like_q[:3], v.shape[3])
        self._out_is_like_q = self._like_out == self._like_q
        self._rows = (batch, heads, seq_q)
        self._saved = _about(q, k, v) + (self._like_out, q.dtype, self._device,
                                         self._rows, torch.float32, self._device)  # fmt: skip
        self._empty = q.numel() == 0 or k.numel() == 0  # queries that see no key
        self._in_any_order = "deterministic=no" in text.split()
        #: How many heads the forward gives the largest scores of; None: it does not give them.
        self._max_logits = heads if "max_logits=yes" in text.split() else None
        self._backward_passes = {}
        self._built_ahead = False
        if not self._empty:
            of_out = contiguous_strides(self._like_out, layout)
            self._run = self._kernels.prepare_forward(
                self._problem, [*self._operands, *[of_out] * self._OUTPUTS], self._scale,
                self._apart, v.shape[3],
                *self._of_lists,
            )  # fmt: skip
            self._workspace_bytes = self._run.workspace_bytes
            self._bytes_with_lse = self._workspace_bytes + 4 * batch * heads * seq_q

    def saved(self, q, k, v, out, lse):
        """Whether these are like the tensors of a call, out and lse with any strides."""
        return self._saved == _about(q, k, v) + (
            out.shape, out.dtype, out.get_device(), lse.shape, lse.dtype, lse.get_device())

    # Some calls save tensors for the backward beside q, k, v, out and lse: these are `beside`.

    def packing_of(self, beside):
        """The `packing` of the passes of such a call."""
        return ()

    def told_of(self, beside):
        """The operators' arguments of such a call, between its tensors and `given`."""
        return ()

    def saved_beside(self, beside):
        """Whether these are like the tensors of a call."""
        return not beside

    def _stream(self):
        return stream_of(self._device)

    def build_ahead(self):
        """Before a forward that a backward will follow: compiles what it needs, and what the
        backward needs while Python goes on."""
        if not self._built_ahead:
            self._built_ahead = True
            if not self._empty:
                self._kernels.build_ahead(self._problem, self._stream())

    def _addresses(self, q, k, v):
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2]) & 15:
            for name, t in (("q", q), ("k", k), ("v", v)):
                required_operand(name, t, self._layout)
        return addresses

    def _new_out(self, q):
        return (q.new_zeros if self._packed else q.new_empty)(self._like_out)

    def _packing(self, packing):
        """The tensors that say where sequences lie; keep them until the kernels are launched."""
        if not self._packed:
            return ()
        if self._apart:
            on = next(t.device for t in packing if t is not None)
            packing = (*self._first_tokens(on), *packing[2:])
        return (*packing, None, None)[:4]

    def _first_tokens(self, device):
        """Says where the queries and the keys of each sequence of a batch begin, and the ends."""
        batch, _, _, queries, keys = self._problem

        def every(tokens):
            return torch.arange(0, tokens + 1, tokens // batch, dtype=torch.int32, device=device)

        of_queries = every(queries)
        return of_queries, of_queries if keys == queries else every(keys)

    def _more(self, packing, k_mean):
        """Further arguments of a pass; none for a plain call, which is checked first."""
        if k_mean is None and not self._packed:
            return ()
        return (_contiguous(k_mean), *self._packing(packing))

    def forward(self, q, k, v, wants_lse=True, packing=(), k_mean=None):
        """(out, lse), or (out, lse, max_logits) where the options have these; lse is None if it is
        not wanted."""
        if self._empty:
            lse = q.new_full(self._rows, -torch.inf, dtype=torch.float32) if wants_lse else None
            return q.new_zeros(self._like_out), lse, *self._unseen(q)
        addresses = self._addresses(q, k, v)
        out = self._new_like(q) if self._out_is_like_q else self._new_out(q)
        if wants_lse:
            lse = q.new_empty(self._rows, dtype=torch.float32)
            if self._packed:
                lse.fill_(-torch.inf)
            workspace = q.new_empty(self._workspace_bytes, dtype=torch.uint8)
            workspace_at, lse_at = workspace.data_ptr(), lse.data_ptr()
        else:  # one allocation for both
            lse = None
            workspace = q.new_empty(self._bytes_with_lse, dtype=torch.uint8)
            workspace_at = workspace.data_ptr()
            lse_at = workspace_at + self._workspace_bytes
        more = self._more(packing, k_mean)
        places = _addresses_of(more) if more else _NONE_MORE
        largest = ()
        if self._max_logits is not None:
            largest = (q.new_empty(self._max_logits, dtype=torch.float32),)
            places = (*places, largest[0].data_ptr())
        self._run(*addresses, out.data_ptr(), lse_at, *places, workspace_at, self._stream())
        if watching.watchers:
            watching.forward_ran(self)
        return out, lse, *largest

    def _unseen(self, q):
        """The largest scores of heads whose queries see no key, where they are wanted."""
        if self._max_logits is None:
            return ()
        return (q.new_full((self._max_logits,), -torch.inf, dtype=torch.float32),)

    def backward(self, dout, q, k, v, out, lse, dlse, packing=(), k_mean=None, to=None):
        """(dq, dk, dv). The other tensors are like q, or float32 rows; strides may be any.

        `to`: tensors without gaps that get the results, of which no watcher hears.
        """
        if self._in_any_order:
            _alert_any_order()
        if self._empty:
            return q.new_zeros(self._like_q), k.new_zeros(self._like_k), v.new_zeros(self._like_v)
        addresses = self._addresses(q, k, v)
        run = self._backward_passes.get((dout.stride(), out.stride()))
        if run is None or (dout.data_ptr() | out.data_ptr()) & 15:
            dout, out, run = self._backward_pass(dout, out)
        dq, dk, dv = to or (self._new_like(q), self._new_like(k), self._new_like(v))
        workspace = q.new_empty((run.workspace_bytes,), dtype=torch.uint8)
        rows = lse.contiguous(), _contiguous(dlse)
        more = self._more(packing, k_mean)
        run(
            *addresses,
            out.data_ptr(),
            dout.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            *_addresses_of(rows),
            *(_addresses_of(more) if more else _NONE_MORE),
            workspace.data_ptr(),
            self._stream(),
        )
        if watching.watchers and to is None:
            given = (q, k, v, out, lse, dlse, dq, dk, dv)
            watching.backward_ran(self, dout, *given, packing, k_mean)
        return dq, dk, dv

    def _backward_pass(self, dout, out):
        """dout and out in a layout that kernels can read, and the pass over them."""
        dout, dout_operand = readable(dout, self._layout)
        out, out_operand = readable(out, self._layout)
        strides = dout.stride(), out.stride()
        run = self._backward_passes.get(strides)
        if run is None:
            of_dq = contiguous_strides(self._like_q, self._layout)
            of_dk = contiguous_strides(self._like_k, self._layout)
            of_dv = contiguous_strides(self._like_v, self._layout)
            run = self._kernels.prepare_backward(
                self._problem,
                [*self._operands, out_operand[1:], dout_operand[1:], of_dq, of_dk, of_dv],
                self._scale,
                self._apart,
                self._like_v[3],
                *self._of_lists,
            )
            if len(self._backward_passes) >= MOST_STRIDES:
                self._backward_passes.clear()
            self._backward_passes[strides] = run
        return dout, out, run
