"""torch.ops.sagebwd.forward and .backward: the kernels as PyTorch operators.

Both take tensors in the layout they are told ('bhsd' or 'bshd') and give contiguous tensors in
that layout; lse is (batch, heads, queries) in either. With `cu_seqlens_q` and `cu_seqlens_k` the
tensors are those of a batch of one, which holds packed sequences. They run on the current stream
of the tensors' device, in memory of PyTorch's allocator. Forward has fakes and autograd (through
out and lse), backward has fakes and refuses to be differentiated. `sagebwd.attention` is the way
in.
"""

import contextlib
import functools

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from sagebwd.core import forms, options
from sagebwd.core.arguments import checks
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import DTYPES, check_backward, check_k_mean, problem_of
from sagebwd.core.sequences import check_packing, packing_and_mean
from sagebwd.core.transforms import refuse_gradient, refuse_tangents, refuse_transforms

DEVICES = ("cuda", "meta")

# Arguments of both operators besides tensors: `spec`, a line of options.text_of; where sequences
# lie, if they do not fill the tensors; and what is subtracted from the keys, if not their mean.
_OPTIONS = (
    "float? softmax_scale, str layout, str spec, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? k_mean=None"
)

# PyTorch takes one definition of an operator in a process. A module that is imported again, by
# importlib.reload or after sys.modules was purged, takes the place of the earlier one.
_earlier = getattr(torch.ops.sagebwd, "library", None)
if _earlier is not None:
    _earlier._destroy()
_library = torch.ops.sagebwd.library = torch.library.Library("sagebwd", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
if hasattr(torch.Tag, "needs_exact_strides"):  # from 2.8 on: Inductor keeps our inputs' strides
    TAGS += (torch.Tag.needs_exact_strides,)
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=TAGS
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=TAGS,
)


def library():
    """The library of these operators, for those of other modules."""
    return _library


def as_autocast_wants(kind, *tensors):
    """The inputs, cast if autocast is on for this kind of device."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if t.dtype in (torch.float32, *DTYPES) else t for t in tensors]


def no_autocast(kind):
    """A context without autocast for this kind of device; meta tensors have none."""
    if kind == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
        return _no_context
    return torch.autocast(kind, enabled=False)


_no_context = contextlib.nullcontext()


def _new_lse(q, problem):
    return q.new_empty((problem[0], problem[1], problem[3]), dtype=torch.float32)


# ---- the kernels ---------------------------------------------------------------------------------


def forward_pass(q, k, v, softmax_scale, layout, spec, *told):
    packing, k_mean = packing_and_mean(told)
    form = forms.form_of(q, k, v, softmax_scale, layout, spec, DEVICES, packing, k_mean)
    return form.forward(q, k, v, packing=packing, k_mean=k_mean)


def _backward(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec, *told):
    check_backward(dout, q, k, v, out, lse, dlse, layout, DEVICES)
    packing, k_mean = packing_and_mean(told)
    form = forms.form_of(q, k, v, softmax_scale, layout, spec, DEVICES, packing, k_mean)
    return form.backward(dout, q, k, v, out, lse, dlse, packing, k_mean)


# Operators are registered for the CPU and for sparse tensors only to raise our own message.
BACKENDS = ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU")
for _key in BACKENDS:
    _library.impl("forward", forward_pass, _key)
    _library.impl("backward", _backward, _key)


# ---- shapes without data -------------------------------------------------------------------------


_checked = functools.cache(options.spec_of_text)


def _check_told(problem, q, softmax_scale, spec, told):
    """Checks the arguments besides q, k and v: SpecError for those that no kernel supports."""
    packing, k_mean = packing_and_mean(told)
    if any(t is not None for t in packing):
        spec += " packed=yes"
    spec = _checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    check_scale(softmax_scale, q.shape[3], spec)
    sequences = check_packing(problem, q.device, packing)
    shape = (sequences or problem[0], problem[2], q.shape[3])
    check_k_mean(k_mean, shape, q.device, spec.smooth_k)


@torch.library.register_fake("sagebwd::forward", lib=_library)
def forward_shapes(q, k, v, softmax_scale, layout, spec, *told):
    problem = problem_of(q, k, v, layout, DEVICES)
    _check_told(problem, q, softmax_scale, spec, told)
    return q.new_empty((*q.shape[:3], v.shape[3])), _new_lse(q, problem)


@torch.library.register_fake("sagebwd::backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec, *told):
    problem = check_backward(dout, q, k, v, out, lse, dlse, layout, DEVICES)
    _check_told(problem, q, softmax_scale, spec, told)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- torch.func.vmap -----------------------------------------------------------------------------


def _mapped(operator, tensors):
    """Says what vmap does with the operator, whose first arguments are `tensors` tensors or None.

    A batch takes the mapped dimension in, if every tensor has it. Otherwise the operator is called
    for each element: where others share q, k or v, a batch would need copies of them.
    """

    def rule(info, in_dims, *arguments):
        count = info.batch_size
        moved = [x if dim is None else in_front(x, dim) for x, dim in zip(arguments, in_dims)]
        is_packed = len(moved) > tensors + 3 and moved[tensors + 3] is not None
        all_have_it = all(dim is not None or x is None
                          for x, dim in zip(moved[:tensors], in_dims))  # fmt: skip
        q, mapped = moved[0], in_dims[0] is not None
        if count and (is_packed or not all_have_it or q.dim() != 5):
            each = [operator(*(x if dim is None else x[i] for x, dim in zip(moved, in_dims)))
                    for i in range(count)]  # fmt: skip
            return tuple(map(torch.stack, zip(*each))), 0

        def folded(x, dim):
            if not isinstance(x, torch.Tensor):
                return x
            return (x.expand(count, *x.shape) if dim is None else x).flatten(0, 1)

        results = operator(*map(folded, moved, in_dims))
        return tuple(x.unflatten(0, (count, q.shape[int(mapped)])) for x in results), 0

    return rule


def in_front(x, dim):
    """The tensor with the mapped dimension first, and channels side by side."""
    x = x.movedim(dim, 0)
    return x if x.stride(-1) == 1 else x.contiguous()


for _name, _tensors in (("forward", 3), ("backward", 7)):
    torch.library.register_vmap(f"sagebwd::{_name}", _mapped(
        getattr(torch.ops.sagebwd, _name).default, _tensors), lib=_library)  # fmt: skip


# ---- gradients -----------------------------------------------------------------------------------


class Differentiable(torch.autograd.Function):
    """(out, lse) of `forward(q, k, v, *given)`, and of these gradients by
    `backward(dout, q, k, v, out, lse, dlse, *given)`. No gradient flows from further results."""

    @classmethod
    def apply(cls, forward, backward, *given):
        refuse_tangents(*given[:3])
        listed = len(given) > 5 and given[5] is not None
        refuse_transforms("the emulation",
                          f"sagebwd.{'block_sparse_' * listed}attention on a GPU")  # fmt: skip
        return super().apply(forward, backward, *given)

    @staticmethod
    def forward(ctx, forward, backward, q, k, v, *given):
        out, lse, *more = forward(q, k, v, *given)
        ctx.mark_non_differentiable(*more)
        ctx.backward_pass = backward
        # `given` may have tensors, which say where sequences lie, say. None stands for each.
        ctx.given = [None if isinstance(x, torch.Tensor) else x for x in given]
        ctx.places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(q, k, v, out, lse, *(given[i] for i in ctx.places))
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse, *more

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        refuse_tangents(dout, dlse)
        unwanted = (None,) * (5 + len(ctx.given))
        if dout is None and dlse is None:
            return unwanted
        q, k, v, out, lse, *places = ctx.saved_tensors
        given = list(ctx.given)
        for i, tensor in zip(ctx.places, places):
            given[i] = tensor
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = ctx.backward_pass(dout, q, k, v, out, lse, dlse, *given)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad[2:]))
        return (None, None, *wanted, *unwanted[5:])


class DifferentiatedOnce(torch.autograd.Function):
    """The gradients `function(*arguments)`, with a node of their own: differentiating twice raises
    instead of giving no gradient."""

    @staticmethod
    def forward(ctx, function, *arguments):
        return function(*arguments)

    backward = staticmethod(checks.refuse_double_backward)


def _below_autograd(operator, keyset, modes, *arguments):
    """The operator below this level's autograd. `modes`: those of `_modes` for levels further out,
    torch.func's and the one without it."""
    outside = _no_context
    if torch._C._are_functorch_transforms_active():
        outside = _in_modes(*modes)
    with torch._C._AutoDispatchBelowAutograd(), outside:
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _modes():
    """Whether graphs are built, and whether tangents are seen: not in an autograd function."""
    return torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()


@contextlib.contextmanager
def _in_modes(grad, tangents):
    with torch.set_grad_enabled(grad), forward_ad._set_fwd_grad_enabled(tangents):
        yield


def _backward_operator(operator, *arguments):
    # With create_graph=True it leaves a node that refuses; compiled autograd takes it into a graph.
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _OneLevel(_SingleLevelFunction):
    """An autograd function in an operator, which is given the tensors of one level of torch.func's
    transforms at a time: the dispatcher calls it again for each level further out."""

    @classmethod
    def apply(cls, *given):
        if not torch._C._are_functorch_transforms_active():
            return super().apply(*given)
        with enable_single_level_autograd_function():
            return super().apply(*given)

    # Compiled autograd asks this of torch.autograd.Function, which this class is not.
    if hasattr(torch.autograd.Function, "_compiled_autograd_key"):
        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


class _OfOperators(_OneLevel):
    """`Differentiable`, of the operators."""

    forward = Differentiable.forward
    backward = Differentiable.backward


def _forward_autograd(operator, backward, keyset, q, k, v, *given):
    refuse_tangents(q, k, v)
    refuse_gradient(packing_and_mean(given[3:])[1])
    modes = _modes()
    forward = functools.partial(_below_autograd, operator, keyset, modes)
    if modes[0] and (q.requires_grad or k.requires_grad or v.requires_grad):
        of_backward = functools.partial(_backward_operator, backward)
        return _OfOperators.apply(forward, of_backward, q, k, v, *given)
    return forward(q, k, v, *given)


class _OnceOfOperators(_OneLevel):
    """`DifferentiatedOnce`, of the operators."""

    forward = DifferentiatedOnce.forward
    backward = DifferentiatedOnce.backward


def _backward_autograd(operator, keyset, *arguments):
    tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
    refuse_tangents(*tensors)
    modes = _modes()
    backward = functools.partial(_below_autograd, operator, keyset, modes)
    if modes[0] and any(t.requires_grad for t in tensors):
        return _OnceOfOperators.apply(backward, *arguments)
    return backward(*arguments)


def one_by_one(operator):
    """torch.func.vmap's rule for an operator with several results: a call for each."""

    def rule(info, in_dims, *arguments):
        are_mapped = [isinstance(dim, int) for dim in in_dims]  # lists of numbers have lists
        moved = [in_front(x, dim) if mapped else x
                 for x, dim, mapped in zip(arguments, in_dims, are_mapped)]  # fmt: skip
        each = [operator(*(x[i] if mapped else x for x, mapped in zip(moved, are_mapped)))
                for i in range(info.batch_size)]  # fmt: skip
        return tuple(map(torch.stack, zip(*each))), 0

    return rule


_differentiable = set()  #: names of operators


def make_differentiable(forward, backward):
    """Makes the operators of these names so.

    This is what torch.library.register_autograd does, short of parsing the schema in every call,
    which takes longer than all the rest of a call's host side; and with an eye on tangents.
    """
    of_forward, of_backward = (getattr(torch.ops.sagebwd, name).default
                               for name in (forward, backward))  # fmt: skip

    def forward_autograd(keyset, q, k, v, *given):
        return _forward_autograd(of_forward, of_backward, keyset, q, k, v, *given)

    def backward_autograd(keyset, *arguments):
        return _backward_autograd(of_backward, keyset, *arguments)

    _library.impl(forward, forward_autograd, "Autograd", with_keyset=True)
    if backward not in _differentiable:  # PyTorch before 2.15 takes an implementation once
        _differentiable.add(backward)
        _library.impl(backward, backward_autograd, "Autograd", with_keyset=True)


make_differentiable("forward", "backward")
