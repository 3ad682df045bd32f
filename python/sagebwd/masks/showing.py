"""Draws masks, as text or as a picture."""

import math
import os
from pathlib import Path

import torch

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind, whole_number
from sagebwd.masks import evaluation, parsing, tracing
from sagebwd.masks.intervals import Intervals

#: A character is darker the more of its cell is seen. The first is of none, the last of all.
SHADES = " ░▒▓█"
#: Cells of a picture, at most, along queries and keys.
MOST_CELLS = 1024


def show(mask, path=None, *, queries=None, keys=None, batch=0, head=0, operands=None, width=64):
    """Prints a mask with block characters, or draws it as a picture.

    Rows are queries and columns are keys. A cell is darker the more of it is seen: blank where
    nothing is, full where everything is.

    Args:
        mask: `Intervals`, an `Expression`, a function or a text as `trace_mask` takes, or a bool
            tensor of (queries, keys) or (batch, heads, queries, keys).
        path: the file of a picture, such as "mask.png", by matplotlib; None: print text.
        queries, keys: how many there are. Intervals and tensors know their keys, and tensors their
            queries; intervals have as many queries as keys unless this says otherwise. More than
            their numbers reach are drawn as kernels take them.
        batch, head: which one is drawn. One of intervals or tensors that is the same for all serves
            all.
        operands: with a text, the tensors that it indexes.
        width: how many characters a row has at most.

    Raises SpecError for a size that is missing or wrong, ImportError for a picture without
    matplotlib, and ValueError for a path that does not end as matplotlib's pictures do.
    """
    rows, queries, keys = _rows_of(mask, queries, keys, batch, head, operands)
    if path is not None:
        _save(rows, queries, keys, path)
        return
    width = whole_number("width", width, least=2)
    wide = 2 if 2 * max(queries, keys) <= width else 1  # characters are twice as high as wide
    side = 1 if wide == 2 else math.ceil(keys / width)
    cell = (side if wide == 2 else 2 * side, side)
    print(f"{queries} queries (down) x {keys} keys; a cell is {cell[0]} x {cell[1]}")
    for line in _densities(rows, queries, keys, cell):
        print("".join(_shade(share) * wide for share in line.tolist()).rstrip())


def _shade(share):
    """The first and the last are of exactly none and all."""
    if share in (0, 1):
        return SHADES[-1 if share else 0]
    return SHADES[1 + min(2, int(share * 3))]


def _densities(rows, queries, keys, cell):
    """For each row of cells, which share of each is seen. The last cells may be smaller."""
    begins = torch.arange(0, keys, cell[1])
    wide = (keys - begins).clamp(max=cell[1])
    for begin in range(0, queries, cell[0]):
        end = min(begin + cell[0], queries)
        seen = rows(begin, end).sum(0).cumsum(0)
        seen = seen[begins + wide - 1].diff(prepend=torch.zeros(1, dtype=torch.int64))
        yield seen.double() / ((end - begin) * wide)


def _rows_of(mask, queries, keys, batch, head, operands):
    """(a function of a range of queries that gives their rows, queries, keys)."""
    batch, head = (whole_number(name, number, least=0)
                   for name, number in (("batch", batch), ("head", head)))  # fmt: skip
    if isinstance(mask, (Intervals, torch.Tensor)):
        return _rows_of_tensor(mask, queries, keys, batch, head)
    if not isinstance(mask, tracing.Expression):
        if not (isinstance(mask, str) or callable(mask)):
            raise SpecTypeError(f"mask is {a_kind(mask)}; pass Intervals, an expression, a "
                                "function or a bool tensor")  # fmt: skip
        mask = tracing.trace_mask(mask, operands)
    if mask.kind != "mask":
        raise SpecError(f"{mask.text!r} is a score function: pass a mask")
    if queries is None and keys is None:
        raise SpecError("the mask has no sizes of its own: pass queries=, and keys= if there are "
                        "others")  # fmt: skip
    queries, keys = (whole_number(name, one if one is not None else other) for name, one, other in
                     (("queries", queries, keys), ("keys", keys, queries)))  # fmt: skip
    tree = parsing.parse(mask.text, tracing.types_of(mask.operands))
    device = next((t.device for t in mask.operands.values()), None)

    def rows(begin, end):
        places = {"b": torch.tensor(batch), "h": torch.tensor(head),
                  "q": torch.arange(begin, end)[:, None], "k": torch.arange(keys)}  # fmt: skip
        places = {name: place.int().to(device) for name, place in places.items()}
        return evaluation.value_of(tree, places, mask.operands).expand(end - begin, keys).cpu()

    return rows, queries, keys


def _rows_of_tensor(mask, queries, keys, batch, head):
    shape = (mask.startend_row_indices if isinstance(mask, Intervals) else mask).shape
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool or mask.dim() not in (2, 4):
            raise SpecError(f"mask is {tuple(shape)} {mask.dtype}; pass torch.bool of (queries, "
                            "keys) or (batch, heads, queries, keys)")  # fmt: skip
        mask = mask if mask.dim() == 4 else mask[None, None]
        shape = mask.shape
    chosen = []
    for name, number, size in (("batch", batch, shape[0]), ("head", head, shape[1])):
        if number >= size and size != 1:
            raise SpecError(f"{name}={number}: the mask has {size}; pass a number below that")
        chosen.append(slice(0, 1) if size == 1 else slice(number, number + 1))
    if isinstance(mask, Intervals):
        one = Intervals(mask.startend_row_indices[tuple(chosen)], mask.causal)
        dense = _dense(one, queries)[0, 0].cpu()
    else:
        dense = mask[tuple(chosen)][0, 0].cpu()
    for name, told, size in (("queries", queries, dense.shape[0]), ("keys", keys, dense.shape[1])):
        if told is not None and told != size:
            raise SpecError(f"{name}={told}, and the mask has {size}: leave {name}= out")
    return lambda begin, end: dense[begin:end], *dense.shape


def _dense(mask, queries):
    """`mask.dense`; SpecError speaks of queries= where the mask is of another number of them."""
    keys = mask.startend_row_indices.shape[2]
    drawn = keys if queries is None else whole_number("queries", queries, least=0)
    reach = int(mask.startend_row_indices.max()) if mask.startend_row_indices.numel() else 0
    if reach > drawn:
        given = (f"queries={drawn}" if queries is not None else
                 f"queries= is left out, which stands for {drawn}, as many as keys")  # fmt: skip
        raise SpecError(f"{given}, and the mask's numbers reach {reach}: pass queries={reach}, or "
                        "as many as the mask was made for")  # fmt: skip
    return mask.dense(drawn)


def _save(rows, queries, keys, path):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a picture needs matplotlib ({error}): pip install matplotlib, or leave path out, "
            "which prints the mask"
        ) from error
    path = Path(os.fsdecode(path))
    figure = Figure(figsize=(6, 6))
    if path.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path.name!r} is no name of a picture: give a name that ends in .png, "
                         ".svg or .pdf")  # fmt: skip
    side = max(1, math.ceil(max(queries, keys) / MOST_CELLS))
    cells = torch.stack(list(_densities(rows, queries, keys, (side, side))))
    panel = figure.subplots()
    panel.imshow(cells.numpy(), cmap="Blues", vmin=0, vmax=1, extent=(0, keys, queries, 0),
                 interpolation="nearest")  # fmt: skip
    panel.set_xlabel("key")
    panel.set_ylabel("query")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
