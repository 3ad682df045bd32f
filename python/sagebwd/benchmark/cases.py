"""The shapes that `sagebwd bench` measures: those of well-known models, or the user's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sagebwd.core import options
from sagebwd.core.keywords import nearest

#: Sizes, and what they are where neither the caller nor a model says.
SIZES = {"batch": 1, "heads": 16, "heads_kv": None, "seq_len": 8192, "seq_kv": None}
#: Masks told by intervals of hidden queries per key: what each is, its causal mask, and how many
#: columns it has. `benchmark.masks` makes them.
INTERVALS = {
    "documents": ("eight documents one behind the other, causal", "top-left", 1),
    "prefix": ("causal text of which everybody sees the first quarter", "none", 2),
    "window": ("a causal window of a sixteenth of the tokens, and first ones that all see",
               "top-left", 1),
}  # fmt: skip
#: Sizes that replace those of a model.
OF_ANY_MODEL = ("batch", "seq_len")


@dataclass(frozen=True)
class Case:
    """Sizes and mask of one comparison, as the keywords of `sagebwd.bench` name them."""

    name: str = ""  #: the model; empty for the caller's own shape
    batch: int = 1
    heads: int = 16
    heads_kv: int = 16
    seq_len: int = 8192  #: queries
    seq_kv: int = 8192  #: keys
    head_dim: int = 128
    causal: str = "none"  #: 'none', 'top-left' or 'bottom-right'
    window_left: int | None = None
    window_right: int | None = None
    sinks: bool = False
    dtype: str = "bf16"
    layout: str = "bhsd"  #: of the tensors in memory
    intervals: str = ""  #: a name of INTERVALS, or empty

    def mask(self) -> dict:
        """The keywords of `sagebwd.attention` that say what a query sees."""
        return {"causal": False if self.causal == "none" else self.causal,
                "window_left": self.window_left, "window_right": self.window_right}  # fmt: skip

    def of_spec(self) -> dict:
        """The fields of a `Spec` that the mask decides."""
        return {**self.mask(), "intervals": INTERVALS[self.intervals][2] if self.intervals else 0}

    @property
    def is_windowed(self) -> bool:
        """Whether a sliding window narrows the mask."""
        return self.window_left is not None or self.window_right is not None

    def __str__(self) -> str:
        parts = [f"batch {self.batch}", f"{self.heads} heads"]
        if self.heads_kv != self.heads:
            parts.append(f"{self.heads_kv} key/value heads")
        keys = "" if self.seq_kv == self.seq_len else f" on {self.seq_kv} keys"
        parts += [f"{self.seq_len} tokens{keys}", f"D{self.head_dim}", self.dtype]
        if self.intervals:
            parts.append(f"{self.intervals} by intervals")
        elif self.causal != "none":
            equal = self.seq_len == self.seq_kv
            parts.append("causal" if equal else f"causal {self.causal}")
        for side, reach in (("left", self.window_left), ("right", self.window_right)):
            if reach is not None:
                parts.append(f"window of {reach} to the {side}")
        parts += ["sinks"] * self.sinks + [f"{self.layout} in memory"] * (self.layout != "bhsd")
        return (f"{self.name}: " if self.name else "") + ", ".join(parts)


def _model(name, heads, heads_kv, seq_len, head_dim, causal="top-left", **more) -> Case:
    return Case(name, 1, heads, heads_kv, seq_len, seq_len, head_dim, causal, **more)


#: One attention layer of models that people train, for one sequence. Heads, dimensions and windows
#: are those of the published configurations. Video models attend over all frames at once.
MODELS = {case.name: case for case in (
    _model("llama-3-8b", 32, 8, 8192, 128),
    _model("qwen3-8b", 32, 8, 32768, 128),
    _model("gemma-3-12b", 16, 8, 8192, 256),
    _model("gemma-3-12b-window", 16, 8, 8192, 256, window_left=1023),
    _model("gpt-oss-20b", 64, 8, 8192, 64, sinks=True),
    _model("gpt-oss-20b-window", 64, 8, 8192, 64, window_left=127, sinks=True),
    _model("wan-2.1-1.3b", 12, 12, 32760, 128, "none"),  # 81 frames of 832 x 480
    _model("wan-2.1-14b", 40, 40, 75600, 128, "none"),  # 81 frames of 1280 x 720
    _model("wan-2.2-5b", 24, 24, 27280, 128, "none"),  # 121 frames of 1280 x 704
    _model("flux-1", 24, 24, 4608, 128, "none"),  # 1024 x 1024, and 512 tokens of text
)}  # fmt: skip


def names(what: str, given, known) -> list[str]:
    """The names that a caller gives as one string or several, each once. SpecError for others."""
    if given is None:
        return list(known)
    words = [given] if isinstance(given, str) else given
    try:
        words = list(dict.fromkeys(words))
    except TypeError:
        words = [None]
    if not words or not all(isinstance(word, str) for word in words):
        listed = ", ".join(known)
        raise options.SpecError(f"{what}={given!r}: pass one name or several, of {listed}")
    for word in words:
        if word not in known:
            if what == "precision":
                options.refuse_fastest(word)
            raise options.SpecError(
                f"{what}={word!r} is not known{nearest(word, known)}: known are {', '.join(known)}"
            )
    return words


def cases_of(
    models, sizes: dict, sinks: bool, layout: str, chosen: dict, intervals: str | None = None
) -> list[Case]:
    """Lists what to measure: the models, or the one shape that the other arguments describe, or
    this shape with a mask of INTERVALS and then with a causal one.

    `sizes` has a value, or None, for each name in SIZES; `chosen` has the options of an operation
    (options.Operation). Raises SpecError.
    """
    if intervals is not None:
        return _with_intervals(models, sizes, sinks, layout, chosen, intervals)
    options.yes_or_no("sinks", sinks)
    options.check_layout(layout)
    sizes = {name: None if size is None else options.whole_number(name, size)
             for name, size in sizes.items()}  # fmt: skip
    if models is None:
        return [_own_case(sizes, sinks, layout, chosen)]
    own = [name for name, size in sizes.items() if size is not None and name not in OF_ANY_MODEL]
    usual = options.defaults(options.Operation) | {"causal": "none"}
    given = chosen | {"causal": chosen["causal"] or "none"}
    own += [name for name in ("head_dim", "causal", "window_left", "window_right")
            if given[name] != usual[name]] + ["sinks"] * sinks  # fmt: skip
    if own:
        raise options.SpecError(
            f"models and {own[0]}: a model says its {own[0]} itself. Leave out one of them; "
            f"{' and '.join(OF_ANY_MODEL)} may be given beside models"
        )
    more = {"dtype": options.dtype_name(chosen["dtype"]), "layout": layout}
    more |= {"batch": sizes["batch"]} if sizes["batch"] else {}
    more |= {"seq_len": sizes["seq_len"], "seq_kv": sizes["seq_len"]} if sizes["seq_len"] else {}
    return [dataclasses.replace(MODELS[name], **more) for name in names("models", models, MODELS)]


def _with_intervals(models, sizes, sinks, layout, chosen, name) -> list[Case]:
    if not isinstance(name, str):
        raise options.SpecError(f"intervals={name!r}: pass one name, of {', '.join(INTERVALS)}")
    (name,) = names("intervals", name, INTERVALS)
    given = chosen | {"causal": chosen["causal"] or "none"}
    other = [n for n in ("causal", "window_left", "window_right") if given[n] not in (None, "none")]
    other += ["models"] * (models is not None) + ["seq_kv"] * (sizes["seq_kv"] is not None)
    if other:
        raise options.SpecError(f"intervals={name!r} and {other[0]}: the mask is for as many "
                                f"queries as keys, and says what each sees. Leave out {other[0]}")  # fmt: skip
    (plain,) = cases_of(None, sizes, sinks, layout, {**chosen, "causal": "top-left"})
    return [dataclasses.replace(plain, causal=INTERVALS[name][1], intervals=name), plain]


def _own_case(sizes: dict, sinks: bool, layout: str, chosen: dict) -> Case:
    sizes = {name: usual if sizes[name] is None else sizes[name] for name, usual in SIZES.items()}
    for name, like in (("heads_kv", "heads"), ("seq_kv", "seq_len")):
        sizes[name] = sizes[name] or sizes[like]
    if sizes["heads"] % sizes["heads_kv"]:
        raise options.SpecError(
            f"heads={sizes['heads']} and heads_kv={sizes['heads_kv']}: heads must be a multiple of "
            "heads_kv. Pass a heads_kv that divides it"
        )
    causal = options.causal_name(chosen["causal"], sizes["seq_len"], sizes["seq_kv"])
    return Case(
        "", **sizes, head_dim=chosen["head_dim"], causal=causal, window_left=chosen["window_left"],
        window_right=chosen["window_right"], sinks=sinks, layout=layout,
        dtype=options.dtype_name(chosen["dtype"]),
    )  # fmt: skip
