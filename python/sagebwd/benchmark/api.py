"""`sagebwd.bench`: attentions beside each other, at the user's shapes and on the user's GPU."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from sagebwd.benchmark import cases as shapes
from sagebwd.core import options
from sagebwd.core.building import device_number, local_arch

_NO_GPU = ("Benchmarks time kernels: run this on a machine with an NVIDIA GPU, of sm_80 or newer. "
           "'sagebwd doctor' says what is missing")  # fmt: skip

#: Options that a case has.
_OF_A_CASE = ("head_dim", "dtype", "causal", "window_left", "window_right")


@dataclass(frozen=True)
class BenchResult:
    """Holds what `sagebwd.bench` found. `print` shows it as text to be pasted into a report."""

    machine: dict  #: the GPU, its clocks before and after, the versions of all software
    cases: list[tuple[Any, Any]]  #: of each case a pair: the case, and its rows

    @property
    def text(self):
        """The machine, a table for each case, and what the columns mean; at most 100 columns."""
        from sagebwd.benchmark import machine, table

        every = [row for _, rows in self.cases for row in rows]
        tables = [table.table(*one) for one in self.cases]
        return "\n\n".join([machine.block(self.machine), *tables, table.legend(every)])

    @property
    def data(self):
        """All figures as a dict of what JSON has: 'machine', and 'cases' with their 'rows'."""
        return {"machine": self.machine, "cases": [
            {**asdict(case), "rows": [row.json() for row in rows]} for case, rows in self.cases
        ]}  # fmt: skip

    def __str__(self):
        return self.text


@options.takes(
    options.Operation, but=("precision", "deterministic", "packed", "sparse_q", "sparse_kv",
                            "linear", "intervals", "mask", "score", "max_logits")
)
def bench(
    models=None, *, backends=None, precision=None, deterministic=None, batch=None, heads=None,
    heads_kv=None, seq_len=None, seq_kv=None, intervals=None, sinks=False, layout="bhsd",
    rounds=15, seed=0, device=None, plot=None, progress=None, chosen,
):  # fmt: skip
    """Measures other attentions and this one on this GPU, in turns; a BenchResult.

    For each attention: the time of the forward, and of forward and backward; the memory that both
    take beside the inputs; and the errors of O, dQ, dK and dV against FP64. Inputs are random. The
    GPU's L2 cache is emptied before each timed call. An attention that cannot run a case is listed
    with the reason.

    Args:
        models: names of well-known models, whose shapes are measured: one of, or several of
            `sagebwd.benchmark.cases.MODELS`. None: the one shape that the other arguments say. With
            models, of the sizes only batch and seq_len may be given.
        backends: which attentions, one name or several: 'cudnn', 'fa2' and 'efficient' are
            PyTorch's, 'flex' is its flex_attention, which is compiled for each case, 'fa3' and
            'fa4' FlashAttention-3 and 4 where they are installed, 'sagebwd' is this library. None:
            all; 'flex' only with `intervals`.
        precision: which precisions of this library, one name or several. None: all.
        deterministic: True: only attentions that give the same bits in every run (PyTorch's under
            torch.use_deterministic_algorithms). False: only those without that promise. None: both.
        batch, heads, heads_kv, seq_len, seq_kv: sizes. None: 1, 16, as many as heads, 8192, as many
            as seq_len.
        intervals: a mask that is told by intervals of hidden queries per key: 'documents', 'prefix'
            or 'window' (with first tokens that everybody sees). It is measured first, and then the
            same shape with a causal mask. None: no such mask.
        sinks: adds a learned logit per head to the softmax, as gpt-oss has it.
        layout: 'bhsd' or 'bshd', how the tensors lie in memory.
        rounds: how often each is timed, from 1 to 1000. Less often (3 times at least) where that
            would take longer than 20 seconds for one pass.
        seed: of the random inputs.
        device: a GPU's number or torch.device; None for PyTorch's current one.
        plot: a file for a picture of the times (.png, .svg, .pdf), or None. It needs matplotlib.
        progress: called with (what, done, total).
        {options}

    Raises:
        SpecError (a ValueError): names that are not known, sizes and options that no kernel takes.
        TypeError: unknown keywords.
        LibraryError (a RuntimeError): no GPU, or a PyTorch that does not see it.
        ImportError: no PyTorch, or with `plot` no matplotlib. ValueError, OSError: a `plot` that
            cannot be written.
    """
    if backends is None:
        backends = [name for name in _backends() if name != "flex" or intervals is not None]
    backends = shapes.names("backends", backends, _backends())
    precisions = shapes.names("precision", precision, options.PRECISIONS)
    if deterministic is not None:
        options.yes_or_no("deterministic", deterministic)
    kinds = [False, True] if deterministic is None else [deterministic]
    if options.whole_number("rounds", rounds) > 1000:
        raise options.SpecError(f"rounds={rounds}: pass a whole number from 1 to 1000")
    options.whole_number("seed", seed, least=0)
    options.check_callback("progress", progress)
    sizes = dict(batch=batch, heads=heads, heads_kv=heads_kv, seq_len=seq_len, seq_kv=seq_kv)
    cases = shapes.cases_of(models, sizes, sinks, layout, chosen, intervals)
    more = {name: value for name, value in chosen.items() if name not in _OF_A_CASE}
    _check(cases, precisions, kinds, more)
    if plot is not None:
        from sagebwd.benchmark import picture

        plot = picture.check(plot)
    device, arch = gpu(device)
    machine, found = _measured(cases, backends, precisions, kinds, more, device, arch,
                               rounds=rounds, seed=seed, progress=progress or silent)  # fmt: skip
    result = BenchResult(machine, found)
    if plot is not None:
        picture.plot(found, machine["gpu"], plot)
    return result


def silent(what, done, total):
    """No progress is shown."""


def _backends():
    from sagebwd.benchmark.attentions import BACKENDS

    return BACKENDS


def _check(cases, precisions, kinds, more):
    """SpecError where no precision of ours takes a case, which then is no case for this library."""
    for case in cases:
        refusals = []
        for precision in precisions:
            for deterministic in kinds:
                try:
                    options.Spec(**more, **case.of_spec(), head_dim=case.head_dim, dtype=case.dtype,
                                 precision=precision, deterministic=deterministic)  # fmt: skip
                except options.SpecError as error:
                    refusals.append(error)
        if len(refusals) == len(precisions) * len(kinds):
            raise refusals[0]


def gpu(device):
    """A CUDA device of PyTorch's, and the name of its architecture. LibraryError without one."""
    import torch

    number = device_number(device)
    arch = local_arch(number, _NO_GPU)
    if not torch.cuda.is_available():
        raise options._core.LibraryError(
            f"PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'none'}) sees no GPU, the "
            "driver sees one: install a PyTorch for CUDA, https://pytorch.org/get-started"
        )
    return torch.device("cuda", number), arch


def _measured(cases, backends, precisions, kinds, more, device, arch, *, rounds, seed, progress):
    """The machine, and for each case its rows."""
    import torch

    from sagebwd.benchmark import machine

    on_gpu = device.type == "cuda"  # elsewhere only to try this without a GPU
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        uuid = machine.uuid_of(device) if on_gpu else None
        about = machine.described(arch) | {"before": machine.state(uuid)}
        found = []
        for case in cases:
            with measuring_on(device, case):
                rows = _rows(case, backends, precisions, kinds, more, device, arch, rounds, seed,
                             progress)  # fmt: skip
            about["after"] = machine.state(uuid)
            found.append((case, rows))
    return about, found


@contextlib.contextmanager
def measuring_on(device, case):
    """A context in which the device is PyTorch's current one. SpecError if the case does not fit
    into its memory."""
    import torch

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            free = torch.cuda.mem_get_info(device)[0] / 2**30
            raise options.SpecError(
                f"{case}: the inputs do not fit into the {free:.1f} GiB that are free on this "
                "GPU. Pass a smaller batch or seq_len, or fewer heads"
            ) from None
        torch.cuda.empty_cache()


def _rows(case, backends, precisions, kinds, more, device, arch, rounds, seed, progress):
    """The rows of one case."""
    from sagebwd.benchmark import attentions, measuring

    inputs = measuring.inputs_of(case, seed, device)
    contenders = attentions.contenders_of(
        case, backends, precisions, kinds, more, arch, device, inputs[-1])  # fmt: skip
    specs = [one.warmup for one in contenders if one.warmup]
    for done, _ in enumerate(measuring.compiled(specs, device), 1):
        progress("compiling", done, len(specs))
    return measuring.measure(case, contenders, inputs, rounds=rounds, device=device,
                             progress=progress)  # fmt: skip
