"""Random cases over a few compiled specs, the GPU kernels against FP64: none may be wrong.

    python bench/cases.py                  # 3,000 cases over 120 specs

What is drawn, `draw.py` says. All memory that PyTorch hands out is filled with NaN first, and the
gaps of padded inputs hold NaN, so that an element left unwritten or read from outside shows.

`sagebwd verify` draws cases too, and judges them in C++ by the CPU reference: it is for machines
without PyTorch, and shares no code with what it judges by. This one goes through PyTorch's operator
and its strides, and has FP64 and the emulation on the GPU, which is what lets it draw a thousand
cases, look at every row, and vary magnitudes, scales and layouts more.

A result is wrong if any element is not finite, if its error exceeds that of the emulation of the
same spec on the same inputs by more than the margins below (once over the whole tensor, and once
over each row, so that a single wrong token in a large tensor counts), or if it is far from the
emulation itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict

from draw import CHOICES, Case, draw_case, draw_specs, inputs_of
from harness import Record, parse, parser, progress
from needs_torch import torch
from subjects import emulated, subject_of, warm_up

from sagebwd import forms
from sagebwd.exact import Attended, exact_attention
from sagebwd.experiments.environment import brief, print_failure

#: Kernels and emulation differ by FP32 rounding and by integers that it tips over: noise of the
#: same size as the quantisation's own, and a little of the output's rounding (2^-9 for bf16).
WHOLE = (1.3, 0.004)
ROW = (1.5, 0.05)
LSE = (1.5, 2e-3)
#: Their distance itself; the emulation in FP64 and in FP32 differ by up to .004.
TO_EMULATION = 0.02


def judge(found: Attended, expected: Attended, exact: Attended, scale: Attended) -> dict:
    """Per tensor the errors of kernels and emulation, and what is wrong with the former."""
    wrong, figures = [], {}
    for name in exact.named():
        x, e, reference, s = (a.named()[name].double() for a in (found, expected, exact, scale))
        if not torch.isfinite(x).all():
            wrong.append(f"{name}: {int((~torch.isfinite(x)).sum())} elements not finite")
            continue
        norm = float(s.norm())
        whole = [float((y - reference).norm()) / norm if norm else float((y - reference).norm())
                 for y in (x, e)]
        rows = [float(_worst_row(y - reference, s)) for y in (x, e)]
        figures[name] = {"kernels": whole[0], "emulation": whole[1], "worst_row": rows[0],
                         "worst_row_emulation": rows[1],
                         "kernels_to_emulation": float((x - e).norm()) / norm if norm else 0.0}
        if not whole[0] <= WHOLE[0] * whole[1] + WHOLE[1]:
            wrong.append(f"{name}: error {whole[0]:.4f}, emulation {whole[1]:.4f}")
        if not figures[name]["kernels_to_emulation"] <= TO_EMULATION:
            wrong.append(f"{name}: {figures[name]['kernels_to_emulation']:.4f} off the emulation")
        if not rows[0] <= ROW[0] * rows[1] + ROW[1]:
            wrong.append(f"{name}: a row's error {rows[0]:.4f}, emulation's worst {rows[1]:.4f}")
    seen = exact.lse > -torch.inf
    if not torch.equal(found.lse > -torch.inf, seen) or torch.isnan(found.lse).any():
        wrong.append("lse: not -inf just where no key is visible")
    elif seen.any():
        off = [float((y.lse.double() - exact.lse)[seen].abs().max()) for y in (found, expected)]
        figures["lse"] = {"kernels": off[0], "emulation": off[1]}
        if not off[0] <= LSE[0] * off[1] + LSE[1]:
            wrong.append(f"lse: off by {off[0]:.4f}, emulation by {off[1]:.4f}")
    return {"wrong": wrong, "figures": figures}


def _worst_row(error: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The largest error of a token, relative to its scale plus that of its head's mean token.

    The second term is for tokens that hardly matter, such as the last keys under a causal mask:
    their neighbours' maxima set the quantisation step.
    """
    rows, scales = error.norm(dim=-1), scale.norm(dim=-1)
    typical = scales.square().mean(-1, keepdim=True).sqrt()
    return (rows / (scales + typical).clamp_min(1e-30)).max()


def each_alone(case: Case, compute: Callable[..., Attended], given: dict) -> Attended:
    """What `compute` gives for each sequence, among what unused tokens give: nothing."""
    if case.used is None:
        return compute(**given)
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    found = None
    for i, (m, n) in enumerate(case.used):
        if m == 0 or n == 0:
            continue
        one = {name: None if x is None else x[i : i + 1, :, : n if name in "kv" else m]
               for name, x in given.items()}  # fmt: skip
        of_one = compute(**one)
        kind = of_one.out.dtype
        found = found or Attended(*(
            x.new_full(shape, fill, dtype=t) for x, shape, fill, t in (
                (q, dout.shape, 0.0, kind), (q, q.shape[:3], -torch.inf, of_one.lse.dtype),
                (q, q.shape, 0.0, kind), (k, k.shape, 0.0, kind), (v, v.shape, 0.0, kind))))
        for name, x in vars(of_one).items():
            tokens = n if name in ("dk", "dv") else m
            getattr(found, name)[i, :, :tokens] = x[0]
    nothing = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    return found or Attended(*map(torch.zeros_like, (dout,)), nothing,
                             *map(torch.zeros_like, (q, k, v)))


def found_by_kernels(case: Case, given: dict, device: str, options: dict) -> Attended:
    """The subject's results of all sequences in one call."""
    subject = subject_of(device)
    if case.used is None:
        return subject(**given, **options)
    if torch.device(device).type != "cuda":  # the emulation knows no packed sequences
        return each_alone(case, lambda **one: subject(**one, **options), given)
    used = [torch.tensor(of, dtype=torch.int32, device=device) for of in zip(*case.used)]
    options |= dict(zip(("seqused_q", "seqused_k"), used))
    if case.padded:
        return subject(**given, **options)
    firsts = [torch.arange(case.batch + 1, dtype=torch.int32, device=device) * tokens
              for tokens in (case.seq_q, case.seq_kv)]  # fmt: skip
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), firsts))

    def packed(x):
        return None if x is None else x.transpose(1, 2).flatten(0, 1)

    def unpacked(x):
        return x.unflatten(0, (case.batch, -1)).transpose(1, 2)

    together = {name: packed(x) for name, x in given.items()}
    if given["dlse"] is not None:
        together["dlse"] = together["dlse"].T.contiguous()
    found = subject(**together, **options)
    return Attended(*(unpacked(x.T if name == "lse" else x) for name, x in vars(found).items()))


def run_case(case: Case, device: str) -> dict:
    given = inputs_of(case, device)
    spec = case.options()
    spec |= dict(zip(("window_left", "window_right"), case.window))
    spec["softmax_scale"] = case.softmax_scale
    with forms.kernels_of(case.spec["family"]):
        found = found_by_kernels(case, given, device, dict(spec))
    expected = each_alone(case, lambda **one: emulated(**one, **spec), given)
    mask = {key: spec[key] for key in ("causal", "window_left", "window_right", "softmax_scale")}
    exact, scale = (
        each_alone(case, lambda part=part, **one: exact_attention(**one, **mask, scales=True)[part],
                   given) for part in (0, 1))  # fmt: skip
    return judge(found, expected, exact, scale)


@contextlib.contextmanager
def poisoned_allocations():
    """Makes PyTorch fill fresh memory, workspaces too, with NaN or the largest integer."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    before = deterministic, filled.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled.fill_uninitialized_memory = True
    try:
        if not torch.isnan(torch.empty(8)).all():
            raise RuntimeError("this PyTorch does not fill uninitialised memory: 2.2 or newer does")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filled.fill_uninitialized_memory = before[1]


def warm_spec(spec: dict) -> dict:
    """`spec` as warmup() takes it."""
    spec = {key: value for key, value in spec.items() if key != "family"}
    return spec | ({"window_left": 64} if spec.pop("windowed") else {})


def summary(results: list[dict]) -> dict:
    """Quantiles of every figure over the cases."""
    gathered: dict[str, list[float]] = {}
    for result in results:
        for tensor, figures in result["figures"].items():
            for key, value in figures.items():
                gathered.setdefault(f"{tensor} {key}", []).append(value)
    table = {}
    for key, values in gathered.items():
        values.sort()
        last = len(values) - 1
        table[key] = {f"p{p}": values[round(last * p / 100)] for p in (50, 90, 99, 100)}
    return table


def prove(options) -> int:
    specs = draw_specs(options.specs, random.Random(options.seed))
    record = Record(
        options.out, cases=options.cases, seed=options.seed, specs=specs,
        subject=subject_of(options.device).__name__,
        margins={"whole": WHOLE, "row": ROW, "lse": LSE, "to_emulation": TO_EMULATION})
    for family in CHOICES["family"]:
        with forms.kernels_of(family):
            warm_up([warm_spec(spec) for spec in specs if spec["family"] == family],
                    options.device, record)
    indices = options.only or range(options.cases)
    results, wrong = [], 0
    for done, index in enumerate(indices, 1):
        case = draw_case(index, specs, options.seed)
        try:
            result = run_case(case, options.device)
        except Exception as error:  # a case that raises is a wrong case
            print_failure(f"case {index}", error)
            result = {"wrong": [brief(error)], "figures": {}}
        results.append(result)
        if result["wrong"]:
            wrong += 1
            print(f"\ncase {index}: {'; '.join(result['wrong'])}", file=sys.stderr)
            record.add("wrong_cases", asdict(case) | result)
        if options.only:
            print(case, result, sep="\n")
        progress(done, len(indices), f"{wrong} wrong of")
        if wrong >= 100:
            print("\n100 wrong cases: stopping", file=sys.stderr)
            break
    record.set(ran=len(results), wrong=wrong, distribution=summary(results))
    complete = len(results) == len(indices) and len(indices) > 0
    return record.finish(complete and wrong == 0)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "cases.json")
    options.add_argument("--cases", type=int, default=3000)
    options.add_argument("--specs", type=int, default=120)
    options.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="run these alone")
    options = parse(options, arguments)
    with poisoned_allocations():
        return prove(options)


if __name__ == "__main__":
    sys.exit(main())
