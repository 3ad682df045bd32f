"""The time of attention to lists of blocks, and of SLA2, over the density of the lists.

    python bench/sparse.py                 # all shapes and lists, at most three minutes on an H200
    python bench/sparse.py --quick         # 32768 tokens, D 128, random lists of two densities
    python bench/sparse.py --shape 1x16x32768x128 --density 0.05 --lists popular

`sagebwd 128x64` is block_sparse_attention with such blocks, whose lists are packed before; `all in`
is SLA2's module, with a learned router, both branches and alpha. Beside them run PyTorch's dense
attentions, ours, and with the same lists flex_attention and, where it is installed,
FlashAttention-4. Backwards contain all quantisation.

A row has two passes in ms of a GPU whose host is ahead of it, and the ms of the host; effective
TFLOPS (4 B H N^2 D operations for the forward, 3.5 times as many for both passes, whatever the
density) and executed ones, those times the share of the scores that is listed. Errors are
against FP64 over the last heads. Candidates take turns. One that fails gets a row with its error.
`--resume` goes on with a run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from harness import Record, parse, parser, progress, warm_up
from needs_torch import torch
from sparse_cases import (
    DENSITIES,
    LISTS,
    SHAPES,
    TABLE,
    Cell,
    Shape,
    cells_of,
    demands,
    inputs_of,
    mask_of,
    overtakes,
)
from sparse_subjects import PRECISIONS, Lists, Subject, is_peer, makers_of, sparse, specs_of

import sagebwd
from sagebwd.benchmark.environment import brief, print_failure
from sagebwd.benchmark.timing import Timing, clock_of, in_turn, peak_mib
from sagebwd.benchmark.truth import relative_l2
from sagebwd.core import options as spellings
from sagebwd.lists.blocks import check_block_size, kept_of

PASSES = {"forward": 1.0, "forward+backward": 3.5}
TENSORS = ("O", "dQ", "dK", "dV")
#: The largest relative L2 of an output. With more a kernel is wrong. Smooth queries and keys have
#: large scores, whose errors are larger.
LARGEST_ERROR = {"smooth": 0.1, "random": 0.03, "popular": 0.03, "all": 0.03}
FEWEST_ROUNDS = 3


# ---- one cell ------------------------------------------------------------------------------------


class Guarded:
    """A call that is not made again after it has failed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.error = call, None

    def __call__(self) -> None:
        if self.error is None:
            try:
                self.call()
            except Exception as error:
                self.error = error


def timed(calls: dict[str, Guarded], clock: Callable, rounds: int, seconds: float) -> dict:
    """The Timing of each call, in turns: as many rounds as fit, at most `rounds`. The first is
    thrown away."""
    first = in_turn(calls, clock, 1, 0)
    of_round = sum(times[0] for times in first.values()) / 1e3
    fit = int(seconds / of_round) if of_round > 0 else rounds
    fewer = max(min(rounds, FEWEST_ROUNDS), min(rounds, fit))
    return {name: Timing.of(times) for name, times in in_turn(calls, clock, fewer, 0).items()}


def tried(subject: Subject, inputs, exact: dict, options) -> tuple[dict, dict]:
    """Runs a subject once. Gives what that tells, and the calls."""
    *tensors, dout = inputs
    calls = subject.passes(*tensors, dout)
    results = calls["forward"](), *calls["forward+backward"]()[1:]
    heads = min(options.exact_heads, dout.shape[1])
    key = subject.same_exact()
    if key not in exact:
        exact[key] = subject.exact(inputs, heads)
    parts = (x.detach()[-1, -heads:] for x in results)
    row = {"rel_l2": {name: relative_l2(x, exact[key][name])
                      for name, x in zip(TENSORS, parts)}}  # fmt: skip
    del results, parts
    if tensors[0].is_cuda:
        row["peak_mib"] = peak_mib(calls["forward+backward"])
        of_v = tensors[2].numel() * tensors[2].element_size() / 2**20
        row["peak_of_v"] = round(row["peak_mib"] / of_v, 3)
    return row, {name: Guarded(call) for name, call in calls.items()}


def measure(options, cell: Cell, clock: Callable) -> list[dict]:
    """The rows of a cell."""
    inputs = inputs_of(cell, options.dtype, options.device, options.seed)
    q, k = inputs[:2]
    lists, packing = [], {}
    for sizes in options.block_size if cell.with_lists() else ():
        mask = mask_of(cell, sizes, q, k, options.seed)
        lists.append(Lists.of(mask, sizes, cell.shape.tokens))
        if cell.is_timed:
            pack = {"": Guarded(lambda m=mask, s=sizes: sagebwd.pack_blocks(m, block_size=s))}
            packing[sizes] = timed(pack, clock, options.rounds, 1)[""].median_ms * 1e3
    with_flex = options.flex == "all" or (options.flex == "one" and cell.shape == options.shape[0])
    makers = makers_of(cell, lists, inputs, options.precision, options.seed, with_flex)
    rows, calls, exact = {}, {}, {}
    for name, make in makers.items():
        row = rows[name] = {"attention": name, "kind": "", "peer": is_peer(name),
                            "block_size": None, "precision": None, **cell.json()}  # fmt: skip
        try:
            subject = make()
            row |= {"attention": subject.label, "kind": subject.kind,
                    "precision": subject.precision, "share": 1.0}  # fmt: skip
            if subject.lists is not None:
                row |= {"block_size": subject.lists.name(), "share": subject.lists.share}
            found, calls[name] = tried(subject, inputs, exact, options)
            # NaN must not pass, hence the form of the comparison.
            found["correct"] = all(e <= LARGEST_ERROR[cell.lists]
                                   for e in found["rel_l2"].values())  # fmt: skip
            row |= found
            if subject.kind == "sparse" and subject.lists.sizes in packing:
                row["packing_us"] = round(packing[subject.lists.sizes], 2)
        except Exception as error:  # it is recorded, and the others are still measured
            print_failure(f"{cell.key()}, {name}", error)
            row |= {"error": brief(error), "correct": False}
        subject = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    exact.clear()
    if cell.is_timed and calls:
        add_times(options, cell, rows, calls, clock)
    return list(rows.values())


def measured(options, cell: Cell, clock: Callable) -> list[dict]:
    """The rows of a cell, or one with the reason why there are none."""
    try:
        return measure(options, cell, clock)
    except Exception as error:
        print_failure(cell.key(), error)
        return [{"attention": "none", "kind": "", "peer": False, "block_size": None,
                 "precision": None, **cell.json(), "error": brief(error),
                 "correct": False}]  # fmt: skip


def add_times(options, cell: Cell, rows: dict, calls: dict, clock: Callable) -> None:
    operations = 4 * cell.shape.scores() * cell.shape.head_dim
    for name, factor in PASSES.items():
        timings = timed({label: of[name] for label, of in calls.items()}, clock, options.rounds,
                        options.seconds)  # fmt: skip
        for label, timing in timings.items():
            row, failed = rows[label], calls[label][name].error
            if failed is not None:
                row |= {"error": brief(failed), "correct": False}
                continue
            effective = factor * operations / timing.median_ms / 1e9
            host = getattr(clock, "host_ms", {}).get(calls[label][name])
            row[name] = timing.json() | ({} if host is None else {"host_ms": round(host, 3)}) | {
                "tflops": round(effective, 2),
                "executed_tflops": round(effective * row["share"], 2),
            }


# ---- kernels of one call -------------------------------------------------------------------------


def kernel_times(options, density: float, sizes: tuple[int, int]) -> dict:
    """The microseconds of each kernel of packing, forward and backward with random lists of the
    first shape, by PyTorch's profiler."""
    row = {"density": density, "block_size": "{}x{}".format(*sizes)}
    try:
        from torch.profiler import ProfilerActivity, profile

        cell = Cell(options.shape[0], "random", density)
        *tensors, dout = inputs_of(cell, options.dtype, options.device, options.seed)
        mask = mask_of(cell, sizes, *tensors[:2], options.seed)
        subject = sparse(Lists.of(mask, sizes, cell.shape.tokens), PRECISIONS[0], True)
        call = subject.passes(*tensors, dout)["forward+backward"]
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            sagebwd.pack_blocks(mask, block_size=sizes)
            call()
            torch.cuda.synchronize()
        found = {}
        for event in traced.key_averages():
            us = getattr(event, "device_time_total", 0) or getattr(event, "cuda_time_total", 0)
            if us:
                found[event.key[:100]] = round(us, 2)
        of_lists = ("pack_mask", "transpose_bits", "order_lists")
        lists = sum(us for name, us in found.items() if any(kind in name for kind in of_lists))
        return row | {"lists_us": round(lists, 2), "us": found}
    except Exception as error:
        print_failure("profiler", error)
        return row | {"error": brief(error)}


# ---- the command ---------------------------------------------------------------------------------


def line(row: dict) -> str:
    start = (f"{shape_text(row):18}{row['lists']:8}{row['density']:5g} "
             f"{row['attention']:30}")  # fmt: skip
    if "error" in row:
        return f"{start} {row['error']}"
    times = "".join(
        f"{one['median_ms']:9.3f} ms {one['tflops']:6.0f} {one['executed_tflops']:5.0f}"
        for one in (row[name] for name in PASSES if name in row)
    )
    errors = " ".join(f"{e:.4f}" for e in row["rel_l2"].values())
    memory = f" {row['peak_of_v']:5.1f} V" if "peak_of_v" in row else ""
    return start + times + memory + f"  {errors}" + ("" if row["correct"] else "  WRONG")


def shape_text(row: dict) -> str:
    return "x".join(str(row[name]) for name in ("batch", "heads", "tokens", "head_dim"))


def finished_before(path: Path, parameters: dict) -> dict:
    """Gives the content of an interrupted run that has the same parameters, or {}."""
    unfinished = path.with_name(path.name + ".unfinished")
    if not unfinished.exists():
        return {}
    content = json.loads(unfinished.read_text())
    same = json.loads(json.dumps(parameters)) == content["parameters"]
    return content if same else {}


def same_place(one: dict, other: dict) -> bool:
    """Whether two environments have the same sources, GPU and PyTorch."""
    return all(one.get(name) == other.get(name) for name in ("sources_sha256", "gpu", "torch"))


def named(parse: Callable[[str], object]) -> Callable[[str], object]:
    """For argparse, which hides what a ValueError says."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def shape_of(text: str) -> Shape:
    shape = Shape.parse(text)
    spellings.spec_of_text(f"head_dim={shape.head_dim}")  # SpecError if no kernel has it
    return shape


def sizes_of(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text}: pass queries and keys of a block, as in 128x64")
    return check_block_size(tuple(map(int, parts)))


def density_of(text: str) -> float:
    kept_of(float(text), 1)
    return float(text)


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text}: it must be at least 1")
    return int(text)


def seconds_of(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text}: pass a positive number")
    return float(text)


def options_of(arguments: list[str] | None):
    options = parser(__doc__, "sparse.json")
    options.add_argument("--quick", action="store_true",
                         help=f"{TABLE}, random lists, densities 0.1 and 0.03, fewer rounds")
    options.add_argument("--shape", type=named(shape_of), nargs="+", default=list(SHAPES),
                         metavar="BxHxNxD")  # fmt: skip
    options.add_argument("--density", type=named(density_of), nargs="+", default=list(DENSITIES))
    options.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    options.add_argument("--block-size", type=named(sizes_of), nargs="+", metavar="QxK",
                         default=[(128, 128), (128, 64)])  # fmt: skip
    options.add_argument("--precision", nargs="+", choices=spellings.PRECISIONS,
                         default=list(PRECISIONS))  # fmt: skip
    options.add_argument("--flex", choices=["one", "all", "no"], default="one",
                         help="flex_attention, which is compiled for each shape: for the first "
                              "shape (default), for all, or not")  # fmt: skip
    options.add_argument("--no-errors", action="store_true",
                         help="without the errors at 8192 tokens, which the CPU always leaves out")
    options.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    options.add_argument("--rounds", type=named(at_least_one), default=9, help="at most")
    options.add_argument("--seconds", type=named(seconds_of), default=0.7,
                         help="that one pass of one cell is timed, unless 3 rounds take longer")
    options.add_argument("--exact-heads", type=named(at_least_one), default=2,
                         help="compared with FP64")  # fmt: skip
    options.add_argument("--resume", action="store_true",
                         help="keep the cells of an interrupted run of the same sources")
    options.add_argument("--json", action="store_true",
                         help="print the record; lines go to standard error")
    defaults, parsed = vars(options.parse_args([])), parse(options, arguments)
    part = [name for name in ("quick", "shape", "density", "lists", "block_size", "precision",
                              "no_errors") if getattr(parsed, name) != defaults[name]]  # fmt: skip
    if part and parsed.out == defaults["out"]:
        options.error(f"only a record of everything goes to {parsed.out.name}: with "
                      f"--{part[0].replace('_', '-')} name another file with --out")
    if parsed.quick:
        parsed.shape, parsed.lists = parsed.shape[:1], ["random"]
        parsed.density, parsed.rounds = [0.10, 0.03], min(parsed.rounds, 7)
    return parsed


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    cuda = options.device.startswith("cuda")
    cells = cells_of(options.shape, options.density, options.lists, options.quick,
                     cuda and not options.no_errors)  # fmt: skip
    parameters = {name: value for name, value in vars(options).items()
                  if name not in ("out", "resume", "json")}  # fmt: skip
    parameters |= {"shape": list(map(str, options.shape)), "flops_factor": PASSES,
                   "largest_error": LARGEST_ERROR}  # fmt: skip
    before = finished_before(options.out, parameters) if options.resume else {}
    record = Record(options.out, **parameters)
    if before and same_place(before["environment"], record.content["environment"]):
        done = before.get("cells", [])
        record.set(cells=done, rows=[r for r in before.get("rows", []) if r["cell"] in done])
    left = [cell for cell in cells if cell.key() not in record.content.get("cells", [])]
    specs = specs_of(left, options.block_size, options.precision, options.dtype)
    warm_up(specs, options.device, record)
    to = sys.stderr if options.json else sys.stdout
    print(f"{'':64}" + "".join(f"{name}, TFLOPS, executed".rjust(25) for name in PASSES)
          + f"  peak  rel. L2 to FP64: {', '.join(TENSORS)}", file=to)  # fmt: skip
    clock = clock_of(options.device, host_ahead=True)
    for index, cell in enumerate(left, 1):
        for row in measured(options, cell, clock):
            record.add("rows", {"cell": cell.key(), **row})
            print(line(row), file=to, flush=True)
        record.add("cells", cell.key())
        progress(index, len(left), "cells")
    rows = record.content.get("rows", [])
    if cuda:
        record.set(kernels=[kernel_times(options, density, sizes) for density in options.density
                            for sizes in options.block_size])  # fmt: skip
    found = demands(rows) if cuda else []  # which are of GPUs
    record.set(demands=found, overtakes=overtakes(rows))
    for one in found:
        if not one["reached"]:
            print(f"above {one['must']:g}: {one['what']}: {one['measured']:g}", file=to)
    for one in record.content["overtakes"] if cuda else ():
        if one["density"] is None:
            continue
        print(f"{one['shape']} {one['attention']} is as fast as {one['peer']}, {one['pass']}, at "
              f"density {one['density']}", file=to)  # fmt: skip
    passed = (all(row["correct"] for row in rows if not row["peer"])
              and all(one["reached"] for one in found))  # fmt: skip
    if not options.json:
        return record.finish(passed)
    record.close(passed)
    print(json.dumps(record.content, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
