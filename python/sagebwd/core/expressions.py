"""Masks and functions of the score as a call gives them: their texts, and the tensors that these
index."""

import functools

import torch

from sagebwd import _core
from sagebwd.core import options, seams
from sagebwd.core.compat import called_by_the_compiler

checked = functools.cache(options.spec_of_text)
_facts = functools.cache(_core.expression_facts)


@called_by_the_compiler
def facts(mask, score):
    """(tables, whether the mask depends on b, whether on h) of texts that may be empty. A table is
    (name, indices, whether it is the score function's)."""
    return _facts(mask, score)


def named_tables(mask, score):
    """The tables of such texts, None for one that is not there, in eager code."""
    return _facts(mask or "", score or "")[0]


@functools.cache
def _facts_of(spec):
    told = checked(spec)
    return _facts(told.mask, told.score)


@called_by_the_compiler
def facts_of(spec):
    return _facts_of(spec)


@called_by_the_compiler
def _compiled_text(kind, given):
    """The text of a function or text: in compiled code neither has tensors."""
    traced = seams.traced(kind, given)
    if traced.operands:
        raise options.SpecError(f"{kind} is a function that indexes {', '.join(traced.operands)}: "
                                f"in compiled code pass sagebwd.masks.trace_{kind}(function), made "
                                "outside")  # fmt: skip
    return traced.text


def _expression(kind, given):
    """(text, tensors by name) of a mask or a score function, as which it may be given."""
    if torch.compiler.is_compiling() and (isinstance(given, str) or callable(given)):
        return _compiled_text(kind, given), {}
    given = expression_of(kind, given)
    return given.text, given.operands


def expression_of(kind, given):
    """An expression or a BlockMask, as which a function or a text may be given. TypeError for what
    is none of these."""
    if isinstance(given, str) or callable(given):
        given = seams.traced(kind, given)
    if getattr(given, "kind", None) != kind:
        of, example = (("(b, h, q, k)", "'q >= k'") if kind == "mask" else
                       ("(s, b, h, q, k)", "'20.0 * tanh(s / 20.0)'"))  # fmt: skip
        raise TypeError(f"{kind} is {options.a_kind(given)}; pass a function of {of}, a text such "
                        f"as {example}, or what sagebwd.masks.trace_{kind} gives"
                        + _INSTEAD.get((kind, type(given).__name__), ""))  # fmt: skip
    return given


#: What else may be meant, by the argument and the name of a type.
_INSTEAD = {
    ("mask", "BlockMask"): ". Of flex_attention's, sagebwd.masks.from_flex takes the function",
    ("mask", "Intervals"): ". Intervals are given as **mask.arguments",
    ("mask", "Tensor"): ". sagebwd.masks.from_bool takes a bool tensor, and "
                        "trace_mask('m[q, k] == 1', {'m': matrix}) any matrix",
    ("score", "Tensor"): ". What is added to scores is trace_score('s + t[q, k]', {'t': matrix})",
}  # fmt: skip


def word_of(kind, text):
    """The word of a spec."""
    return f" {kind}={text.replace(' ', '')}"


def spoken(mask, score):
    """(words of a spec, tensors by name of the mask, and those of the score) of a call. A BlockMask
    stands for its tensors."""
    words, texts, operands = "", ["", ""], [{}, {}]
    for i, (kind, given) in enumerate((("mask", mask), ("score", score))):
        if given is not None:
            texts[i], operands[i] = _expression(kind, given)
            words += word_of(kind, texts[i])
    if words:
        check_named(*texts, *operands)
    return words, mask if hasattr(mask, "bits") else operands[0], operands[1]


def check_named(mask, score, of_mask, of_score):
    """SpecError unless the tensors that texts index are there, by name."""
    for name, _, is_score in facts(mask, score)[0]:
        if name not in (of_score if is_score else of_mask):
            what, text = ("score", score) if is_score else ("mask", mask)
            raise options.SpecError(
                f"{what} indexes {name}, and no tensor of that name is given: "
                f"sagebwd.masks.trace_{what}({text!r}, {{{name!r}: tensor}})"
            )


def depends(mask):
    """Whether a mask, a text, differs among the sequences of a batch, and among heads."""
    return facts(mask, "")[1:]


def operands_of(mask, score, each, sizes):
    """The tensors that the texts of a mask and of a score function index, by their names: two
    dicts. `each` and `sizes` are those of all tables, in order (`mask_ops`)."""
    found = {}, {}
    for (name, indices, is_score), t, columns in zip(facts(mask, score)[0], each, sizes[1::2]):
        t = t.contiguous().view(torch.float32) if is_score else t
        found[is_score][name] = t.view(-1, columns) if indices == 2 else t
    return found


def refuse_gradients(of_score, function="attention_backward"):
    """SpecError for tensors that a backward without autograd would give no gradient."""
    for name, t in of_score.items():
        if torch.is_grad_enabled() and t.requires_grad:
            raise options.SpecError(
                f"the score indexes {name}, which requires grad, and {function} gives the "
                f"gradients of q, k and v alone: call sagebwd.attention, or pass {name}.detach()"
            )
