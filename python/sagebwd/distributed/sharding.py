"""Which tokens a rank has, and tensors cut up and put together so."""

import dataclasses
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sagebwd.core.arguments.checks import SpecError, a_kind, whole_number
from sagebwd.core.compat import not_compiled
from sagebwd.core.transforms import refuse_transforms
from sagebwd.distributed.agreement import agree

METHODS = ("ring", "ulysses", "both")

#: Tokens that have scales in common at most: chunks of multiples are quantised as the whole is.
_UNIT = 256


@dataclasses.dataclass(frozen=True)
class Place:
    """This rank's place in a mesh. The ring has chunks of tokens, and in each of its places
    `across` ranks share these tokens, or have a part of the heads each."""

    mesh: DeviceMesh
    ranks: list  #: [place in the ring][row]
    ring: object  #: the process groups, None where a dimension is not there
    heads: object
    at: int  #: in the ring
    around: int
    row: int  #: among those that share heads
    across: int


def place_of(mesh, method):
    """SpecError for what is no mesh, or does not suit the method."""
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(
            f"mesh is {a_kind(mesh)}; pass a DeviceMesh: init_device_mesh('cuda', (ranks,)), or "
            "DeviceMesh.from_group(group, 'cuda')"
        )
    if method not in METHODS:
        raise SpecError(f"method={method!r}: pass one of {METHODS}")
    wanted = 2 if method == "both" else 1
    if mesh.ndim != wanted:
        instead = (
            "make one by init_device_mesh('cuda', (places of the ring, ranks that share heads))"
            if mesh.ndim < wanted else "pass a part of it by its names, as in mesh['cp']"
            + (", with the ring's dimension first and that of heads second" if wanted > 1 else "")
        )  # fmt: skip
        raise SpecError(
            f"method={method!r} needs a mesh of {wanted} dimension{'s' * (wanted > 1)}, and this "
            f"one has {mesh.ndim}: {instead}"
        )
    if mesh.get_coordinate() is None:
        raise SpecError(f"rank {dist.get_rank()} is not in {mesh}")
    ring = mesh.get_group(0) if method != "ulysses" else None
    heads = mesh.get_group(mesh.ndim - 1) if method != "ring" else None
    if not all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim)):
        raise SpecError(f"the mesh has ranks {mesh.mesh.tolist()}: they must increase")

    def rank_and_size(group):
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    at, around = rank_and_size(ring)
    row, across = rank_and_size(heads)
    ranks = mesh.mesh.reshape(around, across).tolist()
    return Place(mesh, ranks, ring, heads, at, around, row, across)


def chunk_bounds(tokens, parts):
    """Returns where chunks begin, and the last one's end: in units of 256 tokens, or fewer if
    there are not that many. Chunks i and parts - 1 - i are of one place: places differ by at most
    one unit, and so do the chunks of one."""
    unit = _UNIT
    while unit > 1 and tokens < parts * unit:
        unit //= 2
    units, places = -(-tokens // unit), parts // 2
    ends = [-(-i * units // places) for i in range(places + 1)]
    have = [end - begin for begin, end in itertools.pairwise(ends)]
    sizes = [n // 2 for n in have] + [n - n // 2 for n in reversed(have)]
    return [min(tokens, n * unit) for n in itertools.accumulate(sizes, initial=0)]


def pair_of(tokens, place, at, even=False):
    """The two chunks of one place in the ring, as (first, end): one early and one late, so that
    under a causal mask all have as much to do. `even`: chunks are as long as each other."""
    if place.ring is None:
        return [(0, tokens), (tokens, tokens)]
    parts = 2 * place.around
    bounds = [i * (tokens // parts) for i in range(parts + 1)]
    if not even:
        bounds = chunk_bounds(tokens, parts)
    late = 2 * place.around - 1 - at
    return [(bounds[at], bounds[at + 1]), (bounds[late], bounds[late + 1])]


def even_order(own, place):
    """The spans, one behind the other, of what ranks that share a place's tokens have in PyTorch's
    order, that put them in order, and those that put them back. A rank has `own` tokens: an early
    chunk and, as far from the end, a late one."""
    chunk, rows = own // 2, range(place.across)
    early = [(2 * row * chunk, chunk) for row in rows]
    late = [((2 * row + 1) * chunk, chunk) for row in reversed(rows)]
    last = 2 * place.across - 1
    back = [(at * chunk, chunk) for row in rows for at in (row, last - row)]
    return early + late, back


def spans_of(tokens, place, at=None, row=None):
    """The spans of tokens that a rank has, in its order: (first, end) each."""
    at, row = place.at if at is None else at, place.row if row is None else row
    pair = pair_of(tokens, place, at)
    own = sum(end - first for first, end in pair)
    begin, stop = row * own // place.across, (row + 1) * own // place.across
    spans, before = [], 0
    for first, end in pair:
        low, high = max(begin, before), min(stop, before + end - first)
        if low < high:
            spans.append((first + low - before, first + high - before))
        before += end - first
    return spans


def lengths_of(tokens, place):
    """How many tokens each rank has, [place in the ring][row]."""
    return [[sum(end - first for first, end in spans_of(tokens, place, at, row))
             for row in range(place.across)] for at in range(place.around)]  # fmt: skip


def check_enough(tokens, place):
    least = (2 if place.ring is not None else 1) * place.around * place.across
    if tokens < least:
        raise SpecError(
            f"{tokens} tokens are too few for {place.around * place.across} ranks, which need "
            f"{least} or more: use a smaller mesh"
        )


def refuse_dtensor(name, x):
    """SpecError for DTensors: a rank's part of one is not what `shard` gives."""
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        raise SpecError(
            f"{name} is a DTensor: call PyTorch's scaled_dot_product_attention under "
            "sagebwd.sdpa(), which takes DTensors, or pass to sagebwd.distributed.shard what "
            f"{name}.full_tensor() gives"
        )


def _dimension(x, dim):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {a_kind(x)}; pass a torch tensor")
    refuse_dtensor("x", x)
    number = whole_number("dim", dim, least=-x.dim())
    if number >= x.dim():
        raise SpecError(f"dim={dim} is no dimension of a tensor of shape {tuple(x.shape)}")
    return number % x.dim()


def shard(x, mesh, *, dim, method="ring"):
    """The part of a whole tensor that this rank has for `attention` with this mesh and method.

    Args:
        x: the whole tensor, the same on every rank. Gradients flow to the part.
        mesh, method: as in `attention`.
        dim: the dimension of tokens.

    With 'ulysses' a rank has neighbouring tokens. In a ring of R places the i-th has the i-th and
    the i-th last of 2 R chunks (of multiples of 256 tokens, where there are enough), and with
    'both' the ranks of a place share its tokens in order. Lengths may differ from rank to rank.
    Shard the positions of tokens, and all that belongs to tokens, in the same way. Calls no other
    rank. Raises SpecError.
    """
    place, dim = place_of(mesh, method), _dimension(x, dim)
    check_enough(x.shape[dim], place)
    parts = [x.narrow(dim, first, end - first) for first, end in spans_of(x.shape[dim], place)]
    return torch.cat(parts, dim)  # a copy, of one part too


@not_compiled("sagebwd.distributed.unshard")
def unshard(x, mesh, *, dim, method="ring"):
    """The whole tensor, on every rank, from the part of each: what `shard` undoes.

    All ranks of the mesh must call it. No gradient flows through it. Raises SpecError, on every
    rank, if the parts do not fit together.
    """
    place, error, facts, lengths = place_of(mesh, method), None, {}, {}
    try:
        dim = _dimension(x, dim)
        refuse_transforms("unshard")
        if x.device.type != mesh.device_type:
            raise SpecError(f"x is on {x.device}, and the mesh is of {mesh.device_type}")
        rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
        facts = {"shape without tokens": rest, "dim": dim, "dtype": str(x.dtype),
                 "method": method}  # fmt: skip
        lengths = {"tokens": x.shape[dim]}
    except (SpecError, TypeError) as wrong:
        error = wrong
    everybodys = agree(mesh, error, lengths, "unshard", **facts)
    given = by_place(place, [facts["tokens"] for facts in everybodys])
    tokens = sum(map(sum, given))
    check_lengths(given, tokens, place, "x")
    (own,) = given[place.at : place.at + 1]
    whole = torch.cat(_gathered(x.detach().movedim(dim, 0), own, place.heads))
    if place.ring is not None:
        places = _gathered(whole, [sum(row) for row in given], place.ring)
        whole = whole.new_empty((tokens, *whole.shape[1:]))
        for at, part in enumerate(places):
            first, second = (slice(*span) for span in pair_of(tokens, place, at))
            middle = first.stop - first.start
            whole[first], whole[second] = part[:middle], part[middle:]
    return whole.movedim(0, dim).contiguous()


def by_place(place, values):
    """Values of the ranks in order of rank as [place in the ring][row]."""
    of_rank = dict(zip(sorted(place.mesh.mesh.flatten().tolist()), values))
    return [[of_rank[rank] for rank in row] for row in place.ranks]


def check_lengths(given, tokens, place, name, even=False):
    """SpecError unless the lengths are those that `shard` gives, or equal ones of two chunks, which
    only a ring requires."""
    if place.ring is None:
        return
    check_enough(tokens, place)
    ranks = place.around * place.across
    if even and tokens % (2 * ranks):
        raise SpecError(
            f"{tokens} tokens of {name} are shared by {ranks} ranks: under a causal mask PyTorch's "
            f"order needs a multiple of {2 * ranks}; pad them"
        )
    wanted = lengths_of(tokens, place)
    if even:
        wanted = [[tokens // ranks] * place.across] * place.around
    if given != wanted:
        raise SpecError(
            f"the ranks have {given} tokens of {name}, and of {tokens} in all "
            f"{'context_parallel' if even else 'shard()'} gives them {wanted}: cut tensors up by "
            "sagebwd.distributed.shard with this mesh and method"
        )


def _gathered(x, lengths, group):
    """Tensors of the group's ranks, which differ in the first dimension."""
    if group is None:
        return [x]
    most = max(lengths)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    everybodys = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather([as_bytes(t) for t in everybodys], as_bytes(padded), group=group)
    return [t[:n] for t, n in zip(everybodys, lengths)]


def as_bytes(x):
    """A contiguous tensor as bytes, which every backend takes."""
    return x.view(-1).view(torch.uint8)
