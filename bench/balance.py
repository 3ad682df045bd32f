"""Predicts the speed on GPUs that are not at hand, from an H100 or H200 slowed to their balance.

    python bench/balance.py                                   # an RTX 4090, an L40S and an A100
    python bench/balance.py --gpu "RTX 5090" --quick          # 8192 tokens without a mask
    python bench/balance.py --gpu "RTX 4090" --only d128 n8192 --templates DIR --out /tmp/a.json
    python bench/balance.py --gpu L4 --tiles forward="mma 64x128 w4 s1 b2" --out /tmp/a.json
    python bench/balance.py --gpu "RTX 4090" --plans "six-of-seven" "dv16 no-deterministic" ...

On GeForce cards an INT8 product takes a quarter of the time of a 16-bit product, on an H100 half of
it. bench/stretch.py gives the mma.sync kernels the ratio of a named GPU, by further tensor
instructions that change no bit of a result. This script runs them with the tiles that are the
default on that GPU, with as many blocks on an SM as live there, and predicts (balance_model.py says
how). Results must be those of the plain kernels bit for bit, or the kernels are not timed. dQ that
is added in any order is compared by its error.

A row has the milliseconds of each kernel here; and for the card, of forward, backward and both:
times of the attention kernels and of those around them, TFLOPS (as FlashAttention-2 counts them),
the share of the tensor cores' bound, and the speed relative to FlashAttention-2 at 93 % of its
bound. Figures that were published for an RTX 4090 stand beside. The static model of
bench/instructions.py is asked as well, if nvdisasm is found.

Cells are 32768 tokens in all, bf16, heads x D = 2048. --only takes cells and plans whose names have
all its words: d64, d128, n1024, n8192, causal, full (without a mask), six-of-seven, gradients16,
deterministic, any-order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import balance_model
import instructions
from balance_process import Process
from gpus import GPUS, Gpu, named
from harness import Record, parser, progress
from needs_torch import torch
from stretch import TEMPLATES, Balance, StretchError, balance_of, write

from sagebwd.experiments.environment import brief

TOTAL_TOKENS, HEADS_TIMES_DIM = 32768, 2048
#: Words of specs.
PLANS = ("six-of-seven", "six-of-seven gradient_kernels=split", "six-of-seven dp_sums=fp16",
         "six-of-seven dp_sums=fp16 gradient_kernels=split")  # fmt: skip
#: Those whose mma.sync is slower than an H100's, so that it can stand for them.
CARDS = tuple(gpu for gpu in GPUS if gpu.arch not in ("sm_90a", "sm_100"))
DEFAULT_GPUS = ("RTX 4090", "L40S", "A100")
OWN_ARCH = "sm_90a"
#: How far measured costs of stretched instructions may be from the planned ratio to one another,
#: and how much more than planned all may cost.
RATE_ERROR, MOST_COST = 0.05, 1.25
#: The names of `_core.measure_rates` and the rates of gpus.Gpu that they are of.
MEASURED = {"mma_s8": "int8", "mma_u8": "int8", "mma_bf16": "bits16"}
#: Clocks before and after the measurement may differ by so much.
CLOCK_ERROR = 0.03


# ---- what is measured ----------------------------------------------------------------------------


def cell_of(head_dim: int, tokens: int, causal: bool) -> dict:
    return {"label": f"d{head_dim} n{tokens} {'causal' if causal else 'full'}",
            "head_dim": head_dim, "tokens": tokens, "causal": causal,
            "batch": max(1, TOTAL_TOKENS // tokens), "heads": HEADS_TIMES_DIM // head_dim}


CELLS = [cell_of(d, n, causal) for d in (64, 128) for n in (8192, 1024) for causal in (False, True)]
QUICK = [cell_of(d, 8192, False) for d in (64, 128)]


def words_of(cell: dict, plan: str) -> set[str]:
    """The words by which --only selects."""
    order = "any-order" if "no-deterministic" in plan else "deterministic"
    return {*cell["label"].split(), *plan.split(), order} - {"no-deterministic"}


def selected(cells: list[dict], plans: list[str], only: list[str]) -> tuple[list, list]:
    """The cells and plans that have all words. ValueError if there is none."""
    known = set().union(*(words_of(cell, plan) for cell in cells for plan in plans))
    wanted = {word.lower() for word in only}
    if unknown := sorted(wanted - known):
        raise ValueError(f"--only {' '.join(unknown)}: there are {', '.join(sorted(known))}")
    pairs = [(c["label"], p) for c in cells for p in plans if wanted <= words_of(c, p)]
    if not pairs:
        raise ValueError(f"--only {' '.join(only)}: no cell has all these words")
    return ([c for c in cells if any(c["label"] == label for label, _ in pairs)],
            [p for p in plans if any(p == plan for _, plan in pairs)])


def tiles_of(given: list[str]) -> dict[str, str]:
    """KERNEL=TILE as a dict. ValueError for other words."""
    tiles = {}
    for word in given:
        kernel, equals, tile = word.partition("=")
        if not equals or kernel not in balance_model.PRODUCTS:
            raise ValueError(f"--tiles {word}: expected KERNEL=TILE with a kernel of "
                             f"{', '.join(balance_model.PRODUCTS)}")  # fmt: skip
        tiles[kernel] = tile
    return tiles


# ---- figures -------------------------------------------------------------------------------------


def measured_rates(plain: dict, stretched: dict) -> dict[str, float]:
    """Measured clocks of a stretched instruction over those of a plain one, by name."""
    return {name: round(plain[name]["per_clock"] / stretched[name]["per_clock"], 3)
            for name in MEASURED}  # fmt: skip


def measured_balance(planned: Balance, times: dict[str, float]) -> Balance:
    """The balance that measured multiples have: an instruction that hands sums on to the next one
    costs a little more than its share of the pipe. RuntimeError if multiples are not in the planned
    ratio to one another, or not near them."""
    costs = {name: times[name] / planned.factors[rate] for name, rate in MEASURED.items()}
    low, high = min(costs.values()), max(costs.values())
    if high / low - 1 > RATE_ERROR or low < 1 - RATE_ERROR or high > MOST_COST:
        listed = ", ".join(f"{name} {times[name]:.2f} for {planned.factors[rate]}"
                           for name, rate in MEASURED.items())  # fmt: skip
        raise RuntimeError(f"stretched instructions take {listed} times as long as plain ones: "
                           "this GPU is not balanced")
    return Balance(planned.factors, planned.clocks_a_clock * math.sqrt(low * high),
                   planned.tensor_error + math.sqrt(high / low) - 1)


def blocks_of(kernel: dict, gpu: Gpu) -> int:
    """Blocks of an attention kernel on an SM of a card, by its shared memory and registers."""
    registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
    units = -(-kernel["shared_bytes"] // 128) * 128 + 1024
    return min(65536 // registers, gpu.sm_kib * 1024 // units)


def row_of(gpu: Gpu, here: balance_model.Here, clocks_a_clock: float, cell: dict, plan: str,
           built: dict, result: dict, bounds: list[dict]) -> dict:  # fmt: skip
    """A cell and plan of the record."""
    row = {"gpu": gpu.name, **{k: v for k, v in cell.items() if k != "label"}, "plan": plan}
    if "error" in result:
        return row | {"error": result["error"], "correct": False}
    about = built["about"]
    medians = {name: {kernel: timing["median_ms"] for kernel, timing in kernels.items()}
               for name, kernels in result["passes"].items()}  # fmt: skip
    found = balance_model.predicted(gpu, here, clocks_a_clock, cell, about, medians)
    kernels = {name: {**one, "blocks_of_sm": blocks_of(one, gpu)}
               for name, one in built["kernels"].items()}  # fmt: skip
    fused = "backward" in built["kernels"]
    return row | {
        "correct": True, "fused": fused, "kernels": kernels, "measured": result["passes"],
        "predicted": found, "fa2": balance_model.peer_of(gpu, about["deterministic"]).source,
        "published": balance_model.paper_of(gpu, cell),
        "model": balance_model.compared(found, cell, about, bounds, gpu, fused),
    }  # fmt: skip


def line(row: dict) -> str:
    """A row for people."""
    mask = "causal" if row["causal"] else ""
    head = f"{row['gpu']:13} D{row['head_dim']:<4}N{row['tokens']:<5} {mask:7}{row['plan']:30}"
    if "error" in row:
        return f"{head} {row['error']}"
    cells = "".join(
        f"{one['attention_ms']:8.3f} +{one['around_ms']:6.3f} ms {one['tflops']:5.0f} "
        f"{100 * one['share_of_tensor_bound']:3.0f} % {one['ratio_to_fa2']:5.2f}x"
        for one in row["predicted"].values())  # fmt: skip
    model = row["model"] and "/".join(
        f"{one['instrument_to_model']:.2f}" for one in row["model"].values())
    spills = sum(one["spill_bytes"] for one in row["kernels"].values())
    return (f"{head}{cells}  {model or '-'}" + (" fused" if row["fused"] else "")
            + (f" spills {spills} B" if spills else ""))  # fmt: skip


# ---- the run -------------------------------------------------------------------------------------


def model_of(gpu: Gpu, cells: list[dict], plans: list[str], options) -> tuple[list[dict], str]:
    """The static model's bounds for an architecture's own kernels, and why there are none."""
    if not options.model:
        return [], "not asked for"
    if options.nvdisasm is None or not options.nvdisasm.exists():
        return [], instructions.NO_NVDISASM
    if not options.program.exists():
        return [], f"no {options.program.name}: build it (./run build), or name it with --tool"
    precisions = {w for plan in plans for w in plan.split() if w in balance_model.INT8}
    words = ["--head-dim", ",".join(sorted({str(c["head_dim"]) for c in cells})),
             "--causal", ",".join(sorted({"top-left" if c["causal"] else "none" for c in cells})),
             "--precision", ",".join(sorted(precisions) or ["six-of-seven"])]  # fmt: skip
    try:
        return instructions.bounds_of([
            instructions.row_of(kernel, options.nvdisasm)
            for kernel in instructions.compiled(options.program, gpu.arch, words)]), ""
    except (RuntimeError, KeyError) as error:
        return [], brief(error)


def job_of(gpu: Gpu, cells: list[dict], plans: list[str], options) -> dict:
    """What a process is asked for."""
    return {"arch": gpu.arch, "own_arch": OWN_ARCH, "sm_bytes": gpu.sm_kib * 1024, "cells": cells,
            "plans": plans, "tiles": tiles_of(options.tiles), "seed": options.seed,
            "rounds": options.rounds, "warmup": options.warmup, "asks_rates": True}


@dataclass
class Subject:
    """A card, the processes that stand for it, and the static model's bounds."""

    gpu: Gpu
    balance: Balance
    plain: Process
    slowed: Process
    bounds: list[dict]
    no_model: str = ""

    def shown(self, what: str):
        return lambda done, total: progress(done, total, f"{self.gpu.name}: {what}")


def started(gpu: Gpu, cells: list[dict], plans: list[str], options, stack: ExitStack) -> Subject:
    """A card whose kernels are being compiled. The stack ends the processes."""
    balance = balance_of(gpu)
    print(f"{gpu.name}: {balance.words()}", flush=True)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write(folder, balance.factors, options.templates)
    job = job_of(gpu, cells, plans, options)
    plain, slowed = (stack.enter_context(Process(job, templates))
                     for templates in (options.templates, folder))
    return Subject(gpu, balance, plain, slowed, [])


def measure(one: Subject, cells: list[dict], plans: list[str], record: Record) -> bool:
    """One card, whose kernels are compiled: its rows go to the record. Whether all are right."""
    gpu, balance = one.gpu, one.balance
    found_plain = one.plain.run(None, one.shown("plain kernels"))
    found = one.slowed.run(found_plain.results_by_cell(), one.shown("stretched kernels"))
    here = balance_model.Here(found.here["sms"], found.here["rates"]["mma_s8"]["clock_ghz"],
                              found.here["memory_gbs"])  # fmt: skip
    times = measured_rates(found_plain.here["rates"], found.here["rates"])
    balance = measured_balance(balance, times)
    after = found.end["rates"]["mma_s8"]["clock_ghz"]
    steady = abs(after / here.clock_ghz - 1) <= CLOCK_ERROR
    record.add("gpus", {
        **{key: getattr(gpu, key) for key in ("name", "arch", "sms", "clock_ghz", "memory_gbs",
                                              "int8", "bits16", "bits16_half", "sm_kib")},
        **balance.json(), "no_model": one.no_model,
        "stretched_rates": times,
        "here": {**vars(here), "clock_ghz_after": after, "steady": steady},
    })  # fmt: skip
    if not steady:
        print(f"balance: the clock went from {here.clock_ghz:.2f} to {after:.2f} GHz while "
              f"{gpu.name} was measured: measure again", file=sys.stderr)
    right = True
    for cell in cells:
        for plan in plans:
            row = row_of(gpu, here, balance.clocks_a_clock, cell, plan,
                         found.built[cell["head_dim"], cell["causal"], plan],
                         found.results[cell["label"], plan], one.bounds)  # fmt: skip
            record.add("rows", row)
            print(line(row), flush=True)
            right &= row["correct"]
    return right and steady


def measure_all(cards: list[Gpu], cells: list[dict], plans: list[str], options,
                record: Record) -> bool:  # fmt: skip
    """All cards. They are compiled first, so that nothing else runs while one is measured."""
    right, models = True, {}
    with ExitStack() as stack:
        subjects = [started(card, cells, plans, options, stack) for card in cards]
        for one in subjects:
            if one.gpu.arch not in models:
                models[one.gpu.arch] = model_of(one.gpu, cells, plans, options)
            one.bounds, one.no_model = models[one.gpu.arch]
        for one in list(subjects):
            try:
                one.plain.compile(one.shown("compiling plain kernels"))
                one.slowed.compile(one.shown("compiling stretched kernels"))
            except RuntimeError as error:
                subjects.remove(one)
                failed(one.gpu, error, record)
        right = len(subjects) == len(cards)
        print(f"{'':64}" + "".join(f"{name + ': ms + around, TFLOPS, of bound, to fa2':>42}"
                                   for name in balance_model.OPERATIONS)
              + "  instrument/model")  # fmt: skip
        for one in subjects:
            try:
                right &= measure(one, cells, plans, record)
            except RuntimeError as error:
                right = failed(one.gpu, error, record)
    return right


def failed(gpu: Gpu, error: Exception, record: Record) -> bool:
    """Says and records why a card has no rows; gives False."""
    print(f"balance: {gpu.name}: {error}", file=sys.stderr)
    record.add("failures", {"gpu": gpu.name, "error": brief(error)})
    return False


def cards_of(names: list[str]) -> list[Gpu]:
    """The GPUs of these names. ValueError for one that is not known, or that an H100 cannot be."""
    cards = []
    for name in names:
        try:
            gpu = named(name)
        except KeyError as error:
            raise ValueError(f"--gpu: {error.args[0]}") from None
        if gpu not in CARDS:
            raise ValueError(f"--gpu {name}: an H100 can only be slowed. It stands for "
                             f"{', '.join(card.name for card in CARDS)}")  # fmt: skip
        cards.append(gpu)
    return cards


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "balance.json", "sagebwd")
    options.description, options.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    options.add_argument("--gpu", nargs="+", default=list(DEFAULT_GPUS), metavar="NAME",
                         help=f"of {', '.join(card.name for card in CARDS)} (default: "
                              f"{', '.join(DEFAULT_GPUS)})")
    options.add_argument("--only", nargs="+", default=[], metavar="WORD",
                         help="cells and plans that have all these words")
    options.add_argument("--quick", action="store_true", help="8192 tokens, no mask, 5 rounds")
    options.add_argument("--plans", nargs="+", default=list(PLANS), metavar="WORDS",
                         help="each is words of a spec (default: " + "; ".join(PLANS) + ")")
    options.add_argument("--tiles", nargs="+", default=[], metavar="KERNEL=TILE",
                         help="instead of the card's default tiles")
    options.add_argument("--templates", type=Path, default=TEMPLATES, metavar="DIR",
                         help="other templates than this tree's")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--warmup", type=int, default=2, help="rounds that are not counted")
    options.add_argument("--no-model", dest="model", action="store_false",
                         help="do not ask the static model, which compiles more kernels")
    options.add_argument("--nvdisasm", type=Path, default=instructions.find_nvdisasm(),
                         metavar="FILE")
    options.add_argument("--json", action="store_true", help="print the record as well")
    defaults = vars(options.parse_args([]))
    program, out = defaults["program"], defaults["out"]
    parsed = options.parse_args(arguments)
    try:
        cards = cards_of(parsed.gpu)
        cells, plans = selected(QUICK if parsed.quick else CELLS, parsed.plans, parsed.only)
        tiles_of(parsed.tiles)
    except ValueError as error:
        options.error(str(error))
    part = [name for name in ("only", "quick", "plans", "tiles", "templates", "gpu")
            if getattr(parsed, name) != defaults[name]]
    if part and parsed.out == out:
        options.error(f"only a record of everything goes to {out.name}: with --{part[0]} name "
                      "another file with --out")
    if not torch.cuda.is_available():
        options.error("no CUDA GPU here: run this on a machine with an H100 or H200")
    if torch.cuda.get_device_capability() != (9, 0):
        options.error(f"{torch.cuda.get_device_name()} is no H100 or H200 (compute capability 9.0),"
                      " whose tensor instructions can be slowed to the balance of other GPUs")
    if parsed.quick:
        parsed.rounds = min(parsed.rounds, 5)
    record = Record(parsed.out, gpus=[card.name for card in cards], plans=plans,
                    rounds=parsed.rounds, total_tokens=TOTAL_TOKENS, tiles=parsed.tiles,
                    heads_times_dim=HEADS_TIMES_DIM, seed=parsed.seed)  # fmt: skip
    os.environ["SAGEBWD_TEMPLATE_DIR"] = str(parsed.templates.resolve())  # also of `sagebwd build`
    try:
        right = measure_all(cards, cells, plans, parsed, record)
    except (StretchError, OSError) as error:
        print(f"balance: {error}", file=sys.stderr)
        record.set(failures=[brief(error)])
        right = False
    if parsed.json:
        print(json.dumps(record.content, indent=1))
    return record.finish(right)


if __name__ == "__main__":
    sys.exit(main())
