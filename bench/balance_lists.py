"""The rate of attention to lists of blocks on GPUs that are not at hand, of that to all keys.

    python bench/balance_lists.py                             # an RTX 4090
    python bench/balance_lists.py --gpu "RTX 5090" L40S --density 0.05 --out /tmp/a.json
    python bench/balance_lists.py --shape 1x16x8192x128 --precision six-of-seven --out /tmp/a.json

An H100 or H200 is slowed to the balance of a named GPU, as for bench/balance.py. The mma.sync
kernels have that GPU's default tiles, with lists and without. Lists are the random ones of
bench/sparse.py, for queries and keys without a causal mask. Results must be those of the
plain kernels bit for bit, and for the last head near FP64. Passes with lists and without take
turns.

A row with lists has the ms of each kernel here; and for the card ms of the attention kernels, of
those around them, and executed TFLOPS, which count listed blocks alone. `of_dense` is the executed
rate divided by that of the attention kernels with the same groups on all keys: the time on all
keys, times the share of the scores that is listed, over the time with lists.
`of_dense_with_around` is the same with the kernels around them. Lists always have two kernels for
gradients; where all keys have one for all gradients, `of_split` compares with two. `reached` says
whether `of_dense` is at least `must`, in the forward and in both passes.

Without a GPU the script itself can be tried: build/simulator/simulate python
bench/balance_lists.py --device cpu --shape 1x1x256x64 --density 0.5 --out /tmp/a.json
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
from balance_told import density_of
from gpus import Gpu
from harness import Record
from sparse import LARGEST_ERROR, named, shape_of, sizes_of
from sparse_cases import DENSITIES, RATES, TABLE, Shape
from sparse_subjects import PRECISIONS

from sagebwd.lists.blocks import kept_of

SHAPES = (TABLE, Shape(1, 24, 32760, 64))
BLOCK_SIZES = ((128, 128), (128, 64))
DEFAULT_GPUS = ("RTX 4090",)
LISTS = "random"
SPLIT = "gradient_kernels=split"
#: The passes whose rate is demanded.
DEMANDED = ("forward", "forward+backward")


# ---- what is measured ----------------------------------------------------------------------------


def cell_of(shape: Shape) -> dict:
    return {"label": str(shape), **vars(shape), "causal": False}


def listed_plan(precision: str, sizes: tuple[int, int], density: float) -> str:
    return f"{precision} sparse_q={sizes[0]} sparse_kv={sizes[1]} density={density:g}"


def dense_plan(precision: str, sizes: tuple[int, int]) -> str:
    """Attention to all keys with the groups that lists of such blocks have."""
    return f"{precision} x64" if sizes[1] == 64 else precision


def plans_of(cards: list[Gpu], cells: list[dict], precisions, block_sizes,
             densities) -> list[str]:  # fmt: skip
    """Attention to all keys, with two kernels for gradients as well where one is the default, and
    attention to lists. SpecError for what has no kernels on a card."""
    def kernels_of(plan: str) -> set[str]:
        return set().union(*(tiles_of(spec_of(cell, plan), card.arch, {})
                             for card in cards for cell in cells))  # fmt: skip

    plans = []
    for density in densities:
        kept_of(density, 1)
    for precision in precisions:
        for sizes in block_sizes:
            dense = dense_plan(precision, sizes)
            plans.append(dense)
            if "backward" in kernels_of(dense):
                plans.append(f"{dense} {SPLIT}")
            of_lists = [listed_plan(precision, sizes, density) for density in densities]
            kernels_of(of_lists[0])
            plans += of_lists
    return list(dict.fromkeys(plans))


# ---- figures -------------------------------------------------------------------------------------


def row_of(gpu: Gpu, found: Measured, cell: dict, plan: str) -> dict:
    """A cell and plan of the record, without what compares it with others."""
    density = density_of(plan)
    spec = spec_of(cell, plan)
    sizes = (spec.sparse_q, spec.sparse_kv) if density else None
    row = {"gpu": gpu.name, **{k: v for k, v in cell.items() if k != "label"}, "plan": plan,
           "precision": spec.precision, "lists": LISTS if density else "all",
           "block_size": sizes and "{}x{}".format(*sizes), "density": density or 1.0}
    place = cell["label"], plan
    plain, result = found.plain.results[place], found.slowed.results[place]
    if error := plain.get("error") or result.get("error"):
        return row | {"error": error, "correct": False}
    row |= {"share": result.get("share", 1.0), "rel_l2": plain.get("rel_l2")}
    # NaN must not pass, hence the form of the comparison.
    if not all(e <= LARGEST_ERROR[LISTS] for e in (row["rel_l2"] or {}).values()):
        return row | {"error": "results of plain kernels are not near FP64", "correct": False}
    built = found.slowed.built[key_of(cell, plan)]
    medians = {name: {kernel: timing["median_ms"] for kernel, timing in kernels.items()}
               for name, kernels in result["passes"].items()}  # fmt: skip
    counted = cell | {"share": row["share"], "block_size": sizes}
    predicted = balance_model.predicted(gpu, found.here, found.clocks_a_clock, counted,
                                        built["about"], medians)  # fmt: skip
    return row | {
        "correct": True, "fused": "backward" in built["kernels"],
        "kernels": {name: {**one, "blocks_of_sm": blocks_of(one, gpu)}
                    for name, one in built["kernels"].items()},
        "measured": result["passes"], "attention_ms_here": balance_model.attention_ms(medians),
        "predicted": balance_model.executed(predicted, counted),
    }  # fmt: skip


def least_of(density: float) -> float:
    """The least share of the dense kernels' rate at a density."""
    return next(least for lowest, least in RATES if density >= lowest)


def compared(row: dict, dense: dict, split: dict | None) -> dict:
    """A row of lists, with its rate as a share of that of attention to all keys. `split`: of that
    with two kernels for gradients."""
    def rates(other: dict | None) -> dict | None:
        if other is None or not other["correct"]:
            return None
        return balance_model.of_dense(row["attention_ms_here"], other["attention_ms_here"],
                                      row["share"])  # fmt: skip

    found, must = rates(dense), least_of(row["density"])
    all_ms = [{name: one["ms"] for name, one in of["predicted"].items()}
              for of in (row, dense) if of["correct"]]  # fmt: skip
    return row | {
        "of_dense": found, "of_split": rates(split),
        "of_dense_with_around": found and balance_model.of_dense(*all_ms, row["share"]),
        "must": must, "reached": found is not None and all(found[x] >= must for x in DEMANDED),
    }  # fmt: skip


def rows_of(gpu: Gpu, found: Measured, cell: dict, plans: list[str]) -> list[dict]:
    """The rows of a cell, those with lists behind what they are compared with."""
    rows = {plan: row_of(gpu, found, cell, plan) for plan in plans}
    for plan, row in rows.items():
        if row["block_size"] and row["correct"]:
            dense = dense_plan(row["precision"], sizes_of(row["block_size"]))
            rows[plan] = compared(row, rows[dense], rows.get(f"{dense} {SPLIT}"))
    return list(rows.values())


HEAD = (f"{'':88}" + "".join(f"{name + ', TFLOPS':>27}" for name in balance_model.OPERATIONS)
        + "  of the dense rate: forward, both (of split)")  # fmt: skip


def line(row: dict) -> str:
    """A row for people."""
    shape = "x".join(str(row[name]) for name in ("batch", "heads", "tokens", "head_dim"))
    head = f"{row['gpu']:13} {shape:16} {row['plan']:57}"
    if "error" in row:
        return f"{head} {row['error']}"
    cells = "".join(f"{one['attention_ms']:10.3f} +{one['around_ms']:6.3f} ms "
                    f"{one['executed_tflops']:5.0f}" for one in row["predicted"].values())
    if row["block_size"] and row["of_dense"]:
        cells += "  " + ", ".join(f"{row['of_dense'][name]:.2f}" for name in DEMANDED)
        cells += f" ({row['of_split'][DEMANDED[1]]:.2f})" if row["of_split"] else ""
        cells += "" if row["reached"] else f"  below {row['must']:g}"
    spills = sum(one["spill_bytes"] for one in row["kernels"].values())
    return head + cells + (" fused" if row["fused"] else "") + (
        f" spills {spills} B" if spills else "")  # fmt: skip


# ---- the command ---------------------------------------------------------------------------------


def measure(one: Subject, cells: list[dict], plans: list[str], record: Record) -> bool:
    """One card, whose kernels are compiled: its rows go to the record. Whether all are right, and
    all that is demanded is reached."""
    found = measured(one, record)
    right = found.steady
    for cell in cells:
        for row in rows_of(one.gpu, found, cell, plans):
            record.add("rows", row)
            print(line(row), flush=True)
            right &= row["correct"] and row.get("reached", True)
    return right


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, "balance-lists.json", DEFAULT_GPUS, 5, 1)
    options.add_argument("--shape", type=named(shape_of), nargs="+", default=list(SHAPES),
                         metavar="BxHxNxD")  # fmt: skip
    options.add_argument("--density", type=float, nargs="+", default=list(DENSITIES))
    options.add_argument("--block-size", type=named(sizes_of), nargs="+",
                         default=list(BLOCK_SIZES), metavar="QxK")  # fmt: skip
    options.add_argument("--precision", nargs="+", default=list(PRECISIONS),
                         choices=list(balance_model.INT8))  # fmt: skip
    defaults, parsed = vars(options.parse_args([])), options.parse_args(arguments)
    cells = [cell_of(shape) for shape in parsed.shape]
    try:
        cards = cards_of(parsed.gpu)
        plans = plans_of(cards, cells, parsed.precision, parsed.block_size, parsed.density)
        named_tiles(parsed.tiles)
    except ValueError as error:
        options.error(str(error))
    require(options, parsed, defaults,
            ("gpu", "shape", "density", "block_size", "precision", "tiles", "templates"))
    record = Record(parsed.out, gpus=[card.name for card in cards],
                    shape=list(map(str, parsed.shape)), density=parsed.density, plans=plans,
                    block_size=parsed.block_size, precision=parsed.precision,
                    tiles=parsed.tiles, rounds=parsed.rounds, warmup=parsed.warmup,
                    seed=parsed.seed)  # fmt: skip
    return run(parsed, record,
               partial(measure_all, cards, cells, plans, parsed, record, measure, HEAD))


if __name__ == "__main__":
    sys.exit(main())
