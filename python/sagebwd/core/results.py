"""Which results of a forward pass a call returns, for tensors and arrays of any library."""

from sagebwd.core.arguments.checks import yes_or_no


def with_max_logits(asked, chosen):
    """The options of a call with this return_max_logits. SpecError for what is neither True nor
    False."""
    return {**chosen, "max_logits": True} if yes_or_no("return_max_logits", asked) else chosen


def check_wanted(return_lse, return_max_logits):
    """SpecError for flags that are neither True nor False."""
    yes_or_no("return_lse", return_lse)
    yes_or_no("return_max_logits", return_max_logits)


def of_all(out, lse, max_logits, return_lse, return_max_logits):
    """Chooses what a call returns among all results that there can be."""
    return returned(out, lse, return_lse, (max_logits,) if return_max_logits else ())


def returned(out, lse, return_lse, more):
    """Chooses what a call returns among what was computed. `more` has max_logits where they are
    wanted."""
    if not more:
        return (out, lse) if return_lse else out
    return (out, lse, *more) if return_lse else (out, *more)
