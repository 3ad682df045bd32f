"""`sagebwd.tune_lengths`: tiles for some lengths, and from which length on PyTorch is slower."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagebwd.benchmark import api, cases
from sagebwd.core import crossover, fastest, options, tuning
from sagebwd.core.tuning import TunedKernel

#: Where `lengths` is not given.
LENGTHS = (512, 1024, 2048, 4096, 8192)
TOKENS = 32768  #: in all, if no batch is given, as in the tables of `sagebwd.crossover_tokens`

#: Options of an operation that crossovers do not distinguish.
_NOT_HERE = ("window_left", "window_right", "granularity", "group_q", "group_kv", "sink_keys",
    "smooth_k", "smooth_q", "smooth_v", "rotate", "deterministic", "dq_sums",
    "gradient_kernels", "packed", "sparse_q", "sparse_kv", "linear", "intervals", "mask",
    "score", "max_logits")  # fmt: skip


@dataclass(frozen=True)
class LengthFigures:
    """Times of calls of one length, sagebwd's and those of PyTorch's fastest attention."""

    seq_len: int  #: tokens of each sequence
    batch: int  #: sequences of a call
    forward_ms: float  #: sagebwd's forward
    both_ms: float  #: sagebwd's forward and backward
    pytorch_forward: str  #: PyTorch's fastest for a forward: 'cudnn', 'fa2' or 'efficient'
    pytorch_forward_ms: float
    pytorch_both: str  #: PyTorch's fastest for both passes
    pytorch_both_ms: float

    @property
    def forward_speed(self) -> float:
        """Of sagebwd's forward, relative to PyTorch's fastest."""
        return self.pytorch_forward_ms / self.forward_ms

    @property
    def both_speed(self) -> float:
        """Of forward and backward, relative to PyTorch's fastest."""
        return self.pytorch_both_ms / self.both_ms


@dataclass(frozen=True)
class TunedLengths:
    """Holds what `sagebwd.tune_lengths` found. `print` shows it as a table."""

    gpu: str
    words: str  #: the precision, and its sums of dP where they are not FP32
    head_dim: int
    causal: bool
    lengths: list[LengthFigures]
    kernels: list[tuple[int, TunedKernel]]  #: each with the length for which it was tuned
    forward: float  #: crossover of a forward in tokens; math.inf: PyTorch's is always faster
    training: float  #: that of forward and backward
    kept: bool  #: whether `crossover_tokens` knows it in later processes

    @property
    def data(self) -> dict:
        """All figures as a dict of what JSON has; a crossover of math.inf is None."""
        rows = [vars(one) | {"forward_speed": round(one.forward_speed, 4),
                             "both_speed": round(one.both_speed, 4)}
                for one in self.lengths]  # fmt: skip
        tokens = {"forward": self.forward, "training": self.training}
        return {
            "gpu": self.gpu, "precision": self.words, "head_dim": self.head_dim,
            "causal": self.causal, "lengths": rows,
            "tiles": [{"seq_len": length, "kernel": one.kernel, "tile": one.tile,
                       "speedup": round(one.speedup, 4), "fresh": one.fresh, "kept": one.kept}
                      for length, one in self.kernels],
            "crossover": {name: _finite(number) for name, number in tokens.items()},
            "kept": self.kept,
        }  # fmt: skip

    def __str__(self) -> str:
        mask = "causal" if self.causal else "all keys"
        lines = [f"{self.words}, D{self.head_dim}, {mask}, on {self.gpu}",
                 "Times are ms; speed is relative to PyTorch's fastest attention, which is named.",
                 f"{'':16}{'forward':^34}{'forward + backward':^34}".rstrip(),
                 f"{'tokens':>8}{'batch':>8}" + 2 * f"{'sagebwd':>10}{'PyTorch':>17}{'speed':>7}"]
        for one in self.lengths:
            line = f"{one.seq_len:8}{one.batch:8}"
            for ours, name, theirs, speed in (
                (one.forward_ms, one.pytorch_forward, one.pytorch_forward_ms, one.forward_speed),
                (one.both_ms, one.pytorch_both, one.pytorch_both_ms, one.both_speed),
            ):  # fmt: skip
                line += f"{ours:10.3f}{theirs:8.3f} {name:8}{speed:6.2f}x"
            lines.append(line)
        lines += [f"{what}: {_told(number, self.lengths)}"
                  for what, number in (("a forward", self.forward), ("training", self.training))]
        lines.append("crossover_tokens() and min_tokens='auto' use these crossovers from now on."
                     if self.kept else "The crossovers could not be kept: pass the number as "
                     "min_tokens. 'sagebwd doctor' says what is wrong with the cache.")  # fmt: skip
        return "\n".join(lines)


@options.takes(options.Operation, but=_NOT_HERE, fastest=fastest.of_device)
def tune_lengths(
    lengths=LENGTHS, *, batch=None, heads=16, heads_kv=None, force=False, rounds=15, device=None,
    progress=None, chosen,
):  # fmt: skip
    """Tunes tiles for calls of some lengths on this GPU, and measures from which length on they are
    faster than PyTorch's own attention; a TunedLengths.

    Each length is tuned as by `tune`. Then sagebwd and PyTorch's attentions (cuDNN,
    FlashAttention-2, memory-efficient) take turns on the same random inputs. The crossover is where
    sagebwd's speed, relative to PyTorch's fastest, becomes 1 for good; between two lengths the
    inverse speed is taken to be a straight line in 1 / tokens. It is kept in the cache's directory,
    for this user, kind of GPU and version of sagebwd: `crossover_tokens` and min_tokens='auto' then
    use it instead of the tables of this version.

    Args:
        lengths: numbers of tokens of a sequence, two at least.
        batch: sequences of a call; None: as many as make about 32768 tokens.
        heads, heads_kv: sizes of the calls; heads_kv=None means as many as heads.
        force: tune again even if there is a record.
        rounds: timings of each, from 5 to 1000.
        device: the number of a GPU, a torch.device, or a name such as 'cuda:1'; None means
            PyTorch's current one, or 0.
        progress: called with (what, done, total).
        {options}

    Raises:
        SpecError (a ValueError): sizes and options that no kernel takes.
        LibraryError (a RuntimeError): no GPU, or a PyTorch that does not see it.
        TuneError, CompileError (RuntimeErrors): tuning failed, or no PyTorch's attention ran.
        ImportError: no PyTorch.
    """
    lengths = _lengths_of(lengths)
    every = [_case_of(length, batch, heads, heads_kv, chosen) for length in lengths]
    more = {name: chosen[name] for name in ("precision", "dp_sums")}
    options.Spec(**more, **every[0].of_spec(), head_dim=chosen["head_dim"], dtype=chosen["dtype"])
    options.yes_or_no("force", force)
    if options.whole_number("rounds", rounds, least=5) > 1000:
        raise options.SpecError(f"rounds={rounds}: pass a whole number from 5 to 1000")
    options.check_callback("progress", progress)
    progress = progress or api.silent
    device, arch = api.gpu(device)
    kernels, figures = [], []
    for done, case in enumerate(every):
        progress(f"tuning for {case.seq_len} tokens", 2 * done, 2 * len(every))
        found = tuning.tune(
            seq_len=case.seq_len, batch=case.batch, heads=case.heads, heads_kv=case.heads_kv,
            force=force, rounds=rounds, device=device, **chosen)  # fmt: skip
        kernels += [(case.seq_len, one) for one in found]
        # At once: a longer length may have a record in common with this one.
        progress(f"timing {case.seq_len} tokens", 2 * done + 1, 2 * len(every))
        with api.measuring_on(device, case):
            figures.append(measured(case, more, device, arch, rounds))
    progress("measured", 2 * len(every), 2 * len(every))
    return _result(figures, kernels, chosen, _name_of(device))


def _lengths_of(lengths) -> list[int]:
    try:
        found = sorted({options.whole_number("lengths", one) for one in lengths})
    except TypeError:
        found = []
    if len(found) < 2:
        raise options.SpecError(f"lengths={lengths!r}: pass two numbers of tokens or more, such as "
                                f"{LENGTHS}")  # fmt: skip
    return found


def _case_of(length: int, batch, heads, heads_kv, chosen: dict) -> cases.Case:
    batch = max(1, TOKENS // length) if batch is None else batch
    sizes = dict(batch=batch, heads=heads, heads_kv=heads_kv, seq_len=length, seq_kv=None)
    usual = options.defaults(options.Operation)
    (case,) = cases.cases_of(None, sizes, False, "bhsd", {**usual, **chosen})
    return case


def _name_of(device) -> str:
    return crossover.text_of_name(fastest.gpu_of(device.index)[2])


def measured(case: cases.Case, more: dict, device, arch: str, rounds: int) -> LengthFigures:
    """The figures of one length: sagebwd as it is by default, PyTorch without a promise of the same
    bits. TuneError where either has none."""
    from sagebwd.benchmark import attentions, measuring

    inputs = measuring.inputs_of(case, 0, device)
    precision, rest = more["precision"], {"dp_sums": more["dp_sums"]}
    ours = attentions.contenders_of(case, [attentions.OURS], [precision], [True], rest, arch,
                                    device)  # fmt: skip
    theirs = attentions.contenders_of(case, [*attentions.OF_PYTORCH], [], [False], {}, arch, device)
    own, *peers = measuring.measure(case, ours + theirs, inputs, rounds=rounds, device=device)
    usable = [row for row in peers if row.both and not row.is_wrong]
    for row in [own] if own.refusal or own.is_wrong else peers if not usable else []:
        raise tuning.TuneError(f"{case}: {row.attention} cannot be measured: "
                                f"{row.refusal or 'its results are wrong'}")  # fmt: skip
    forward = min(usable, key=lambda row: row.forward.median_ms)
    both = min(usable, key=lambda row: row.both.median_ms)
    return LengthFigures(
        case.seq_len, case.batch, own.forward.median_ms, own.both.median_ms, forward.attention,
        forward.forward.median_ms, both.attention, both.both.median_ms)  # fmt: skip


def _result(figures: list[LengthFigures], kernels: list, chosen: dict, gpu: str) -> TunedLengths:
    """The result, of which the crossovers are kept."""
    forward = crossover.crossing({one.seq_len: one.forward_speed for one in figures})
    training = crossover.crossing({one.seq_len: one.both_speed for one in figures})
    words = crossover.words_of(chosen["precision"], chosen["dp_sums"])
    causal = chosen["causal"] not in (False, "none")
    kept = crossover.keep(gpu, chosen["head_dim"], causal, words, forward, training,
                          [vars(one) for one in figures])  # fmt: skip
    return TunedLengths(gpu, words, chosen["head_dim"], causal, figures, kernels, forward, training,
                        kept)  # fmt: skip


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def _told(number: float, figures: list[LengthFigures]) -> str:
    if math.isinf(number):
        return f"PyTorch's attention is faster at {figures[-1].seq_len} tokens, the longest here"
    if number == figures[0].seq_len:
        return f"sagebwd is faster from {number} tokens on, the shortest here"
    return f"sagebwd is faster from {number} tokens on"
