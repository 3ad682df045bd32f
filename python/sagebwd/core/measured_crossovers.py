"""Crossovers that `sagebwd.tune_lengths` measured on this machine, in the cache's directory.

Each is a file of JSON, named by the digest of its key, as kernels and tuning records are.
"""

import hashlib
import json
import math
import os
import warnings

from sagebwd import _core

#: More than any such file has, so that a wrong one is not read whole.
_LONGEST = 1 << 20


def keep(key, forward, training, figures):
    """Whether a crossover is on disk now, for later processes.

    Args:
        key: a dict of what was measured and where.
        forward, training: the numbers of tokens, math.inf for never.
        figures: what they were computed from, as JSON has it.
    """
    path = _path_of(key)
    if path is None:
        return False
    tokens = {"forward": forward, "training": training}
    tokens = {name: None if math.isinf(number) else number for name, number in tokens.items()}
    text = json.dumps({"key": key, "tokens": tokens, "figures": figures}, indent=1) + "\n"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    except OSError:
        return False
    return not _core.write_output(os.fsencode(path), text)


def find(key):
    """The numbers of tokens of (a forward, forward and backward) that were kept under a key; None
    if there are none. A file that cannot be read causes a warning."""
    path = _path_of(key)
    if path is None or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(_LONGEST))
        if found["key"] != key:
            raise ValueError("it has another key")
        return tuple(_tokens(found["tokens"][name]) for name in ("forward", "training"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.warn(f"sagebwd: the crossover in {path} is not used ({error}). Remove the "
                      "file, or measure again: 'sagebwd tune --help' says how, at --lengths",
                      stacklevel=2)  # fmt: skip
        return None


def _tokens(number):
    if number is None:
        return math.inf
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 1:
        raise ValueError(f"{number!r} is no number of tokens")
    return number


def _path_of(key):
    """Says where a crossover is kept; None without a directory that can be used."""
    cache = _core.cache()
    if not cache["directory"] or cache["disabled_reason"]:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return os.path.join(cache["directory"], f"{digest}.crossover")
