"""An H100 or H200 stands for other cards, by two processes (balance_process.py).

bench/balance.py, bench/balance_lists.py and bench/balance_masks.py share this module."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import balance_model
from balance_process import Found, Process
from gpus import GPUS, Gpu, named
from harness import Record, parser, progress
from needs_torch import torch
from stretch import TEMPLATES, Balance, StretchError, balance_of, write

from sagebwd.benchmark.environment import brief

#: Those whose mma.sync is slower than an H100's, so that it can stand for them.
CARDS = tuple(gpu for gpu in GPUS if gpu.arch not in ("sm_90a", "sm_100"))
OWN_ARCH = "sm_90a"
#: How far measured costs of stretched instructions may be from the planned ratio to one another,
#: and how much more than planned all may cost.
RATE_ERROR, MOST_COST = 0.05, 1.25
#: The names of `_core.measure_rates` and the rates of gpus.Gpu that they are of.
MEASURED = {"mma_s8": "int8", "mma_u8": "int8", "mma_bf16": "bits16"}
#: Clocks before and after the measurement may differ by so much.
CLOCK_ERROR = 0.03


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


# ---- the processes of a card ---------------------------------------------------------------------


def named_tiles(given: list[str]) -> dict[str, str]:
    """KERNEL=TILE as a dict. ValueError for other words."""
    tiles = {}
    for word in given:
        kernel, equals, tile = word.partition("=")
        if not equals or kernel not in balance_model.PRODUCTS:
            raise ValueError(f"--tiles {word}: expected KERNEL=TILE with a kernel of "
                             f"{', '.join(balance_model.PRODUCTS)}")  # fmt: skip
        tiles[kernel] = tile
    return tiles


def job_of(gpu: Gpu, cells: list[dict], plans: list[str], options) -> dict:
    """A process is asked for this job."""
    return {"arch": gpu.arch, "own_arch": OWN_ARCH, "sm_bytes": gpu.sm_kib * 1024, "cells": cells,
            "plans": plans, "tiles": named_tiles(options.tiles), "seed": options.seed,
            "rounds": options.rounds, "warmup": options.warmup, "device": options.device}


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


@dataclass(frozen=True)
class Measured:
    """The processes of a card have found this."""

    plain: Found
    slowed: Found
    here: balance_model.Here
    clocks_a_clock: float
    steady: bool  #: whether the clock was the same before and after


def measured(one: Subject, record: Record) -> Measured:
    """Lets plain kernels run, then stretched ones. The record gets what is known of the card."""
    gpu, balance = one.gpu, one.balance
    found_plain = one.plain.run(None, one.shown("plain kernels"))
    found = one.slowed.run(found_plain.results_by_cell(), one.shown("stretched kernels"))
    if found.here["rates"] is None:  # on the CPU, where no time says anything
        times, clock, after = {name: balance.factors[rate] for name, rate in MEASURED.items()}, 1, 1
    else:
        times = measured_rates(found_plain.here["rates"], found.here["rates"])
        clock, after = (where["rates"]["mma_s8"]["clock_ghz"] for where in (found.here, found.end))
    here = balance_model.Here(found.here["sms"], clock, found.here["memory_gbs"])
    balance = measured_balance(balance, times)
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
    return Measured(found_plain, found, here, balance.clocks_a_clock, steady)


# ---- all cards -----------------------------------------------------------------------------------


def measure_all(cards: list[Gpu], cells: list[dict], plans: list[str], options, record: Record,
                measure: Callable, head: str, model_of: Callable | None = None) -> bool:
    """All cards. They are compiled first, so that nothing else runs while one is measured.

    `measure(subject, cells, plans, record)` says whether all is right. `model_of(gpu, cells, plans,
    options)` gives the static model's bounds for a card, and why there are none.
    """
    right, models = True, {}
    with ExitStack() as stack:
        subjects = [started(card, cells, plans, options, stack) for card in cards]
        for one in subjects:
            if model_of and one.gpu.arch not in models:
                models[one.gpu.arch] = model_of(one.gpu, cells, plans, options)
            one.bounds, one.no_model = models.get(one.gpu.arch, ([], "not asked for"))
        for one in list(subjects):
            try:
                one.plain.compile(one.shown("compiling plain kernels"))
                one.slowed.compile(one.shown("compiling stretched kernels"))
            except RuntimeError as error:
                subjects.remove(one)
                failed(one.gpu, error, record)
        right = len(subjects) == len(cards)
        print(head)
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


# ---- the command ---------------------------------------------------------------------------------


def options_of(description: str, result: str, gpus, rounds: int, warmup: int,
               program: str | None = None) -> argparse.ArgumentParser:  # fmt: skip
    """The options that these scripts share."""
    options = parser(description, result, program)
    options.description, options.formatter_class = description, argparse.RawDescriptionHelpFormatter
    options.add_argument("--gpu", nargs="+", default=list(gpus), metavar="NAME",
                         help=f"of {', '.join(card.name for card in CARDS)} (default: "
                              f"{', '.join(gpus)})")
    options.add_argument("--templates", type=Path, default=TEMPLATES, metavar="DIR",
                         help="other templates than this tree's")
    options.add_argument("--tiles", nargs="+", default=[], metavar="KERNEL=TILE",
                         help="instead of the card's default tiles, such as forward='mma 64x64 w4 "
                              "s1 b2'")
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--warmup", type=int, default=warmup, help="rounds that are not counted")
    options.add_argument("--json", action="store_true", help="print the record as well")
    return options


def require(options: argparse.ArgumentParser, parsed, defaults: dict, names) -> None:
    """Exits if a part would replace the record of everything, or if there is no GPU for this.
    `names`: the options that choose a part."""
    part = [name for name in names if getattr(parsed, name) != defaults[name]]
    if part and parsed.out == defaults["out"]:
        options.error(f"only a record of everything goes to {parsed.out.name}: with "
                      f"--{part[0].replace('_', '-')} name another file with --out")
    if parsed.device != "cuda":
        return
    if not torch.cuda.is_available():
        options.error("no CUDA GPU here: run this on a machine with an H100 or H200")
    if torch.cuda.get_device_capability() != (9, 0):
        options.error(f"{torch.cuda.get_device_name()} is no H100 or H200 (compute capability 9.0),"
                      " whose tensor instructions can be slowed to the balance of other GPUs")


def run(parsed, record: Record, measure_them) -> int:
    """Fills a record by `measure_them()`, and gives the exit code."""
    os.environ["SAGEBWD_TEMPLATE_DIR"] = str(parsed.templates.resolve())  # also of `sagebwd build`
    try:
        right = measure_them()
    except (StretchError, OSError) as error:
        print(f"balance: {error}", file=sys.stderr)
        record.set(failures=[brief(error)])
        right = False
    if parsed.json:
        print(json.dumps(record.content, indent=1))
    return record.finish(right)
