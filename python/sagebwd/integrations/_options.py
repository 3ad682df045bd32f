"""Options of `sagebwd.attention` that a framework's models are given once, beside the calls."""

from sagebwd.keywords import refuse_keyword
from sagebwd.options import Options, defaults


class Chosen:
    """`options` as `use` was last told, of those that are not the model's to say."""

    def __init__(self, but=()):
        self.options = {}
        self._known = frozenset(defaults(Options)) - {"causal", "window_left", "window_right", *but}

    def use(self, **options):
        """Options of `sagebwd.attention` for all models from here on; none: its defaults.

        Raises TypeError for what is no option, or is the model's to say.
        """
        for name in options:
            if name not in self._known:
                refuse_keyword("use", name, self._known)
        self.options = options
