"""Norm, RoPE and gate of a rank's own tokens. No rank needs another's for these, so that all that
is wrong with them is found before ranks exchange anything."""

import torch

from sagebwd.core import front_arguments, front_end, options


def facts_of(front, gate):
    """What all ranks must have in common: which arguments are given, and the numbers among them."""
    given = {name: x for name, x in front.items() if x is not front_arguments.ARGUMENTS[name]}
    return {"norm and RoPE": [f"{name}={x}" if isinstance(x, (bool, int, float, str)) else name
                              for name, x in sorted(given.items())],
            "gate": gate is not None}  # fmt: skip


def behind(q, k, v, front, layout, method):
    """(q, k, v), q and k behind norm and RoPE. SpecError or TypeError for what is wrong."""
    if not front_arguments.asks(front):
        return q, k, v
    options.check_layout(layout)
    of_keys = "rope" if front["rope_k"] is None else "rope_k"
    for name, t in (("rope", q), (of_keys, k)):
        _check_own_rows(name, front[name], t, layout, method)
    return front_end.behind_front(q, k, v, dict(front), layout)


def _check_own_rows(name, table, t, layout, method):
    """SpecError for tables of other tokens than this rank's. `qk_norm_rope` refuses what is no
    table."""
    if not isinstance(table, (tuple, list)) or not isinstance(t, torch.Tensor) or t.dim() != 4:
        return
    tokens = t.shape[1 if layout == "bshd" else 2]
    for of, rows in zip(("cos", "sin"), table):
        if isinstance(rows, torch.Tensor) and rows.dim() in (2, 3) and rows.shape[-2] != tokens:
            raise options.SpecError(
                f"{name}'s {of} has {rows.shape[-2]} tokens, and this rank has {tokens}: pass the "
                f"rows of its tokens, sagebwd.distributed.shard({of}, mesh, dim=-2, "
                f"method={method!r})"
            )
