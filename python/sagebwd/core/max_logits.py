"""The largest score of each head as a third result: operators of calls that ask for it.

For each forward operator there is one more, with `_max_logits` behind its name, the same arguments
and a third result, float32 of (heads,). It takes options that have `max_logits=yes`. The backward
takes the same options, and its kernels do not depend on that one.
"""

import torch

from sagebwd.core import ops, options

_library = ops.library()
_BEHIND, _OPTION = "_max_logits", "max_logits=yes"


def define(name, backward, forward, fake):
    """Defines the operator beside that of this name: of the function that computes both, and the
    one that gives shapes without data. `backward`: the name of the operator of gradients."""
    told = str(getattr(torch.ops.sagebwd, name).default._schema)
    told = told.split("(", 1)[1].replace("Tensor lse)", "Tensor lse, Tensor max_logits)")
    _library.define(f"{name}{_BEHIND}({told}", tags=ops.TAGS)
    place = [argument.split()[1] for argument in told.split(") ->")[0].split(", ")].index("spec")

    def check(given):
        if _OPTION not in given[place].split():
            raise options.SpecError(f"spec={given[place]!r} does not have {_OPTION}: call "
                                    f"torch.ops.sagebwd.{name}, or add it")  # fmt: skip

    def checked(*given):
        check(given)
        return forward(*given)

    def shapes(q, k, v, *given):
        check((q, k, v, *given))
        out, lse = fake(q, k, v, *given)
        return out, lse, q.new_empty(lse.shape[1], dtype=torch.float32)

    for key in ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU"):
        _library.impl(name + _BEHIND, checked, key)
    torch.library.register_fake(f"sagebwd::{name}{_BEHIND}", shapes, lib=_library)
    rule = ops.one_by_one(getattr(torch.ops.sagebwd, name + _BEHIND).default)
    torch.library.register_vmap(f"sagebwd::{name}{_BEHIND}", rule, lib=_library)
    ops.make_differentiable(name + _BEHIND, backward)


def operator_of(name, text):
    """The operator of this name, or the one beside it, for a line of options."""
    return getattr(torch.ops.sagebwd, name + _BEHIND if _OPTION in text.split() else name)


define("forward", "backward", ops.forward_pass, ops.forward_shapes)
