"""The `Spec` of what is computed without kernels."""

import re

from sagebwd.core.options import Spec, SpecError, plan_of, precision_of, with_mask


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
    options = {**options, "precision": precision_of(plan) or "six-of-seven"}
    return spec_of_call(**with_mask(options, q.shape[2], k.shape[2]), **more), plan
