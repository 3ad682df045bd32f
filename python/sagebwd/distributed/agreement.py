"""What ranks say to each other from host to host: what they were given, and what went wrong.

This goes through a gloo group beside the mesh's own, so that it waits for no GPU. A rank that ended
is noticed here, too.
"""

import json

import torch
import torch.distributed as dist

from sagebwd.checks import SpecError

#: Bytes of a rank's message.
_SIZE = 4096
_LONGEST_ERROR = 1000

#: Of the ranks of a mesh, the world in which it was made and the group.
_groups = {}


def _group_of(mesh):
    ranks = tuple(mesh.mesh.flatten().tolist())
    world, group = _groups.get(ranks, (None, None))
    if world is not dist.group.WORLD:
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True,
                               timeout=_timeout_of(mesh))  # fmt: skip
        _groups[ranks] = dist.group.WORLD, group
    return group


def _timeout_of(mesh):
    """How long the mesh's own group waits; None, gloo's default, where it does not say."""
    group = mesh.get_group(0)
    try:
        return group._get_backend(torch.device(mesh.device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def exchange(mesh, facts):
    """The facts of every rank of the mesh, a dict of JSON's types each, by increasing rank."""
    text = json.dumps(facts).encode()
    if len(text) > _SIZE:
        raise AssertionError(f"a message of {len(text)} bytes")
    mine = torch.zeros(_SIZE, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        group = _group_of(mesh)
        everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everybodys, mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank of {sorted(mesh.mesh.flatten().tolist())} cannot be reached: it has ended, "
            f"or did not call sagebwd.distributed within the group's timeout ({error})"
        ) from error
    return [json.loads(bytes(t.tolist()).rstrip(b"\0")) for t in everybodys]


def agree(mesh, error=None, **facts):
    """The facts of every rank, unless any has an error: then all raise.

    A rank raises its own error, and the others one that quotes the first.
    """
    told = facts
    if error is not None:
        told = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR],
                "is_spec": isinstance(error, SpecError)}  # fmt: skip
    try:
        everybodys = exchange(mesh, told)
    except RuntimeError as unreachable:
        raise (error or unreachable) from None
    if error is not None:
        raise error
    for rank, given in zip(sorted(mesh.mesh.flatten().tolist()), everybodys):
        if "error" in given:
            kind = SpecError if given["is_spec"] else RuntimeError
            raise kind(f"rank {rank} could not go on: {given['error']}")
    return everybodys


def check_alike(mesh, everybodys, but=()):
    """SpecError, the same on every rank, if ranks were given different things."""
    first = everybodys[0]
    ranks = sorted(mesh.mesh.flatten().tolist())
    for rank, given in zip(ranks, everybodys):
        for name, value in given.items():
            if name not in but and value != first.get(name):
                raise SpecError(
                    f"rank {ranks[0]} has {name} = {first.get(name)} and rank {rank} {value}: all "
                    "ranks of the mesh must call with the same, except for the number of tokens"
                )
