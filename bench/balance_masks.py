"""The speed of masks on GPUs that are not at hand, next to the least time of flex_attention there.

    python bench/balance_masks.py                             # an RTX 4090
    python bench/balance_masks.py --gpu "RTX 5090" L40S --tokens 8192 --out /tmp/a.json

An H100 or H200 is slowed to the balance of a named GPU, as for bench/balance.py. The mma.sync
kernels have that GPU's default tiles. Masks are those of bench/intervals.py, told by intervals:
each forward also writes the bits of its intervals, as a call does. Results must be those of the
plain kernels bit for bit, and for the last head near FP64 under the mask's own function.

flex_attention cannot be slowed, so it is given the least time that FlashAttention-2's rate allows.
It computes blocks of 128 x 128 scores wholly if one of them is visible, in 16 bits with FP32 sums.
There are two products in the forward, and seven in the backward, which forms S and dP for dQ and
again for dK and dV. They run at 93 % of the tensor cores' rate. All else that it does, such as
making its block mask, counts as nothing.

A row with a mask has the share of the scores that are seen and of such blocks, the ms of each
kernel here, and for the card ms of the attention kernels and of those around them.
`ratio_to_flex` is flex_attention's time over ours. `ratio_to_fewest_products` is the same for the
five products that no backward can do without. `of_causal` is our time over that of a causal mask
alone. `reached` says whether `ratio_to_flex` of forward + backward is at least 1.3, which decides
for the default precision whether the record passes.

Without a GPU the script itself can be tried: build/simulator/simulate python
bench/balance_masks.py --device cpu --tokens 256 --head-dim 64 --heads-times-dim 64 --rounds 1
--out /tmp/a.json
"""

from __future__ import annotations

import sys
from functools import partial

import balance_model
from balance_cards import (
    Measured,
    Subject,
    blocks_of,
    cards_of,
    measure_all,
    measured,
    named_tiles,
    options_of,
    require,
    run,
)
from balance_runs import key_of, spec_of, tiles_of
from balance_told import FLEX_BLOCK
from beside_flex import HEADS_TIMES_DIM
from gpus import Gpu
from harness import Record
from intervals import masks_of
from sparse import LARGEST_ERROR
from sparse_subjects import PRECISIONS

TOKENS = (8192, 32768)
DEFAULT_GPUS = ("RTX 4090",)
DEFAULT_PRECISION = PRECISIONS[0]
MUST = 1.3  #: times flex_attention's speed
BOTH = "forward+backward"


# ---- what is measured ----------------------------------------------------------------------------


def cells_of(tokens: int, head_dim: int, heads_times_dim: int, seed: int) -> list[dict]:
    """A causal cell, and one for each mask. ValueError for sizes that do not divide."""
    if tokens % FLEX_BLOCK:
        raise ValueError(f"--tokens {tokens}: pass a multiple of {FLEX_BLOCK}")
    if heads_times_dim % head_dim:
        raise ValueError(f"--heads-times-dim {heads_times_dim}: pass a multiple of {head_dim}")
    shape = {"batch": 1, "heads": heads_times_dim // head_dim, "tokens": tokens,
             "head_dim": head_dim}  # fmt: skip
    cells = [shape | {"label": f"n{tokens} causal", "mask": None, "causal": True}]
    for mask in masks_of(tokens, seed, "cpu"):
        columns = mask.intervals.startend_row_indices.shape[3]
        cells.append(shape | {
            "label": f"n{tokens} {mask.name}", "mask": mask.name, "columns": columns,
            "causal": mask.intervals.causal == "top-left", "words": f"intervals={columns}",
        })  # fmt: skip
    return cells


# ---- figures -------------------------------------------------------------------------------------


def row_of(gpu: Gpu, found: Measured, cell: dict, plan: str) -> dict:
    """A cell and plan of the record, without what compares it with a causal mask."""
    row = {"gpu": gpu.name, **{k: v for k, v in cell.items() if k not in ("label", "words")},
           "precision": plan}  # fmt: skip
    place = cell["label"], plan
    plain, result = found.plain.results[place], found.slowed.results[place]
    if error := plain.get("error") or result.get("error"):
        return row | {"error": error, "correct": False}
    if cell["mask"]:
        row |= {key: result[key] for key in ("share", "share_of_blocks")}
        row["rel_l2"] = plain["rel_l2"]
        # NaN must not pass, hence the form of the comparison.
        if not all(e <= LARGEST_ERROR["random"] for e in row["rel_l2"].values()):
            return row | {"error": "results of plain kernels are not near FP64", "correct": False}
    built = found.slowed.built[key_of(cell, plan)]
    medians = {name: {kernel: timing["median_ms"] for kernel, timing in kernels.items()}
               for name, kernels in result["passes"].items()}  # fmt: skip
    counted = cell
    if cell["mask"]:
        spec = spec_of(cell, plan)
        counted = cell | {"causal": False, "share": row["share_of_blocks"],
                          "block_size": (spec.sparse_q, spec.sparse_kv)}  # fmt: skip
    predicted = balance_model.predicted(gpu, found.here, found.clocks_a_clock, counted,
                                        built["about"], medians)  # fmt: skip
    row |= {
        "correct": True, "fused": "backward" in built["kernels"],
        "kernels": {name: {**one, "blocks_of_sm": blocks_of(one, gpu)}
                    for name, one in built["kernels"].items()},
        "measured": result["passes"],
    }  # fmt: skip
    if not cell["mask"]:
        return row | {"predicted": balance_model.of_blocks(predicted)}
    beside = balance_model.beside_flex(predicted, gpu, counted)
    return row | {"predicted": beside, "must": MUST,
                  "reached": beside[BOTH]["ratio_to_flex"] >= MUST}  # fmt: skip


def of_causal(row: dict, causal: dict) -> dict | None:
    """For each pass the time of a row's mask over that of a causal one."""
    if not causal["correct"]:
        return None
    return {name: round(one["ms"] / causal["predicted"][name]["ms"], 3)
            for name, one in row["predicted"].items()}  # fmt: skip


HEAD = (f"{'':48}scores blocks" + "".join(f"{name + ', to flex (fewest)':>39}"
                                          for name in balance_model.OPERATIONS)
        + "  of causal's time")  # fmt: skip


def line(row: dict) -> str:
    """A row for people."""
    head = f"{row['gpu']:13}{row['tokens']:6} {row['mask'] or 'causal':15}{row['precision']:13}"
    if "error" in row:
        return f"{head} {row['error']}"
    shares = f"{row['share']:6.3f} {row['share_of_blocks']:6.3f}" if row["mask"] else ""
    cells = f"{shares:13}"
    for one in row["predicted"].values():
        ratios = "" if row["mask"] is None else (
            f"{one['ratio_to_flex']:6.2f}x ({one['ratio_to_fewest_products']:.2f})")  # fmt: skip
        cells += f"{one['attention_ms']:12.3f} +{one['around_ms']:6.3f} ms {ratios:>15}"
    if row.get("of_causal"):
        cells += f"  {row['of_causal'][BOTH]:.2f}"
    cells += "" if row.get("reached", True) else f"  below {row['must']:g}"
    spills = sum(one["spill_bytes"] for one in row["kernels"].values())
    return head + cells + (f" spills {spills} B" if spills else "")


# ---- the command ---------------------------------------------------------------------------------


def measure(one: Subject, cells: list[dict], plans: list[str], record: Record) -> bool:
    """One card, whose kernels are compiled: its rows go to the record. Whether all are right, and
    the default precision reaches what is demanded."""
    found = measured(one, record)
    right, causal = found.steady, {}
    for cell in cells:
        for plan in plans:
            row = row_of(one.gpu, found, cell, plan)
            if cell["mask"] is None:
                causal[cell["tokens"], plan] = row
            elif row["correct"]:
                row["of_causal"] = of_causal(row, causal[cell["tokens"], plan])
            record.add("rows", row)
            print(line(row), flush=True)
            right &= row["correct"] and (plan != DEFAULT_PRECISION or row.get("reached", True))
    return right


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, "balance-masks.json", DEFAULT_GPUS, 5, 1)
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="N")
    options.add_argument("--head-dim", type=int, default=128, metavar="D")
    options.add_argument("--heads-times-dim", type=int, default=HEADS_TIMES_DIM, metavar="N")
    options.add_argument("--precision", nargs="+", default=list(PRECISIONS),
                         choices=list(balance_model.INT8))  # fmt: skip
    defaults, parsed = vars(options.parse_args([])), options.parse_args(arguments)
    try:
        cards, plans = cards_of(parsed.gpu), parsed.precision
        cells = [cell for tokens in parsed.tokens for cell in cells_of(
            tokens, parsed.head_dim, parsed.heads_times_dim, parsed.seed)]  # fmt: skip
        tiles = named_tiles(parsed.tiles)
        for card in cards:  # SpecError for what has no kernels there
            for cell in cells:
                for plan in plans:
                    tiles_of(spec_of(cell, plan), card.arch, tiles)
    except ValueError as error:
        options.error(str(error))
    require(options, parsed, defaults,
            ("gpu", "tokens", "head_dim", "heads_times_dim", "precision", "tiles", "templates"))
    record = Record(parsed.out, gpus=[card.name for card in cards], tokens=parsed.tokens,
                    head_dim=parsed.head_dim, heads_times_dim=parsed.heads_times_dim,
                    precision=plans, dtype="bf16", must=MUST, tiles=parsed.tiles,
                    rounds=parsed.rounds, warmup=parsed.warmup, seed=parsed.seed)  # fmt: skip
    return run(parsed, record,
               partial(measure_all, cards, cells, plans, parsed, record, measure, HEAD))


if __name__ == "__main__":
    sys.exit(main())
