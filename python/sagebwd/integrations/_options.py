"""Options of `sagebwd.attention` that a framework's models are given once, beside the calls."""

from sagebwd.core.keywords import check_keywords
from sagebwd.core.options import (
    FASTEST,
    PRECISIONS,
    Options,
    defaults,
    is_fastest,
    spec_of_text,
    text_of,
)

_OPTIONS = frozenset(defaults(Options))
_OF_MODELS = dict.fromkeys(("causal", "window_left", "window_right"), "each model says it")


def check(function, given, known=_OPTIONS, *, otherwise):
    """Checks what `function` is given for later calls, when it is given: TypeError for a name that
    is not `known`, SpecError for a value that no kernel takes."""
    check_keywords(function, given, known, otherwise)
    named = {name: given[name] for name in given if name in _OPTIONS}
    if is_fastest(named.get("precision")):  # calls say for which GPU
        del named["precision"]
    spec_of_text(text_of(named))


class Chosen:
    """`options` as `use` was last told, of those that are not the model's to say."""

    def __init__(self):
        self.options = {}

    def use(self, *given, **options):
        """Options of `sagebwd.attention` for all models from here on; none: its defaults.

        They are keywords, such as use(precision="gradients16").

        Raises TypeError for what is no option, or is the model's to say; SpecError for a value that
        no kernel takes.
        """
        if given:
            meant = given[0] if given[0] in (*PRECISIONS, FASTEST) else "gradients16"
            raise TypeError(
                f"use() takes options by their names, and {given[0]!r} has none: pass them as in "
                f"use(precision={meant!r})"
            )
        check("use", options, otherwise=_OF_MODELS)
        self.options = options
