"""Pairs of PyTorch operators: attention whose calls are told more than where sequences lie."""

import torch

from sagebwd.core import max_logits, ops
from sagebwd.core.arguments.tensors import check_backward, problem_of

_library = ops.library()


def add_pair(kind, told, module):
    """Adds torch.ops.sagebwd.KIND_forward and KIND_backward, of (out, lse) and of (dq, dk, dv).

    told: arguments behind those tensors, in PyTorch's notation; `layout` and `spec` follow.
    module: its `_form_of` gives the `Form` of q, k, v and all that is told, with the tensors that
        the form's passes get besides, and its `_check_told` raises SpecError for what does not fit.
    """
    forward, backward = f"{kind}_forward", f"{kind}_backward"
    told += ", str layout, str spec"
    _library.define(f"{forward}(Tensor q, Tensor k, Tensor v, {told}) "
                    "-> (Tensor out, Tensor lse)", tags=ops.TAGS)  # fmt: skip
    _library.define(f"{backward}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
                    f"Tensor lse, Tensor? dlse, {told}) -> (Tensor dq, Tensor dk, Tensor dv)",
                    tags=ops.TAGS)  # fmt: skip

    def run_forward(q, k, v, *given):
        form, more = module._form_of(q, k, v, *given)
        return form.forward(q, k, v, packing=more)

    def run_backward(dout, q, k, v, out, lse, dlse, *given):
        check_backward(dout, q, k, v, out, lse, dlse, given[-2], ops.DEVICES)
        form, more = module._form_of(q, k, v, *given)
        return form.backward(dout, q, k, v, out, lse, dlse, packing=more)

    def shapes_of_forward(q, k, v, *given):
        problem = problem_of(q, k, v, given[-2], ops.DEVICES)
        module._check_told(problem, q, *given)
        rows = (problem[0], problem[1], problem[3])
        return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(rows, dtype=torch.float32)

    def shapes_of_backward(dout, q, k, v, out, lse, dlse, *given):
        problem = check_backward(dout, q, k, v, out, lse, dlse, given[-2], ops.DEVICES)
        module._check_told(problem, q, *given)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    for name, run, shapes in ((forward, run_forward, shapes_of_forward),
                              (backward, run_backward, shapes_of_backward)):  # fmt: skip
        for backend in ops.BACKENDS:
            _library.impl(name, run, backend)
        torch.library.register_fake(f"sagebwd::{name}", shapes, lib=_library)
        torch.library.register_vmap(f"sagebwd::{name}", ops.one_by_one(
            getattr(torch.ops.sagebwd, name).default), lib=_library)  # fmt: skip
    ops.make_differentiable(forward, backward)
    max_logits.define(forward, backward, run_forward, shapes_of_forward)
