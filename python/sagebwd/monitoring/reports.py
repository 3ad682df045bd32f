"""A monitor's samples become records, which loggers get, and warnings."""

import collections
import os
import sys
import threading
import warnings

from sagebwd.monitoring import MonitorWarning, advice

_HERE = os.path.dirname(__file__)


class Reports:
    """Records of samples, and what was warned of. Whoever calls has a lock, except for `log` and
    `warn`, which call what users wrote: it may wait for other threads, or call attention.

    Args:
        limits: the figures' limits, by name.
        writers: functions of a record.
        keep: how many records `records` holds.
    """

    def __init__(self, limits, writers, keep):
        self.limits, self._writers = limits, writers
        self.records = collections.deque(maxlen=keep)
        self.warned = {}  #: what is not warned of again, and the step when it was
        self.seconds = 0.0  #: that samples took
        self.place = None  #: (file, line, module) that warnings name
        self.messages = []  #: of which nobody was warned yet
        self._unlogged = collections.deque()
        self._logging, self._here = threading.Lock(), threading.local()

    def __getstate__(self):
        """Copies and files leave out what this one has still to say and to log: it keeps that."""
        copied = dict(self.__dict__, messages=[], _unlogged=collections.deque())
        del copied["_logging"], copied["_here"]
        return copied

    def __setstate__(self, state):
        self.__dict__ |= state
        self._logging, self._here = threading.Lock(), threading.local()

    @property
    def waiting(self):
        """Whether something has not been said or logged yet."""
        return bool(self.messages or self._unlogged)

    @property
    def logs_here(self):
        """Whether a logger has called what this thread does."""
        return getattr(self._here, "logs", False)

    def say(self, what, message, step):
        """Has it warn of this, once."""
        if what not in self.warned:
            self.warned[what] = step
            self.messages.append(f"sagebwd.Monitor: {message}")

    def add(self, found, step):
        """The record of a sample that the device has computed; `step` is now."""
        from sagebwd.monitoring import sample

        seconds = found.host_seconds
        if found.events:
            seconds = max(seconds, found.events[0].elapsed_time(found.events[1]) / 1e3)
        self.seconds += seconds
        figures, weight, sizes = sample.figures(found.sums.tolist(), found.call["numbers"])
        if found.call["may_be_a_part"] and abs(weight - 1) > 0.1:
            self.say("parts", "parts of the keys with the out and lse of all (attention_backward "
                     "with a shared k_mean, or without smooth_k) cannot be sampled: their errors "
                     "are not measured", step)  # fmt: skip
            return
        names = advice.exceeded(figures, self.limits)
        calls = found.of.calls
        record = found.record | {
            "step": step + 1 if found.number is None else found.number,
            "call": calls - 1 - found.index, "calls": calls, **figures,
            "seconds": seconds, "precision": found.call["precision"], "warnings": names,
        }  # fmt: skip
        new = [name for name in names if name not in self.warned]
        if new:
            self.warned |= dict.fromkeys(new, record["step"])
            told = ", ".join(f"{name} {figures[name]:.3g} (limit {self.limits[name]:.3g})"
                             for name in new)  # fmt: skip
            self.messages.append(
                f"sagebwd.Monitor, step {record['step']}, attention call {record['call']} of "
                f"{calls}, head {record['head']}: {told}. "
                f"{advice.remedy(names, figures, found.call, sizes)}"
            )
        self.records.append(record)
        self._unlogged.append(record)

    def log(self, step, wait):
        """Hands records to the loggers, in order, unless another thread does so just now; `wait`:
        waits until that has ended."""
        if self.logs_here or not self._logging.acquire(blocking=wait):
            return
        self._here.logs = True
        try:
            while self._unlogged:
                record = self._unlogged.popleft()
                for write in self._writers:
                    try:
                        write(record)
                    except Exception as error:  # training goes on
                        self.say("log", "a record could not be logged: "
                                 f"{type(error).__name__}: {error}", step)  # fmt: skip
        finally:
            self._here.logs = False
            self._logging.release()

    def taken(self):
        """The messages, which are then those of the caller."""
        messages, self.messages = self.messages, []
        return messages

    def warn(self, messages):
        """Names the line that started the monitor: calls may be autograd's, which have none. Python
        shall not leave out a message of this one because another monitor has said the same."""
        filename, line, module = self.place or caller()
        for message in messages:
            warnings.warn_explicit(message, MonitorWarning, filename, line, module, registry={})


def caller():
    """(file, line, module) of the code that has called a monitor."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
