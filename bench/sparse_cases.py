"""bench/sparse.py measures these shapes, lists of blocks and inputs, and demands these times."""

from __future__ import annotations

from dataclasses import dataclass

from needs_torch import torch
from torch import Tensor

import sagebwd
from sagebwd.benchmark.measuring import dtype_of, normal

#: Density, and ms of forward and of forward + backward: what must be, and what is aimed at, with
#: blocks of 128 x 128 at TABLE. Blocks of 128 x 64 may take HALF_BLOCKS times as long.
TIMES = {
    "sparse": {
        ("forward", 0.10): (1.6, 1.2), ("forward", 0.05): (0.85, 0.6),
        ("forward", 0.03): (0.6, 0.42), ("forward+backward", 0.10): (7.0, 5.4),
        ("forward+backward", 0.05): (3.9, 2.9), ("forward+backward", 0.03): (2.9, 2.1),
    },
    "all in": {
        ("forward+backward", 0.10): (8.5, 6.5), ("forward+backward", 0.05): (5.2, 3.9),
        ("forward+backward", 0.03): (4.1, 3.0),
    },
}  # fmt: skip
HALF_BLOCKS = 1.25
POPULAR_COSTS = 1.2  #: of the time with random lists
PACKING_US = 30.0
TIMES_V = 5.0  #: memory of all in, forward and backward
#: The least share of the executed TFLOPS of every block: from density 0.05 on, and below.
RATES = ((0.045, 0.8), (0.0, 0.7))
#: Relative L2 at ERRORS, for standard normal inputs under `row`.
GOALS = {
    "sparse": {"O": 0.014, "dQ": 0.0205, "dK": 0.0175, "dV": 0.0135},
    "linear": {"O": 0.003},
}
#: Scores of a call beyond which dense attention is timed once a shape.
MANY_SCORES = 1 << 36


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`1x16x32768x128`: batch, heads, tokens, head dimension."""
        numbers = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise ValueError(f"{text}: pass batch, heads, tokens and head dimension, as in {TABLE}")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}x{self.tokens}x{self.head_dim}"

    def scores(self) -> int:
        return self.batch * self.heads * self.tokens**2


TABLE = Shape(1, 16, 32768, 128)
SHAPES = (TABLE, Shape(1, 12, 32760, 128), Shape(1, 24, 32760, 64), Shape(1, 40, 75600, 128))
ERRORS = Shape(1, 4, 8192, 128)
DENSITIES = (0.10, 0.05, 0.03)
#: A name says where lists come from. 'all': every block; 'random': scores are standard normal;
#: 'popular': each column of scores has a normal number of its own more, twice as large; 'smooth':
#: scores of pooled queries and keys, which change slowly from token to token.
LISTS = ("random", "smooth", "popular")


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    shape: Shape
    lists: str
    density: float
    dense: tuple[str, ...] = ()  #: which attentions to every key take part, of DENSE
    is_timed: bool = True

    def key(self) -> str:
        return f"{self.shape} {self.lists} {self.density:g}" + ("" if self.is_timed else " errors")

    def with_lists(self) -> bool:
        """Whether attention to lists takes part: to every block it is slow."""
        return self.lists != "all" or self.shape.scores() <= MANY_SCORES

    def json(self) -> dict:
        return {**vars(self.shape), "lists": self.lists, "density": self.density,
                "is_timed": self.is_timed}  # fmt: skip


#: Attention to every key. That with groups of 64 keys has the groups of blocks of 64 keys.
DENSE = ("cudnn", "fa2", "sagebwd", "sagebwd gradients16", "sagebwd group_kv=64")


def cells_of(shapes, densities, lists, quick: bool = False, errors: bool = True) -> list[Cell]:
    """The cells, those of one shape one after the other. In the first of a shape all of DENSE take
    part: with every block, or (`quick`) with the first lists."""
    cells = [Cell(ERRORS, "random", density, is_timed=False) for density in (0.10, 0.03)
             if errors]  # fmt: skip
    for shape in shapes:
        many = shape.scores() > MANY_SCORES
        again = () if many else DENSE[:1]
        kinds = [kind for kind in lists if not (many and kind == "popular")]
        one = [Cell(shape, kind, density, again) for kind in kinds for density in densities]
        if quick:
            one[0] = Cell(shape, one[0].lists, one[0].density, DENSE)
        else:
            one.insert(0, Cell(shape, "all", 1.0, DENSE))
        cells += one
    return cells


# ---- inputs and lists ----------------------------------------------------------------------------


def smooth(shape: Shape, generator: torch.Generator) -> Tensor:
    """(batch, heads, tokens, channels) of FP32: curves through a random number every 128 tokens."""
    knots = torch.randn(shape.batch * shape.heads, shape.head_dim, shape.tokens // 128 + 2,
                        generator=generator, device=generator.device)  # fmt: skip
    curve = torch.nn.functional.interpolate(knots, size=shape.tokens, mode="linear",
                                            align_corners=True)  # fmt: skip
    return curve.mT.unflatten(0, (shape.batch, shape.heads))


def inputs_of(cell: Cell, dtype: str, device: str, seed: int) -> tuple[Tensor, ...]:
    """q, k and v, which require gradients, and dout. All are standard normal, but with 'smooth'
    lists q and k are a common curve and noise."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = cell.shape

    def one() -> Tensor:
        return normal(shape.heads, shape.tokens, shape.batch, shape.head_dim, dtype, "bhsd",
                      generator)  # fmt: skip

    if cell.lists != "smooth":
        q, k = one(), one()
    else:
        curve = smooth(shape, generator)
        q, k = ((curve + 0.5 * one()).to(dtype_of(dtype)) for _ in range(2))
        del curve
    return *(x.contiguous().requires_grad_() for x in (q, k, one())), one()


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


def mask_of(cell: Cell, sizes: tuple[int, int], q: Tensor, k: Tensor, seed: int) -> Tensor:
    """Which blocks are listed: bool of (batch, heads, query blocks, key blocks)."""
    shape = cell.shape
    columns = blocks_of(shape.tokens, sizes[1])
    size = (shape.batch, shape.heads, blocks_of(shape.tokens, sizes[0]), columns)
    if cell.lists == "all":
        return torch.ones(size, dtype=torch.bool, device=q.device)
    generator = torch.Generator(q.device).manual_seed(seed + 1)
    if cell.lists == "smooth":
        scores = sagebwd.pooled_block_scores(q.detach(), k.detach(), block_size=sizes)
    else:
        scores = torch.randn(size, generator=generator, device=q.device)
    if cell.lists == "popular":
        scores = scores + 2 * torch.randn((*size[:2], 1, columns), generator=generator,
                                          device=q.device)  # fmt: skip
    return sagebwd.top_blocks(scores, cell.density)


def share_of(mask: Tensor, tokens: int, sizes: tuple[int, int]) -> float:
    """The share of all pairs of a query and a key that are listed; the last blocks may be short."""
    def lengths(size: int) -> Tensor:
        firsts = torch.arange(0, tokens, size, device=mask.device)
        return (tokens - firsts).clamp(max=size).double()

    listed = mask.double() @ lengths(sizes[1]) @ lengths(sizes[0])
    return float(listed.mean()) / tokens**2


# ---- what is demanded ----------------------------------------------------------------------------


def demands(rows: list[dict]) -> list[dict]:
    """Says what is demanded of rows without errors, what was measured, and if that is enough."""
    rows = [row for row in rows if "error" not in row]
    found: list[dict] = []

    def demand(what: str, row: dict, measured: float, most: float, **more) -> None:
        named = f"{what}, {row['attention']}, {row['lists']} {row['density']:g}"
        found.append({"what": named, "shape": str(shape_of(row)), "measured": round(measured, 4),
                      "must": round(most, 4), **more, "reached": measured <= most})  # fmt: skip

    ours = [row for row in rows if row["kind"] in TIMES and row["precision"] == "six-of-seven"]
    for row in ours:
        if not row["is_timed"]:
            for name, most in GOALS.get(row["kind"], {}).items():
                demand(f"error of {name}", row, row["rel_l2"][name], most)
            continue
        factor = {"128x128": 1.0, "128x64": HALF_BLOCKS}.get(row["block_size"])
        for (name, density), (must, aim) in TIMES[row["kind"]].items():
            if factor and (row["lists"], row["density"]) == ("random", density) and (
                    shape_of(row) == TABLE):  # fmt: skip
                demand(f"ms of {name}", row, row[name]["median_ms"], factor * must,
                       aim=round(factor * aim, 4))  # fmt: skip
    for row in rows:
        if row["kind"] == "linear" and not row["is_timed"]:
            demand("error of O", row, row["rel_l2"]["O"], GOALS["linear"]["O"])
    for row in (row for row in rows if row["is_timed"]):
        if row["kind"] == "all in" and "peak_mib" in row:
            demand("memory, of V", row, row["peak_of_v"], TIMES_V)
        if row["kind"] != "sparse":
            continue
        if "packing_us" in row and shape_of(row) == TABLE and row["lists"] == "random":
            demand("us of packing", row, row["packing_us"], PACKING_US)
        both = "forward+backward"
        others = {other["lists"]: other for other in rows if other["is_timed"]
                  and shape_of(other) == shape_of(row) and other["attention"] == row["attention"]
                  and other["density"] in (row["density"], 1.0)}  # fmt: skip
        if row["lists"] == "popular" and "random" in others:
            demand("time, of random lists'", row, row[both]["median_ms"]
                   / others["random"][both]["median_ms"], POPULAR_COSTS)  # fmt: skip
        if row["lists"] == "random" and "all" in others:
            least = next(share for density, share in RATES if row["density"] >= density)
            costs = [one[both]["median_ms"] / one["share"] for one in (row, others["all"])]
            demand("cost of a score, of every block's", row, costs[0] / costs[1], 1 / least)
    return found


def shape_of(row: dict) -> Shape:
    return Shape(*(row[name] for name in ("batch", "heads", "tokens", "head_dim")))


def overtakes(rows: list[dict], peer: str = "cudnn") -> list[dict]:
    """For each attention to random lists the density at which it is as fast as a dense peer, by
    the straight line through the nearest two measured densities. None: there is no such density.
    """
    found = []
    rows = [row for row in rows if "error" not in row and row["is_timed"]]
    for shape in dict.fromkeys(map(shape_of, rows)):
        here = [row for row in rows if shape_of(row) == shape]
        for name in ("forward", "forward+backward"):
            dense = [row[name]["median_ms"] for row in here if row["attention"] == peer]
            labels = dict.fromkeys(r["attention"] for r in here if r["lists"] == "random"
                                   and r["block_size"])  # fmt: skip
            for label in labels if dense else ():
                line = sorted((r["share"], r[name]["median_ms"]) for r in here
                              if r["attention"] == label and r["lists"] in ("random", "all"))
                found.append({"shape": str(shape), "attention": label, "pass": name, "peer": peer,
                              "density": crossing(line, min(dense))})  # fmt: skip
    return found


def crossing(line: list[tuple[float, float]], height: float) -> float | None:
    """Finds the x, at most 1, at which a line through points passes a height from below. The points
    have ascending x, and the last two say how the line goes on. None: it starts above, or ends
    below."""
    for i, ((x0, y0), (x1, y1)) in enumerate(zip(line, line[1:])):
        last = i == len(line) - 2
        if y0 <= height and y0 < y1 and (height < y1 or last):
            x = x0 + (x1 - x0) * (height - y0) / (y1 - y0)
            return round(x, 4) if x <= 1 else None
    return None
