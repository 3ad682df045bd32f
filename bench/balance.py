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

import sys
from functools import partial
from pathlib import Path

import balance_model
import instructions
from balance_cards import (
    Subject,
    blocks_of,
    cards_of,
    measure_all,
    measured,
    options_of,
    require,
    run,
    named_tiles,
)
from gpus import Gpu
from harness import Record

from sagebwd.benchmark.environment import brief

TOTAL_TOKENS, HEADS_TIMES_DIM = 32768, 2048
#: Words of specs.
PLANS = ("six-of-seven", "six-of-seven gradient_kernels=split", "six-of-seven dp_sums=fp16",
         "six-of-seven dp_sums=fp16 gradient_kernels=split")  # fmt: skip
DEFAULT_GPUS = ("RTX 4090", "L40S", "A100")


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


# ---- figures -------------------------------------------------------------------------------------


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
    """The static model's bounds for the card's own kernels, and why there are none."""
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


def measure(one: Subject, cells: list[dict], plans: list[str], record: Record) -> bool:
    """One card, whose kernels are compiled: its rows go to the record. Whether all are right."""
    found = measured(one, record)
    right = found.steady
    for cell in cells:
        for plan in plans:
            row = row_of(one.gpu, found.here, found.clocks_a_clock, cell, plan,
                         found.slowed.built[cell["head_dim"], cell["causal"], plan],
                         found.slowed.results[cell["label"], plan], one.bounds)  # fmt: skip
            record.add("rows", row)
            print(line(row), flush=True)
            right &= row["correct"]
    return right


HEAD = (f"{'':64}" + "".join(f"{name + ': ms + around, TFLOPS, of bound, to fa2':>42}"
                             for name in balance_model.OPERATIONS)
        + "  instrument/model")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, "balance.json", DEFAULT_GPUS, 9, 2, "sagebwd")
    options.add_argument("--only", nargs="+", default=[], metavar="WORD",
                         help="cells and plans that have all these words")
    options.add_argument("--quick", action="store_true", help="8192 tokens, no mask, 5 rounds")
    options.add_argument("--plans", nargs="+", default=list(PLANS), metavar="WORDS",
                         help="each is words of a spec (default: " + "; ".join(PLANS) + ")")
    options.add_argument("--no-model", dest="model", action="store_false",
                         help="do not ask the static model, which compiles more kernels")
    options.add_argument("--nvdisasm", type=Path, default=instructions.find_nvdisasm(),
                         metavar="FILE")
    defaults = vars(options.parse_args([]))
    parsed = options.parse_args(arguments)
    try:
        cards = cards_of(parsed.gpu)
        cells, plans = selected(QUICK if parsed.quick else CELLS, parsed.plans, parsed.only)
        named_tiles(parsed.tiles)
    except ValueError as error:
        options.error(str(error))
    require(options, parsed, defaults, ("only", "quick", "plans", "tiles", "templates", "gpu"))
    if parsed.quick:
        parsed.rounds = min(parsed.rounds, 5)
    record = Record(parsed.out, gpus=[card.name for card in cards], plans=plans,
                    rounds=parsed.rounds, total_tokens=TOTAL_TOKENS, tiles=parsed.tiles,
                    heads_times_dim=HEADS_TIMES_DIM, seed=parsed.seed)  # fmt: skip
    return run(parsed, record, partial(measure_all, cards, cells, plans, parsed, record, measure,
                                       HEAD, model_of))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
