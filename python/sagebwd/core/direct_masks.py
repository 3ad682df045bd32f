"""What `direct` needs for calls with intervals, a mask or a score function.

The operators check a form once. Another call is known to be like it by the texts of its
expressions, and by the sizes, types and places of its tensors. Their numbers may have changed: each
call reads them again, and finds the blocks of its mask unless a BlockMask has them.
"""

import functools

import torch

from sagebwd.core import expressions, forms, interval_ops, mask_ops, options

_known = {}


def trace_functions(keywords):
    """Puts expressions in the place of Python functions among the keywords of a call: whoever
    computes it then asks the function no second time. Compiled code traces functions itself."""
    if torch.compiler.is_compiling():
        return
    for kind in ("mask", "score"):
        if callable(keywords.get(kind)):
            keywords[kind] = expressions.expression_of(kind, keywords[kind])


def given_of(intervals, mask, score):
    """(intervals, mask, score, tensors beside q, k and v) of a call, mask and score as expressions;
    or None for a call that the operators are to refuse, or that gives other tensors gradients."""
    kept, tensors = hasattr(mask, "bits"), ()
    try:
        if mask is not None:
            mask = expressions.expression_of("mask", mask)
        if score is not None:
            score = expressions.expression_of("score", score)
        for name, _, of_score in expressions.named_tables(mask and mask.text, score and score.text):
            if of_score or not kept:
                tensors += ((score if of_score else mask).operands[name],)
    except (KeyError, TypeError, options.SpecError):
        return None
    if intervals is not None:
        if mask is not None or tensors or not isinstance(intervals, torch.Tensor):
            return None
        tensors = (intervals,)
    elif kept:
        tensors = (mask.bits, mask.tables, *tensors)
    if any(map(forms.is_unsaveable, tensors)):  # the operators copy these
        return None
    if torch.is_grad_enabled() and score is not None and any(t.requires_grad for t in tensors):
        return None
    return intervals, mask, score, tensors


def known(q, k, v, softmax_scale, layout, text, given):
    """(form, what makes tensors beside q, k and v as backwards save them) of a call like one that
    has been checked before, or None. The latter takes q and the tensors of `given`."""
    intervals, mask, score, tensors = given
    text = _with_words(text, mask and mask.text, score and score.text)
    if not tensors and mask is None:
        form = forms.known_form(q, k, v, softmax_scale, layout, text)
        return form and (form, _nothing)
    sizes = (*mask.sizes, *mask.table_sizes) if hasattr(mask, "bits") else None
    words = text, intervals is not None, sizes
    try:
        key = forms.key_of(q, k, v, softmax_scale, layout, words, tensors)
        found = _known.get(key)
        if found is None:
            found = _learned(q, k, v, softmax_scale, layout, text, given)
    except (RuntimeError, TypeError, options.SpecError):  # as in forms.known_form, or refused
        return None
    if found is not None and key not in _known:
        if len(_known) >= forms.MOST_FORMS:
            _known.clear()
        _known[key] = found
    return found


def _learned(q, k, v, softmax_scale, layout, text, given):
    """The same, of a call like one that the operators have computed. SpecError and TypeError for
    some of those that they refuse."""
    intervals, mask, score, _ = given
    told = q, k, v, softmax_scale, layout, text
    if intervals is not None:
        form = interval_ops.known_form(intervals, *told)
        return form and (form, form.new_beside)
    kept = hasattr(mask, "bits")
    of_mask = mask if kept else mask.operands if mask else {}
    form = mask_ops.known_form(of_mask, score.operands if score else {}, *told)
    return form and (form, form.kept_beside if kept else form.new_beside)


def _nothing(q, given):
    return ()


@functools.lru_cache(maxsize=forms.MOST_FORMS)
def _with_words(text, mask, score):
    """The options for the operators."""
    for kind, given in (("mask", mask), ("score", score)):
        text += "" if given is None else expressions.word_of(kind, given)
    return text
