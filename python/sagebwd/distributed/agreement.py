"""Ranks tell each other, from host to host, what they were given and what went wrong.

This goes through a gloo group beside the mesh's own, so that it waits for no GPU. A rank that ended
is noticed here, too. As long as all goes well a message is short, a digest and some numbers: every
step of training has several for each layer.
"""

import functools
import hashlib
import itertools
import json
import struct

import torch
import torch.distributed as dist

from sagebwd.core.arguments.checks import SpecError
from sagebwd.core.compat import not_compiled

#: Bytes of a rank's long message: an error of _LONGEST_ERROR characters of up to four bytes fits.
_SIZE = 4096
#: A short one: a digest of what all should have in common, zeros for an error, and numbers.
_SHORT = struct.Struct("16s4q")
_LONGEST_ERROR = 1000

#: Each tuple of ranks has the world in which its group was made, the group, and a counter of calls.
_groups = {}


@functools.lru_cache(64)
def _ranks_of(mesh):
    return tuple(mesh.mesh.flatten().tolist())


def _group_of(mesh):
    ranks = _ranks_of(mesh)
    world, group, _ = _groups.get(ranks, (None, None, None))
    if world is not dist.group.WORLD:
        try:
            group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True,
                                   timeout=_timeout_of(mesh))  # fmt: skip
        except RuntimeError as error:
            # The others' addresses did not come in time; else there was no way to them.
            is_gone = "wait timeout" in str(error).lower()
            raise (_gone if is_gone else _unconnected)(mesh, error) from error
        _groups[ranks] = dist.group.WORLD, group, itertools.count(1)
    return group


def next_number(mesh):
    """The number, on every rank the same, of a call that all ranks have just agreed on."""
    return next(_groups[_ranks_of(mesh)][2])


def _timeout_of(mesh):
    """How long the mesh's own group waits; None, gloo's default, where it does not say."""
    group = mesh.get_group(0)
    try:
        return group._get_backend(torch.device(mesh.device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _gone(mesh, error):
    return RuntimeError(
        f"a rank of {sorted(_ranks_of(mesh))} cannot be reached: it has ended, or did not "
        f"call sagebwd.distributed within the group's timeout ({error})"
    )


def _unconnected(mesh, error):
    return RuntimeError(
        f"ranks {sorted(_ranks_of(mesh))} cannot connect over gloo, by which hosts tell each other "
        f"what they were given ({error}): on every rank set GLOO_SOCKET_IFNAME to the network "
        "interface that reaches the other hosts, as 'ip addr' names it. If they do reach each "
        "other, a rank has ended"
    )


#: Errors of gloo have one of these where another rank went away or does not answer.
_OF_OTHERS = ("closed", "timed out", "timeout", "reset by peer", "broken pipe", "refused")


@not_compiled("sagebwd.distributed")
def _exchange(mesh, message, size):
    """The messages of every rank of the mesh, bytes, by increasing rank."""
    if len(message) > size:
        raise AssertionError(f"a message of {len(message)} bytes")
    mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    group = _group_of(mesh)
    try:
        everybodys = mine.new_empty((dist.get_world_size(group), size))
        dist.all_gather(list(everybodys.unbind()), mine, group=group)
    except RuntimeError as error:
        if any(word in str(error).lower() for word in _OF_OTHERS):
            raise _gone(mesh, error) from error
        raise RuntimeError(
            f"ranks {sorted(_ranks_of(mesh))} could not tell each other what they were given: "
            f"{error}"
        ) from error
    whole = everybodys.numpy().tobytes()
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def agree(mesh, error=None, numbers=None, call="", **facts):
    """Returns what every rank has, as dicts: the facts, which must be the same, and up to four
    `numbers`, which need not be. If any rank has an error, all raise. `call` says what a rank is
    doing.

    A rank raises its own error, and the others one that quotes the first. SpecError, the same on
    every rank, if ranks were given different facts.
    """
    numbers, facts = numbers or {}, {"call": call} | facts
    text = json.dumps([facts, list(numbers)]).encode()
    digest = bytes(16) if error is not None else hashlib.blake2b(text, digest_size=16).digest()
    four = (list(numbers.values()) + [0] * 4)[:4]
    try:
        short = _exchange(mesh, _SHORT.pack(digest, *four), _SHORT.size)
    except RuntimeError as unreachable:
        raise (error or unreachable) from None
    said = [_SHORT.unpack(message) for message in short]
    if error is None and all(other == digest for other, *_ in said):
        return [facts | dict(zip(numbers, values)) for _, *values in said]
    _tell_errors(mesh, error, facts)
    raise AssertionError("digests differ, and facts do not")


def _tell_errors(mesh, error, facts):
    """Raises what is wrong, which some rank knows."""
    told = facts
    if error is not None:
        said = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        printable = (c if c.isprintable() or c == "\n" else "?" for c in said)
        told = {"error": "".join(printable), "is_spec": isinstance(error, SpecError)}
    try:
        found = _exchange(mesh, json.dumps(told, ensure_ascii=False).encode(), _SIZE)
    except RuntimeError as unreachable:
        raise (error or unreachable) from None
    if error is not None:
        raise error
    everybodys = [json.loads(message.rstrip(b"\0")) for message in found]
    ranks = sorted(_ranks_of(mesh))
    for rank, given in zip(ranks, everybodys):
        if "error" in given:
            kind = SpecError if given["is_spec"] else RuntimeError
            raise kind(f"rank {rank} could not go on: {given['error']}")
    first = everybodys[0]
    for rank, given in zip(ranks, everybodys):
        if given["call"] != first["call"]:
            backwards = all(of["call"].startswith("the backward") for of in (first, given))
            raise SpecError(
                f"rank {ranks[0]} is in {first['call']}, and rank {rank} in {given['call']}: all "
                "ranks of the mesh must call the same functions in the same order"
                + (", and use their results alike: a rank whose loss does not need one adds "
                   "0 * out.sum()" if backwards else "")
            )  # fmt: skip
        for name, value in given.items():
            if value != (other := first.get(name)):
                if name == "options":  # words, of which most are the same
                    other, value = _words_apart(other, value)
                raise SpecError(
                    f"rank {ranks[0]} has {name} = {other} and rank {rank} {value}: all "
                    "ranks of the mesh must call with the same, except for the number of tokens"
                )


def _words_apart(one, other):
    """The words that only one of two texts has."""
    words = [text.split() for text in (one, other)]
    return [" ".join(word for word in own if word not in others) or "none"
            for own, others in (words, words[::-1])]  # fmt: skip
