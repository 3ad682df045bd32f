"""precision='fastest': the words that it stands for on a GPU.

`_core` has the table of GPUs. Calls put the words in the place of 'fastest' before anything else
looks at their options, so that specs, caches and records have the words alone.
"""

import functools

from sagebwd import _core
from sagebwd.core import options
from sagebwd.core.building import device_number, local_arch
from sagebwd.core.compat import called_by_the_compiler

_OF_TENSORS = frozenset(options.defaults(options.Options)) - {"precision"}
_OF_OPERATIONS = frozenset(options.defaults(options.Operation)) - {"precision"}
#: Stands for every function of the score: all exclude the same options.
_SOME_SCORE = " score=s/2.0"


def fastest_precision(device=None, *, head_dim=128):
    """The words that precision='fastest' stands for on a GPU, as keywords of `attention`, such as
    {'precision': 'six-of-seven', 'dp_sums': 'fp16'}.

    They are the fastest of which errors are at most 1 % larger than those of 'six-of-seven':
    'gradients16' on H100 and H200 (measured), 'six-of-seven' with FP16 sums of dP on GeForce
    (predicted), and the default elsewhere. `sagebwd doctor` prints them, and what they rest on.
    FP16 sums enlarge the errors of one token that is much larger than all others by more:
    dp_sums='fp32' beside 'fastest' keeps FP32 sums. Options that exclude some of the words, such as
    a score function, get FP32 sums of dP, or else the default.

    A training that is resumed on another GPU, or with a later version of sagebwd, which may choose
    otherwise, keeps its numerics if its configuration has these words and not 'fastest'.

    Args:
        device: the number of a GPU, a torch.device, or a name such as 'cuda:1'; None means
            PyTorch's current one, or 0.
        head_dim: that of the calls, a multiple of 8 from 32 to 512.

    Raises SpecError for a GPU or a head dimension that is not supported, LibraryError without a
    GPU.
    """
    number = device_number(device)
    local_arch(number, "The fastest precision is that of a GPU: ask where the kernels will run")
    text = options.text_of(dict(head_dim=head_dim))
    options.spec_of_text(text)
    precision, dp_sums = _words(gpu_of(number), text, False)
    return {"precision": precision, "dp_sums": dp_sums}


@functools.cache
def gpu_of(number):
    """(major, minor, name) of a GPU, or None where there is none of that number, or no number."""
    driver = None if number is None else _core.driver()
    if driver is None or not 0 <= number < len(driver["devices"]):
        return None
    return (*driver["devices"][number], driver["names"][number])


@functools.lru_cache(maxsize=256)
def _words(gpu, text, keeps_dp_sums):
    """(precision, dp_sums) for a line of options. The default without a GPU, and for options that
    no kernel takes, whose errors the call raises."""
    given = dict(item.split("=", 1) for item in text.split())
    try:
        if gpu is not None:
            return _core.fastest_precision(*gpu, keeps_dp_sums, **given)
    except options.SpecError:
        pass
    default = options.defaults()
    return default["precision"], given.get("dp_sums", default["dp_sums"])


@called_by_the_compiler
def _words_on(number, text, keeps_dp_sums):
    return _words(gpu_of(number), text, keeps_dp_sums)


def _width(channels):
    """A head dimension for all that have the same kernels, so that a number of channels which
    torch.compile does not know stays unknown."""
    for width in options.WIDTHS:
        if channels <= width:
            return width
    return options.WIDTHS[-1]


def _put(keywords, number, more, known=_OF_TENSORS):
    """The words for the options among the keywords, and for more of them as text."""
    given = {name: value for name, value in keywords.items() if name in known}
    text = options.text_of(given) + more
    precision, dp_sums = _words_on(number, text, "dp_sums" in given)
    keywords["precision"], keywords["dp_sums"] = precision, dp_sums


def _number_of_tensor(q):
    return (q.device.index or 0) if getattr(q, "is_cuda", False) else None


def of_q(position=0, number_of=_number_of_tensor):
    """A function that puts the words into the keywords of a call, for `options.takes`. The argument
    q has this position, and `number_of` gives the number of its GPU, or None for a CPU."""

    def put(arguments, keywords):
        q = keywords.get("q") if len(arguments) <= position else arguments[position]
        more = ""
        if not getattr(q, "is_nested", False) and getattr(q, "shape", ()):  # others are refused
            more = f" head_dim={_width(q.shape[-1])}"
        if keywords.get("score") is not None:
            more += _SOME_SCORE
        _put(keywords, number_of(q), more)

    return put


def of_device(arguments, keywords):
    """Puts the words into the keywords of a function of `device`, a GPU as functions take it, and
    of `options.Operation`."""
    try:
        number = device_number(keywords.get("device"))
    except options.SpecError:  # the function says what is wrong
        number = None
    _put(keywords, number, "", _OF_OPERATIONS)


def with_words(chosen, q, number_of=_number_of_tensor):
    """`chosen`, options of a call, with the words for 'fastest'. Its dp_sums stay."""
    if not options.is_fastest(chosen["precision"]):
        return chosen
    chosen = {**chosen}
    _put(chosen, number_of(q), f" head_dim={_width(q.shape[-1])}")
    return chosen
