"""The `Spec` of what is computed without kernels."""

import re

from sagebwd import _core
from sagebwd.core import seams
from sagebwd.core.options import Spec, SpecError, a_kind, plan_of, precision_of, with_mask


def spec_of_call(**given):
    """`Spec(**given)`, whose errors name startend_row_indices where it names intervals."""
    try:
        return Spec(**given)
    except SpecError as error:
        message = re.sub(r"^intervals = (\d+) is", r"startend_row_indices of \1 columns is",
                         str(error))  # fmt: skip
        if message != str(error) and "with a window" in message:
            message += "; sagebwd.masks.window_and_global says a window by intervals"
        raise SpecError(message) from None


def emulated_spec(options, q, k, **more):
    """The `Spec` of the nearest kernels, and the INT8 products, if precision may list products.

    q and k are (B, H, M, D) and (B, Hk, N, D).
    """
    plan = plan_of(options["precision"])
    if "dp" in plan and options["dp_sums"] == "fp16":
        raise SpecError("dp_sums='fp16' sums 16-bit products, and precision lists 'dp' among the "
                        "INT8 products: leave one of the two out")
    for name, product, what in (("smooth_v", "pv", "values"), ("smooth_q", "s", "queries")):
        if options.get(name) is True and product not in plan:
            raise SpecError(f"{name}=True with precision={options['precision']!r}, which quantises "
                            f"no {what}: leave it out, or add {product!r} to the products")
    options = {**options, "precision": precision_of(plan) or "six-of-seven"}
    return spec_of_call(**with_mask(options, q.shape[2], k.shape[2]), **more), plan


def told_of_expressions(mask, score, problem, intervals=None):
    """(options of the spec, tables as `_core.Inputs` takes them) of mask= and score=.

    problem is (batch, heads, heads_kv, queries, keys). The tables are int32 arrays of (rows,
    columns), those of a score with the bits of float32. Without PyTorch both are texts that index
    nothing. Raises SpecError and TypeError, as `sagebwd.attention`.
    """
    given = {name: x for name, x in (("mask", mask), ("score", score)) if x is not None}
    if not given:
        return {}, []
    if seams.traced is None:
        return _texts(given), []
    from sagebwd.core import mask_ops
    from sagebwd.numerics import expressions

    of_call, tables = expressions.told(mask, score, problem, None, intervals=intervals)
    each = mask_ops.each_of(tables, of_call.sizes) if of_call.sizes else ()
    tables = [t.cpu().numpy().reshape(-1, columns) for t, columns in zip(each, of_call.sizes[1::2])]
    return {name: getattr(of_call, name) for name in given}, tables


def _texts(given):
    """The mask and the score of a process that has no PyTorch."""
    for name, x in given.items():
        if not isinstance(x, str):
            raise TypeError(
                f"{name} is {a_kind(x)}; pass a text: functions need PyTorch, which this process "
                "lacks"
            )
    facts = _core.expression_facts(given.get("mask", ""), given.get("score", ""))[0]
    for table, _, of_score in facts:
        raise SpecError(
            f"{'score' if of_score else 'mask'} indexes {table}, a tensor, and this process has no "
            "PyTorch: install it, or pass a text that indexes nothing"
        )
    return given
