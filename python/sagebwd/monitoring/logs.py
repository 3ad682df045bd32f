"""A monitor's records go to these writers, and into the table that it shows."""

import json
import math
import os
import pickle
import random

from sagebwd.core.arguments import checks
from sagebwd.core.compat import need

#: A logger of scalars gets these.
SCALARS = ("O", "dQ", "dK", "dV", "dS", "O_bias", "max_logit", "logit_range", "q_offset",
           "v_offset", "zero_scales", "saturated_scales")  # fmt: skip


def writers(to, rank):
    """Functions of a record, for what `Monitor(to=)` takes."""
    if to is None:
        return []
    if isinstance(to, (list, tuple)):
        return [writer for each in to for writer in writers(each, rank)]
    if isinstance(to, (str, os.PathLike)):
        return [_Lines(os.fspath(to), rank)]
    if hasattr(to, "add_scalar"):
        return [_Scalars(Kept("to", to))]
    if callable(to):
        return [_Flat(Kept("to", to))]
    raise TypeError(
        f"to is {checks.a_kind(to)}; pass a path (JSON lines), an object with add_scalar "
        "(TensorBoard's SummaryWriter), a function of a dict (wandb.log), or a list of these"
    )


def flat(record):
    """The record's numbers, as {'sagebwd/O': 0.014, ...}, without those that it has not."""
    names = (*SCALARS, "step", "call", "sequence", "head")
    return {f"sagebwd/{name}": record[name] for name in names if record[name] is not None}


class Kept:
    """Holds what a user gave as this argument. Copies of a monitor share it, and a file that cannot
    hold it, as it cannot hold a lambda or TensorBoard's writer, has a `_Lost` in its place."""

    def __init__(self, argument, given):
        self.argument, self.given = argument, given

    def __call__(self):
        return self.given

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        try:
            pickle.dumps(self.given)
        except Exception:  # each kind has its own, and users write kinds
            return _Lost, (self.argument, type(self.given).__name__)
        return Kept, (self.argument, self.given)


class _Lost:
    def __init__(self, argument, kind):
        self.argument, self.kind = argument, kind

    def __call__(self):
        raise RuntimeError(
            f"this monitor comes from a file, which could not hold its {self.argument} (of type "
            f"{self.kind}): make a monitor in its place and pass {self.argument} again"
        )

    def __reduce__(self):
        return _Lost, (self.argument, self.kind)


class _Flat:
    """Hands records to a function."""

    def __init__(self, function):
        self._function = function

    def __call__(self, record):
        self._function()(flat(record))


class _Scalars:
    """Hands records to TensorBoard."""

    def __init__(self, writer):
        self._writer = writer

    def __call__(self, record):
        writer = self._writer()
        for name in SCALARS:
            if record[name] is None:
                continue
            writer.add_scalar(f"sagebwd/{name}", record[name], record["step"])


class _Lines:
    """Appends to a file of JSON lines. Each is written at once, so that processes may share it.
    A '{rank}' in its path is that of each record: a monitor may be older than the group."""

    def __init__(self, path, rank):
        self.path = os.path.abspath(path)
        path = path.replace("{rank}", str(rank))
        try:
            with open(path, "a"):  # a path that cannot be written is refused at once
                pass
        except (OSError, ValueError) as error:
            folder = os.path.dirname(path)
            what = getattr(error, "strerror", None) or str(error)
            if os.path.isdir(path):
                what = "it is a folder"
            elif folder and not os.path.isdir(folder):
                what = f"there is no folder {folder!r}; make it first"
            message = (f"to={path!r} cannot be written: {what}. Pass a file in a folder that is "
                       "there")  # fmt: skip
            if isinstance(error, OSError):
                raise type(error)(error.errno, message) from None
            raise checks.SpecError(message) from None

    def __call__(self, record):
        finite = {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                  for name, x in record.items()}  # fmt: skip
        line = (json.dumps(finite) + "\n").encode()
        path = self.path.replace("{rank}", str(record["rank"]))
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


_STATE = {"steps": int, "samples": int, "explicit": bool, "calls": int, "random": (list, tuple),
          "warned": dict, "records": (list, tuple), "due": bool}  # fmt: skip


def checked_state(state):
    """The state of `random` in what `Monitor.state_dict()` gave. SpecError or TypeError for what it
    did not."""
    hint = "pass what Monitor.state_dict() gave"
    if not isinstance(state, dict):
        raise TypeError(f"state is {checks.a_kind(state)}; {hint}")
    missing = [name for name in _STATE if name not in state]
    if missing:
        raise checks.SpecError(f"state has no {', '.join(map(repr, missing))}: {hint}")
    for name, kind in _STATE.items():
        if not isinstance(state[name], kind):
            raise checks.SpecTypeError(f"state[{name!r}] is {checks.a_kind(state[name])}: {hint}")
    for name in ("steps", "samples", "calls"):
        if isinstance(state[name], bool) or state[name] < 0:
            raise checks.SpecError(f"state[{name!r}] is {state[name]}: {hint}")
    named = {*SCALARS, "step", "call", "head", "heads", "sequence", "calls", "warnings"}
    for record in state["records"]:
        if not isinstance(record, dict) or not named <= record.keys():
            raise checks.SpecError(f"state['records'] has {record!r:.60}, which is no record: "
                                   f"{hint}")  # fmt: skip
    try:
        version, numbers, gauss = state["random"]
        drawn = version, tuple(numbers), gauss
        random.Random().setstate(drawn)
    except (TypeError, ValueError, OverflowError) as error:
        raise checks.SpecError(f"state['random'] is of no generator ({error}): {hint}") from None
    return drawn


class MonitorTable(list):
    """Records, as dicts, which print as a table; `to_pandas()` gives a data frame."""

    def to_pandas(self):
        """A pandas.DataFrame with a row per record, and ImportError without pandas."""
        return need("pandas", "to_pandas()").DataFrame(list(self))

    def __str__(self):
        columns = ["step", "call", "seq.", "heads", "O", "dQ", "dK", "dV", "dS", "max |S|",
                   "range", "zero", "satur.", "warnings"]  # fmt: skip
        lines = [columns, *map(self._line, self)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(f"{x:>{w}}" for x, w in zip(line, widths)).rstrip()
                         for line in lines)  # fmt: skip

    @staticmethod
    def _line(r):
        last = r["head"] + r["heads"] - 1
        return [
            str(r["step"]), f"{r['call']}/{r['calls']}", str(r["sequence"]),
            str(r["head"]) if last == r["head"] else f"{r['head']}-{last}",
            *("exact 0" if r[name] is None else f"{r[name]:.4f}"
              for name in ("O", "dQ", "dK", "dV", "dS")),
            *(f"{r[name]:.1f}" for name in ("max_logit", "logit_range")),
            *(f"{r[name]:.2%}" for name in ("zero_scales", "saturated_scales")),
            " ".join(r["warnings"]),
        ]  # fmt: skip
