"""`sagebwd.Monitor`."""

import contextlib
import dataclasses
import random
import threading
import time

import torch

from sagebwd.core import options, watching
from sagebwd.monitoring import advice, calls, logs, models
from sagebwd.monitoring.reports import Reports, caller

#: Passes of other calls after which a model in whose forward none was seen counts as compiled.
_PATIENCE = 10

_in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)


@dataclasses.dataclass
class _Pass:
    """Backward calls that follow a forward."""

    calls: int = 0


@dataclasses.dataclass
class _Sample:
    """A sample holds what the device computes, or has computed."""

    record: dict
    of: _Pass
    index: int
    call: dict
    sums: torch.Tensor  #: on the CPU
    events: tuple  #: before and after it, on a GPU
    host_seconds: float
    number: int | None  #: of its step, None until `step()` says it

    def ready(self):
        if not self.events or self.number is None:
            return self.number is not None
        # A graph that is being captured must not be asked in between.
        return not torch.cuda.is_current_stream_capturing() and self.events[1].query()


class Monitor:
    """Measures the errors of attention in training: of a head, in a call of every `every` steps.

        with sagebwd.Monitor(model, every=200, to="errors.jsonl") as monitor:
            train(model)
        print(monitor.table())

    After the backward of such a call the exact results of the head are computed in FP32, on the
    same device, and compared with those that the call gave. Nothing that a call computes changes by
    a bit, no random numbers of PyTorch are drawn, and no graph of autograd or of torch.compile
    knows of it. Every door to kernels is watched: those of compiled code, checkpoints, autocast,
    sdpa() and Hugging Face models; so is `sagebwd.emulation.emulated_attention`, but not what
    `sagebwd.distributed` computes on CPUs.

    Args:
        model_or_calls: which calls. None: all of this process. A model, or several in a list: those
            whose form (sizes and options) was seen in the models' forward; give a compiled model
            as torch.compile returned it. A function: is given a dict of a call's sizes and options
            (batch, heads, heads_kv, queries, keys, head_dim, dtype and those of `attention`), and
            returns whether to sample such calls.
        every: steps from one sample to the next; the first step has one. A step is a forward and
            backward, or, once `step()` was called, what lies between two of its calls. Samples
            take the attention calls of a step by turns, and a head at random. Trainings that
            run in several threads of a process are one to it: count steps with `step()`.
        to: where records go, or a list of such: a path (JSON lines are appended; '{rank}' becomes
            the rank in torch.distributed, and what is not finite a string), an object with
            add_scalar (TensorBoard), or a function of a dict of the record's figures and places,
            {'sagebwd/O': 0.014, ...} (wandb.log).
        thresholds: a dict of limits in place of the defaults; None is no limit. Defaults: O 0.04
            and dS 0.1, which Gaussian inputs reach at logits of 90; dQ, dK and dV 0.06;
            logit_range 100; zero_scales 0.01; saturated_scales 0; max_logit none.
        seed: of the choice of heads; ranks draw different ones.
        memory: bytes that a sample may take at about, at least those of one query's scores.
        keep: how many records `records` holds.

    A record has the relative L2 errors 'O', 'dQ', 'dK', 'dV' and 'dS' (that of dS is the
    emulation's, with out and lse of the call, and of the queries that fit in `memory`), None if
    only the exact tensor is all zeros; 'max_logit', the largest |logit|, and 'logit_range', how far
    one lies above the mean of its query, both before a score function; 'zero_scales' and
    'saturated_scales', the shares of quantisation scales that flush values to zero or are not
    finite; 'q_offset' and 'v_offset', which part of the squares of q or v is a mean of all tokens;
    'O_bias', the signed errors of O over magnitudes, both summed; 'step', 'call' of 'calls' in
    order of the forward, 'sequence', 'head', the first query head, 'heads', how many share its key
    head, 'seconds' and 'warnings'. With `sink_logits` and `merge`, O is the call's
    result without them, and gradients are with them. Those of a score's tensors are not measured.

    Past a threshold it warns once per figure (`MonitorWarning`), and names the remedy. So it does
    for what it does not measure: lists of blocks, CUDA graphs, and parts of keys with a shared
    k_mean. A sample that fails, say for lack of memory, is left out with a warning.

    Raises SpecError and TypeError for wrong arguments, and OSError for a path that cannot be
    written.
    """

    def __init__(self, model_or_calls=None, *, every=200, to=None, thresholds=None, seed=0,
                 memory=1 << 28, keep=1000):  # fmt: skip
        self.every = options.whole_number("every", every)
        self.thresholds = advice.limits(thresholds)
        self._memory = options.whole_number("memory", memory)
        keep = options.whole_number("keep", keep)
        self._models, wanted = models.models_or_function(model_or_calls)
        self._wanted = wanted and logs.Kept("model_or_calls", wanted)
        self._chooses = model_or_calls is not None
        self._rank = _rank()
        self._reports = Reports(self.thresholds, logs.writers(to, self._rank), keep)
        #: The latest records, oldest first.
        self.records = self._reports.records
        self._seed = options.whole_number("seed", seed, least=0)
        self._random = random.Random(f"{self._seed} {self._rank}")
        self._lock = threading.RLock()
        self._steps, self._samples, self._explicit = 0, 0, False
        self._pass, self._calls, self._fresh, self._due = _Pass(), 0, True, True
        self._inside = threading.local()
        self._hooks, self._forms_of_models = [], set()
        self._pending = []
        self._started, self._elapsed, self._entered = None, 0.0, 0
        self._forwards = self._backwards = self._others = self._unseen = self._seen_at = 0
        self._tries = 0  # calls that were to be sampled

    # ---- what users call -------------------------------------------------------------------------

    def start(self):
        """Begins to watch; returns the monitor."""
        if self._started is None:
            self._take_rank()
            self._started, self._fresh = time.perf_counter(), True
            self._reports.place = caller()
            for model in self._models:
                self._hooks += models.hooks_of(model, self._enter_model, self._leave_model)
            watching.add(self)
        return self

    def stop(self):
        """Stops, and delivers what was sampled. `start()` goes on."""
        self._stop(said=False)

    def _stop(self, said):
        """`said`: there is an error, beside which nothing needs to be said."""
        if self._started is None:
            return
        watching.remove(self)
        for remove in self._hooks:
            remove()
        self._hooks = []
        self._elapsed += time.perf_counter() - self._started
        self._started = None
        later = self._steps + 1 + (0 if self._due else -self._steps % self.every)
        unmeasured = None if said else advice.why_nothing(
            self._forwards, self._backwards, self._others, self._models, self._forms_of_models,
            self._tries, later,
        )  # fmt: skip
        if unmeasured:
            self._say(*unmeasured)
        self._deliver(wait=True)

    def __enter__(self):
        self._entered += 1
        return self.start()

    def __exit__(self, kind, error, trace):
        self._entered -= 1
        if not self._entered:
            self._stop(said=kind is not None)

    def step(self, step=None):
        """Says that a step has ended, and optionally its number, then the `step` of its records.

        Needed only where a step is more than a forward and a backward: with gradient accumulation.
        Call `step(0)` before the first step, too: until the first call a pass counts as a step.
        Between stop() and start() steps are only counted.
        """
        with self._lock:
            if self._explicit and not self._reports.place:
                self._say("start", "step() was called again, and nothing is watched: write `with "
                          "monitor:` around the training, or call start()")  # fmt: skip
            if not self._explicit:
                self._steps = 0  # until now every pass counted as a step
            self._steps = (self._steps + 1 if step is None
                           else options.whole_number("step", step, least=0))  # fmt: skip
            for sample in self._pending:
                sample.number = self._steps if sample.number is None else sample.number
            self._explicit = True
            self._due = self._due or self._steps % self.every == 0
        self._deliver()

    @property
    def latest(self):
        """The latest record, a dict, or None. Waits for a sample that is being computed."""
        self._deliver(wait=True)
        return dict(self.records[-1]) if self.records else None

    def table(self):
        """The latest record of every call of a step, as a `list` that prints as a table."""
        self._deliver(wait=True)
        latest = {record["call"]: record for record in self.records}
        return logs.MonitorTable(latest[call] for call in sorted(latest))

    @property
    def overhead(self):
        """The share of the time since `start()` that samples took, on the device or the CPU,
        whichever was longer. Pauses between stop() and start() do not count."""
        self._deliver(wait=True)
        elapsed = self._elapsed
        if self._started is not None:
            elapsed += time.perf_counter() - self._started
        return self._reports.seconds / elapsed if elapsed else 0.0

    def state_dict(self):
        """Returns, as plain Python values, what `load_state_dict` needs in a run that goes on."""
        self._deliver(wait=True)
        with self._lock:
            version, state, gauss = self._random.getstate()
            return {
                "steps": self._steps, "samples": self._samples, "explicit": self._explicit,
                "calls": self._calls or self._pass.calls, "random": [version, list(state), gauss],
                "warned": dict(self._reports.warned), "records": [dict(r) for r in self.records],
                "due": self._due,
            }  # fmt: skip

    def load_state_dict(self, state):
        """Goes on from `state_dict()`, with the same heads that would have been sampled.

        Raises SpecError and TypeError, and changes nothing, for what is no such state.
        """
        drawn = logs.checked_state(state)
        with self._lock:
            self._random.setstate(drawn)
            self._steps, self._samples = state["steps"], state["samples"]
            self._explicit, self._calls, self._due = state["explicit"], state["calls"], state["due"]
            self._reports.warned = dict(state["warned"])
            self._pass, self._fresh = _Pass(self._calls), True
            self.records.clear()
            self.records.extend(state["records"])

    # ---- copies and files ------------------------------------------------------------------------

    def __getstate__(self):
        """A copy, and what a file gives, has not been started, and has the records until now."""
        self._deliver()
        with self._lock:
            copied = dict(self.__dict__, _hooks=[], _pending=[], _entered=0, _started=None,
                          _fresh=True, _seen_at=0)  # fmt: skip
            if self._started is not None:
                copied["_elapsed"] = self._elapsed + time.perf_counter() - self._started
        del copied["_lock"], copied["_inside"]
        return copied

    def __setstate__(self, state):
        self.__dict__ |= state
        self._lock, self._inside = threading.RLock(), threading.local()

    # ---- what calls tell -------------------------------------------------------------------------

    def forward_ran(self, form):
        if _in_backward() >= 0 or self._reports.logs_here:
            return  # a checkpoint computes it again, or a logger calls attention
        with self._lock:
            self._forwards += 1
            self._fresh = True
            if self._models and getattr(self._inside, "depth", 0):
                self._forms_of_models.add(calls.call_of(form).key)
        if self._pending or self._reports.waiting:
            self._deliver()

    def backward_ran(self, form, tensors):
        if self._reports.logs_here:
            return
        call = calls.call_of(form)
        with self._lock:
            self._backwards += 1
            if self._chooses and not self._is_wanted(call):
                self._others += 1
                return
            if self._fresh:
                self._begin()
            index = self._pass.calls
            self._pass.calls += 1
            if not self._due or index < self._samples % max(1, self._calls):
                return
            self._tries += 1
            if reason := self._not_sampled(call):
                self._say(reason, f"{reason} cannot be sampled: their errors are not measured")
                return
            self._due = False
            of = self._pass
        try:
            self._sample(call, tensors, of, index)
        except Exception as error:  # training goes on
            self._say("failure", f"a sample failed and is left out: {error}")

    def _begin(self):
        """A pass has begun, and with it a step if nobody says where these begin."""
        self._fresh = False
        self._calls = self._pass.calls or self._calls
        self._pass = _Pass()
        if not self._explicit:
            self._steps += 1
            self._due = self._due or (self._steps - 1) % self.every == 0

    def _is_wanted(self, call):
        if self._wanted is not None:
            try:
                return bool(self._wanted()(call.described()))
            except Exception as error:  # training goes on
                self._say("function", "the function that chooses calls failed, and calls are left "
                          f"out for that: {type(error).__name__}: {error}")  # fmt: skip
                return False
        if not self._forms_of_models:
            if self._seen_at != self._forwards:
                self._seen_at, self._unseen = self._forwards, self._unseen + 1
            if self._unseen < _PATIENCE:
                return False
            self._say("models", "no attention was seen in the forward of the model, which happens "
                      "if it was compiled later: pass what torch.compile returned. Until then all "
                      "calls are sampled")  # fmt: skip
            return True
        return call.key in self._forms_of_models

    def _not_sampled(self, call):
        if call.unsupported:
            return call.unsupported
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "calls in CUDA graphs"
        return ""

    def _sample(self, call, tensors, of, index):
        from sagebwd.monitoring import sample

        begin = time.perf_counter()
        device, events = tensors[1].device, ()
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if device.type == "cuda":
                events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                events[0].record()
            head = sample.chosen_head(call, tensors, self._random)
            if head is None:
                self._due = True  # of no tokens: the next call
                return
            sums = sample.measured(head, call.rules, self._memory)
            if events:
                host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu",
                                   pin_memory=True)  # fmt: skip
                sums = host.copy_(sums, non_blocking=True)
                events[1].record()
        record = {"step": None, **head.where, "rank": self._rank}
        described = {**call.described(), "int8": call.rules.plan,
                     "numbers": {"dQ": head.dq.numel(), "dK": head.dk.numel(),
                                 "dV": head.dv.numel()},
                     "takes_smooth_q": call.takes_smooth_q(tensors[-2]),
                     "may_be_a_part": tensors[6] is None and (tensors[-1] is not None
                                                              or not call.rules.smooth_k)}
        self._samples += 1
        self._pending.append(_Sample(record, of, index, described, sums, events,
                                     time.perf_counter() - begin,
                                     None if self._explicit else self._steps))

    # ---- what becomes of samples -----------------------------------------------------------------

    def _deliver(self, wait=False):
        with self._lock:
            while self._pending and (wait or self._pending[0].ready()):
                found = self._pending.pop(0)
                if found.events:
                    found.events[1].synchronize()
                self._reports.add(found, self._steps)
        self._reports.log(self._steps, wait)
        with self._lock:
            messages = self._reports.taken()
        self._reports.warn(messages)

    def _say(self, what, message):
        self._reports.say(what, message, self._steps)

    # ---- models ----------------------------------------------------------------------------------

    def _take_rank(self):
        """A monitor may be made before torch.distributed begins, and ranks draw other heads."""
        before, self._rank = self._rank, _rank()
        if self._rank != before and not self._samples:
            self._random = random.Random(f"{self._seed} {self._rank}")

    def _enter_model(self, *of_call):
        if not torch.compiler.is_compiling():
            self._inside.depth = getattr(self._inside, "depth", 0) + 1

    def _leave_model(self, *of_call):
        if not torch.compiler.is_compiling():
            self._inside.depth = getattr(self._inside, "depth", 1) - 1


def _rank():
    distributed = torch.distributed
    return distributed.get_rank() if (distributed.is_available()
                                      and distributed.is_initialized()) else 0  # fmt: skip
