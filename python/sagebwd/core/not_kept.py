"""Normed and rotated queries and keys that attention does not keep for its backward.

Norm and RoPE keep what they are given (x), and attention what it is given (y): queries and keys
twice. Within `not_kept` attention's nodes keep a mark where they would keep y or a view of it, and
the backward forms y again, by what gave it, from x. The bits are the same. That is one more launch,
and y is in memory during the backward of one layer alone.

Marks are put in y's place by hooks for saved tensors. PyTorch asks the innermost hooks alone, so
these hand all other tensors to those of the caller (checkpoints, offloading).
"""

import contextlib
import functools

import torch
from torch.autograd.graph import saved_tensors_hooks

from sagebwd.core import front, options

#: (pack, unpack) of the caller, or None. PyTorch has it from 2.8 on.
_hooks_of_caller = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class _Mark:
    """Stands for a tensor that lies in y."""

    def __init__(self, owner, side, t):
        self.owner, self.side = owner, side
        self.place = t.shape, t.stride(), t.storage_offset()


class _Kept:
    """Holds a tensor that is not y. A change of it in place is noticed, as it is without hooks."""

    def __init__(self, t):
        self.tensor, self.version = t.detach(), t._version  # an output itself would keep its node

    def unpacked(self):
        t = self.tensor
        if t._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the {t.dtype} tensor of {tuple(t.shape)} is at version "
                f"{t._version}; expected version {self.version} instead"
            )
        return t


class _Hooks:
    """Those of one call of attention."""

    def __init__(self, node, ys, of_caller):
        self._node, self._of_caller = node, of_caller
        self._ys = [(y.untyped_storage()._cdata, y.dtype, y._version) for y in ys]

    def pack(self, t):
        side = self._side_of(t)
        if side is not None:
            return _Mark(self, side, t)
        return _Kept(t) if self._of_caller is None else self._of_caller[0](t)

    def _side_of(self, t):
        if t.layout is not torch.strided or not t.numel():
            return None
        about = t.untyped_storage()._cdata, t.dtype, t._version
        return self._ys.index(about) if about in self._ys else None

    def unpack(self, packed):
        if isinstance(packed, _Mark) and packed.owner is self:
            return _results_of(self._node)[packed.side].as_strided(*packed.place)
        return packed.unpacked() if self._of_caller is None else self._of_caller[1](packed)


def _results_of(node):
    """Forms what a node of norm and RoPE gave, once in a backward. The node gets the saved tensors
    that were read for that: hooks such as those of checkpoints let them be read once."""
    task = torch._C._current_graph_task_id()
    found = None if task < 0 else node.read.get(task)
    if found is None:
        try:
            tensors = node.saved_tensors
        except RuntimeError as error:  # compiled autograd takes these out before it traces
            raise RuntimeError(
                f"{error} recompute_qk=True reads in the backward of attention what norm and RoPE "
                "have saved: leave it out under compiled autograd, which does not let it, and for "
                "backwards through parts of a graph without retain_graph=True"
            ) from error
        with torch.no_grad():
            found = tensors, front.formed_again(node, tensors)
        if task >= 0:
            node.read[task] = found
            # The node itself may have no part in this backward.
            forget = functools.partial(node.read.pop, task, None)
            torch.autograd.Variable._execution_engine.queue_callback(forget)
    return found[1]


def check_pytorch():
    """SpecError for a PyTorch that is too old for `not_kept`."""
    if _hooks_of_caller is None:
        raise options.SpecError(
            f"recompute_qk=True needs PyTorch 2.8 or newer, and this is {torch.__version__}: leave "
            "it out, or wrap the call in torch.utils.checkpoint.checkpoint"
        )


def not_kept(q, k):
    """A context in which nodes of autograd do not keep these, which are results of norm and RoPE or
    views of such. If nothing of these is learned, no x is kept, and they are. SpecError for a PyTorch
    that is too old."""
    check_pytorch()
    ys = [t if t._base is None else t._base for t in (q, k)]
    node = next((y.grad_fn for y in ys if y.grad_fn is not None), None)
    if node is None:
        return contextlib.nullcontext()
    node.read = {}
    hooks = _Hooks(node, ys, _hooks_of_caller(False))
    return saved_tensors_hooks(hooks.pack, hooks.unpack)
