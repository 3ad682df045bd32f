"""When errors are too large, and what a user can do about it."""

import math
import numbers

from sagebwd.core import options
from sagebwd.core.arguments import checks

#: Limits. Gaussian inputs of 1024 tokens with largest logits of 6, 51, 91 and 204 (64 channels,
#: causal, six-of-seven) have errors of O of 0.011, 0.029, 0.038 and 0.055, of dS 0.009, 0.052,
#: 0.104 and 0.222: both limits are reached near 100. Errors of gradients have 0.016, 0.053, 0.105
#: and 0.225 there, with `block` up to 0.058 without any large logit. Their limit is what three runs
#: with `block` (bench/results/study/warning-*block*.json and warning-paper-no-smooth-k.json, one
#: seed each) had passed before their training loss was more than 0.054 above SDPA's. A run with
#: `row` scales, and without K-smoothing, stayed below 0.05 and never had that gap.
LIMITS = {"O": 0.04, "dS": 0.1, "dQ": 0.06, "dK": 0.06, "dV": 0.06, "logit_range": 100.0,
          "max_logit": math.inf, "zero_scales": 0.01, "saturated_scales": 0.0}  # fmt: skip

_ROW = "granularity='row' gives each query and key a scale of its own"
_QK16 = "precision='qk16' computes the scores from 16-bit operands"
_SMOOTH_K = "smooth_k=True subtracts the mean that all keys share"
#: RMS of the error by which a value that is too small for fp16's normal numbers is rounded.
_UNDERFLOW = 2.0**-24 / math.sqrt(12)
_NORM = "QK-norm (RMSNorm of q and k over each head's channels, as in Qwen3)"


def limits(given):
    """LIMITS with those of a dict in place. SpecError for other names and values."""
    if given is None:
        return dict(LIMITS)
    if not isinstance(given, dict):
        raise TypeError(f"thresholds is {checks.a_kind(given)}; pass a dict, such as {{'O': 0.05}}")
    for name, value in given.items():
        if name not in LIMITS:
            raise options.SpecError(f"thresholds has {name!r}; there are {', '.join(LIMITS)}")
        if value is None:
            continue
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not real or not value >= 0:
            raise options.SpecError(
                f"thresholds[{name!r}]={value!r}: pass a number of at least 0, or None for no limit"
            )
    return {**LIMITS, **{n: math.inf if v is None else float(v) for n, v in given.items()}}


def why_nothing(forwards, backwards, others, models, forms_of_models, tries, next_step):
    """(a short name, what to say) where nothing can have been measured, otherwise None. `others`
    are the backward calls that were not wanted, `forms_of_models` those seen in the models'
    forward, `tries` calls that were to be sampled, `next_step` that of the next sample."""
    if not forwards and not backwards:
        return "nothing", "it saw no attention of sagebwd: nothing was measured"
    if backwards > others:
        return None if tries else ("nothing", f"nothing was measured: it saw {backwards - others} "
                                   "calls with a backward, and the next sample would have been in "
                                   f"step {next_step}")  # fmt: skip
    if models and not forms_of_models:
        return "nothing", (f"it saw no attention of sagebwd in the forward of the model: nothing "
                           f"was measured. It saw {max(forwards, backwards)} calls that were not "
                           "the model's. If the model was compiled later, pass what torch.compile "
                           "returned")  # fmt: skip
    if not backwards:
        return "backward", ("it saw attention without a backward: only calls with a backward are "
                            "sampled")  # fmt: skip
    whose = "the model's" if models else "wanted by the function"
    return "nothing", (f"nothing was measured: it saw {others} calls with a backward, and none was "
                       f"{whose}")  # fmt: skip


def exceeded(figures, limits):
    """The names whose figures are above their limits, or NaN. None, which is no figure, is not."""
    return [name for name, limit in limits.items()
            if limit < math.inf and figures[name] is not None and not figures[name] <= limit]


def remedy(names, figures, call, sizes):
    """Says what to do where the figures of these names are too large, of a call so described.
    `sizes` has the root mean squares of its exact gradients."""
    if "saturated_scales" in names or any(math.isnan(figures[n]) for n in names):
        return ("q, k, v or dO has values that are NaN or infinite: look for the first layer that "
                "gives them; lower the learning rate, clip gradients, or scale the loss of fp16 "
                "(torch.amp.GradScaler)")  # fmt: skip
    gradients = {"dQ", "dK", "dV"} & set(names)
    small = {g for g in gradients if _is_underflow(figures[g] * sizes[g], call)}
    gradients -= small
    of_scores = {"O", "dS", "logit_range", "max_logit"} & set(names)
    found = []
    of_ds = figures["dS"] or 0.0
    if of_scores or gradients and 2 * of_ds**2 > max(figures[g] for g in gradients) ** 2:
        has_int8_scores = "s" in call["int8"]
        if "dp" in call["int8"] and "O" not in names:
            found.append("leave 'dp' out of the precision: dS is where dP's error shows")
        of_errors = bool(gradients or of_scores & {"O", "dS"})
        of_values = of_errors and _of_values(set(names), figures, call)
        if of_values:
            found.append(of_values)
        elif has_int8_scores and of_errors:
            found.append(_of_scores(figures, call))
        if figures["logit_range"] > 30 or not (of_values or has_int8_scores and of_errors):
            found.append(f"{_NORM} keeps logits small")
    elif gradients:
        found.append(_of_gradients(gradients, call))
    for what, of in ((small, "fp16"), ("zero_scales" in names, "their scales")):
        if what:
            found.append(f"values are too small for {of}: scale the loss (torch.amp.GradScaler) or "
                         "use bfloat16")  # fmt: skip
    return "; ".join(found)


def _is_underflow(error, call):
    """Whether most of the squared error, of which the RMS is given, is rounding to fp16."""
    return call["dtype"] == "fp16" and 2 * _UNDERFLOW**2 > error**2


def _of_gradients(gradients, call):
    """Says what to do where most of the error of these gradients is their own, not that of dS."""
    quantised = {name for name in gradients if name.lower() in call["int8"]}
    if not quantised:
        return "no option makes these gradients better: compare with 16-bit attention"
    if call["granularity"] == "block":
        return _ROW
    if "dQ" in quantised and not call["smooth_k"]:
        return _SMOOTH_K
    return "try precision='gradients16', which computes dQ, dK and dV from 16-bit operands"


def _of_values(names, figures, call):
    """Says what to do where values have a mean, of which P in INT8 loses a part; or None."""
    is_lost = "pv" in call["int8"] and not call["smooth_v"] and names != {"dV"}
    if figures["v_offset"] > 0.5 and is_lost:
        more = f"; where this does not suffice, {_QK16}" if "s" in call["int8"] else ""
        return (f"{figures['v_offset']:.0%} of the squares of v are a mean of all tokens, which P "
                "in INT8 makes too small in O: smooth_v=True takes it off v and adds it to the "
                f"output{more}")  # fmt: skip
    return None


def _of_scores(figures, call):
    if not call["smooth_k"]:
        return _SMOOTH_K
    if call["granularity"] == "block":
        return _ROW
    if figures["q_offset"] > 0.5 and not call["smooth_q"] and call["takes_smooth_q"]:
        return (f"{figures['q_offset']:.0%} of the squares of q are a mean that all queries share: "
                "smooth_q=True subtracts it")  # fmt: skip
    return _QK16
