"""Random cases over a few compiled specs, the GPU kernels against FP64: none may be wrong.

    python tests/drawn/cases.py            # 3,000 cases over 128 specs
    python tests/drawn/cases.py --lists    # of attention to lists of blocks
    python tests/drawn/cases.py --intervals   # with intervals of hidden queries per key

`specs.py` and `draw.py` say what is drawn, `judge.py` what counts as wrong, and `oracle.py`, which
shares no code with the package, what is right. All memory that PyTorch allocates is filled with NaN
first, and so are gaps of padded inputs. Tokens that do not count hold NaN, infinities or numbers.
So an element that is not written, or is read from outside, shows.

Kernels that are refused, for example because they spill, are listed separately. The record then
fails.

`sagebwd verify` also draws cases, and compares them in C++ with the CPU reference. It is for
machines without PyTorch. This script goes through PyTorch's operators and strides, and computes
FP64 and the emulation on the GPU. That is fast enough to draw thousands of cases, to look at every
row, and to vary magnitudes, scales and layouts more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import judge as judging
import oracle
from doors import Emulated, Kernels, attend, with_emulated_gradients
from draw import Case, draw_case
from drawn_inputs import Given, inputs_of
from frame import Record, drawn_cases_parser, parse, progress, torch, warm_up
from rough import all_grids
from specs import CHOICES, draw_specs, has_fp16_sums, warm_spec
from torch import Tensor

import sagebwd
from sagebwd.benchmark.environment import brief, print_failure
from sagebwd.core import forms

#: Raised for operations that the package does not build, or whose kernels spill.
REFUSALS = (sagebwd.SpecError, sagebwd.CompileError, NotImplementedError)
#: The most wrong cases that are listed.
MOST_WRONG = 100


def doors_of(device: str):
    """Without a GPU the emulation stands in for the kernels, to try the script itself."""
    return Kernels if torch.device(device).type == "cuda" else Emulated


def expected_of(case: Case, given: Given) -> tuple[dict[str, Tensor], oracle.Truth]:
    """The emulation's results and the truth: of each sequence by itself, among what tokens have
    that do not count."""
    q, k, v, sink = given.q, given.k, given.v, given.sink
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    if sink is not None:
        lse.copy_(sink[:, None].expand_as(lse))
    whole = {"O": q.new_zeros(*q.shape[:3], v.shape[3]), "lse": lse, "dQ": q.new_zeros(q.shape),
             "dK": k.new_zeros(k.shape), "dV": v.new_zeros(v.shape)}  # fmt: skip
    if sink is not None:
        whole["dSink"] = torch.zeros_like(sink)
    truths = []
    for i, spans in enumerate(given.spans if given.packing else []):
        one = given.alone(i)
        if not one.q.shape[2]:
            continue
        truths.append((truth_of(case, one), *spans))
        for name, x in attend(Emulated, case, one).items():
            if name == "dSink":
                whole[name] += x
            else:
                batch, begin, end = spans[name in ("dK", "dV")]
                whole[name][batch, :, begin:end] = x[0]
    if given.packing:
        return whole, oracle.placed(truths, {"q": q, "k": k, "v": v}, sink)
    return attend(Emulated, case, given), truth_of(case, given)


def truth_of(case: Case, given: Given) -> oracle.Truth:
    """The reference for sequences of one length."""
    q, k = given.q, given.k
    seen = oracle.visible(q.shape[2], k.shape[2], case.spec["causal"], *case.window, q.device)
    if given.mask is not None:
        sizes = case.spec["sparse_q"], case.spec["sparse_kv"]
        seen = seen & oracle.listed(given.mask, sizes, q.shape[2], k.shape[2])
    if case.intervals:
        shown = oracle.shown(given.lists["startend_row_indices"], case.spec["causal"], q.shape[2])
        if shown.shape[1] > 1:
            shown = shown.repeat_interleave(case.group, 1)
        seen = seen & shown
    scale = q.shape[3] ** -0.5 if case.softmax_scale is None else case.softmax_scale
    mean = given.k_mean
    if mean is None and case.spec["smooth_k"] and k.shape[2]:
        mean = k.double().mean(2)
    means = None
    if case.spec["smooth_q"]:
        tokens = 256 if case.spec["granularity"] == "row" else 128
        means = [part.mean(2, keepdim=True).expand_as(part) for part in q.double().split(tokens, 2)]
        means = torch.cat(means, 2)
    grids = all_grids(by_row=case.spec["granularity"] == "row",
                      scores=case.spec["precision"] != "qk16", first=case.spec["sink_keys"],
                      ends=tuple(min(end, k.shape[2]) for end in case.ends_of_parts),
                      half=case.spec["dp_sums"] == "fp16")  # fmt: skip
    return oracle.attention(q, k, given.v, given.dout, given.dlse, seen, scale, given.sink, mean,
                            means, grids)  # fmt: skip


def run_case(case: Case, device: str) -> dict:
    given, layout, subject = inputs_of(case, device), case.layout, doors_of(device)
    other_bits = []
    with forms.kernels_of(case.spec["family"]):
        found = attend(subject, case, given, layout)
        emulated = attend(with_emulated_gradients(subject), case, given, layout)
        if case.again:
            before, found = found, attend(subject, case, given, layout)
            other_bits = [f"{name}: a second call gives other bits" for name, x in before.items()
                          if not torch.equal(x.nan_to_num(), found[name].nan_to_num())]  # fmt: skip
    expected, truth = expected_of(case, given)
    expected |= {name: x for name, x in emulated.items() if name[0] == "d"}
    result = judging.judge(found, expected, truth)
    if case.spec["deterministic"]:
        result["wrong"] += other_bits
    return result


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


def counts(results: list[dict]) -> dict[str, int]:
    """How many cases there are of each outcome."""
    found = Counter(result["outcome"] for result in results)
    return {outcome: found[outcome] for outcome in ("right", "wrong", "refused")}


def outcome_of(case: Case, device: str, run: Callable | None = None) -> dict:
    """`run`, or run_case, where a case that raises is a wrong case, or a refused one."""
    try:
        result = (run or run_case)(case, device)
    except Exception as error:
        print_failure(f"case {case.index}", error)
        outcome = "refused" if isinstance(error, REFUSALS) else "wrong"
        return {"outcome": outcome, "wrong": [brief(error)], "figures": {}, "large": []}
    return {"outcome": "wrong" if result["wrong"] else "right"} | result


def outcomes(cases: Iterable[Case], refused: list[dict], device: str, jobs: int) -> Iterator[dict]:
    """The outcome of each case, in several processes, because the host needs most of the time."""
    one = functools.partial(_outcome_unless_refused, refused, device)
    if jobs == 1:
        yield from map(one, cases)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _poison_for_good) as pool:
        try:
            yield from pool.map(one, cases, chunksize=4)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcome_unless_refused(refused: list[dict], device: str, case: Case) -> dict:
    if case.spec in refused:
        return {"outcome": "refused", "wrong": [], "figures": {}, "large": []}
    return outcome_of(case, device)


def _poison_for_good() -> None:
    """A process of its own begins with this."""
    torch.set_num_threads(1)
    poisoned_allocations().__enter__()


def warm_up_all(specs: list[dict], device: str, record: Record) -> list[dict]:
    """The specs whose kernels were refused."""
    refused = []
    for family in CHOICES["family"]:
        mine = [spec for spec in specs if spec["family"] == family]
        with forms.kernels_of(family):
            failed = warm_up([warm_spec(spec) for spec in mine], device, record)
        refused += [mine[i] for i in failed]
    return refused


def prove(options) -> int:
    specs = draw_specs(options.specs, random.Random(options.seed), has_fp16_sums(options.device),
                       options.kind)  # fmt: skip
    record = Record(
        options.out, cases=options.cases, seed=options.seed, scores=options.scores, specs=specs,
        subject=doors_of(options.device).__name__,
        margins={"whole": judging.WHOLE, "row": judging.ROW, "lse": judging.LSE,
                 "to_emulation": judging.TO_EMULATION, "explained": judging.EXPLAINED,
                 "explained_lse": judging.EXPLAINED_LSE, "explained_row": judging.EXPLAINED_ROW,
                 "large": judging.LARGE})
    refused = warm_up_all(specs, options.device, record)
    indices = options.only or range(options.cases)
    cases = [draw_case(i, specs, options.seed, options.scores) for i in indices]
    results: list[dict] = []
    jobs = options.jobs or (4 if doors_of(options.device) is Kernels else 1)
    for case, result in zip(cases, outcomes(cases, refused, options.device, jobs)):
        results.append(result)
        if result["wrong"]:
            print(f"\ncase {case.index}: {'; '.join(result['wrong'])}", file=sys.stderr)
            key = "refused_cases" if result["outcome"] == "refused" else "wrong_cases"
            record.add(key, asdict(case) | result)
        if result["large"]:
            record.add("large_errors", told_of(case) | {"of": result["large"]})
        if options.only:
            print(case, result, sep="\n")
        wrong = counts(results)["wrong"]
        progress(len(results), len(cases), f"{wrong} wrong of")
        if wrong >= MOST_WRONG:
            print(f"\n{wrong} wrong cases: stopping", file=sys.stderr)
            break
    record.set(ran=len(results), **counts(results), large=sum(bool(r["large"]) for r in results),
               distribution=summary(results))  # fmt: skip
    complete = len(results) == len(cases) > 0
    return record.finish(complete and counts(results)["right"] == len(results))


def told_of(case: Case) -> dict:
    """A large error may come from any of these."""
    told = ("index", "values", "key_offset", "softmax_scale", "k_mean", "door", "head_dim", "seq_q",
            "seq_kv", "spec")  # fmt: skip
    return {name: getattr(case, name) for name in told}


def main(arguments: list[str] | None = None) -> int:
    words = drawn_cases_parser(__doc__, "cases.json", cases=3000, specs=128, log2_scores=24)
    masks = words.add_mutually_exclusive_group()
    masks.add_argument("--lists", action="store_const", dest="kind", const="lists", default="",
                       help="attention to lists of blocks (draw_lists.py), of which the record is "
                       "cases_of_lists.json")
    masks.add_argument("--intervals", action="store_const", dest="kind", const="intervals",
                       help="keys that intervals of queries do not see (draw_intervals.py), of "
                       "which the record is cases_of_intervals.json")
    words.add_argument("--jobs", type=int, help="processes that run them (4 with a GPU, else 1)")
    options = parse(words, arguments)
    if options.kind and options.out == words.get_default("out"):
        options.out = options.out.with_name(f"cases_of_{options.kind}.json")
    with poisoned_allocations():
        return prove(options)


if __name__ == "__main__":
    sys.exit(main())
