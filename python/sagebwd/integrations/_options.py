"""Options of `sagebwd.attention` that a framework's models are given once, beside the calls."""

from sagebwd.keywords import check_keywords
from sagebwd.options import Options, defaults, spec_of_text, text_of

_OPTIONS = frozenset(defaults(Options))
_OF_MODELS = dict.fromkeys(("causal", "window_left", "window_right"), "each model says it")


def check(function, given, known=_OPTIONS, *, otherwise):
    """What `function` is given for later calls, when it is given: TypeError for a name that is not
    `known`, SpecError for a value that no kernel takes."""
    check_keywords(function, given, known, otherwise)
    spec_of_text(text_of({name: given[name] for name in given if name in _OPTIONS}))


class Chosen:
    """`options` as `use` was last told, of those that are not the model's to say."""

    def __init__(self):
        self.options = {}

    def use(self, **options):
        """Options of `sagebwd.attention` for all models from here on; none: its defaults.

        Raises TypeError for what is no option, or is the model's to say; SpecError for a value that
        no kernel takes.
        """
        check("use", options, otherwise=_OF_MODELS)
        self.options = options
