"""Prefix trees as intervals."""

import torch

from sagebwd.core.arguments.checks import SpecError
from sagebwd.masks.intervals import Intervals
from sagebwd.masks.rows import columns_of, device_of, matched, rows_of, tokens_of


def tree(parents=None, *, lengths=None, entry=None, exit=None, tokens=None, device=None):
    """A prefix tree: each token sees its ancestors and itself. Sequences that share prefixes, such
    as samples and turns in reinforcement learning, then have each prefix once.

    The nodes of the tree are tokens, or pieces of text with several tokens, which see each other
    causally. They lie in depth-first order: a node, then everything below its first child, and so
    on. Then those that see a key are neighbours, and one column says where they end. Several roots
    are several documents.

    Args:
        parents: the parent of each node, and -1 for roots: a list or tensor, or one per sequence.
        lengths: how many tokens each node has; None: one.
        entry: in the place of parents, the first token of each node: numbers that begin with 0 and
            rise.
        exit: with entry, the token behind the last one below each node (its own, if it has no
            children).
        tokens: how many tokens a sequence has; None: as many as the tree. Tokens behind the last
            one are a document of their own.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns causal `Intervals` of (batch, 1, tokens, 1). Raises SpecError, also for nodes that are
    not in depth-first order.
    """
    by_parents = parents is not None and entry is None and exit is None
    by_times = parents is None and lengths is None and entry is not None and exit is not None
    if not (by_parents or by_times):
        raise SpecError("pass parents, with lengths= or without, or entry= and exit=")
    if by_parents:
        rows = rows_of("parents", parents, least=-1)
        given = [[1] * len(row) for row in rows]
        if lengths is not None:
            rows, given = matched("parents", rows, "lengths", rows_of("lengths", lengths))
        ends = [_ends(row, length) for row, length in zip(rows, given)]
    else:
        rows, given = matched("entry", rows_of("entry", entry), "exit", rows_of("exit", exit))
        ends = [_checked_times(row, end) for row, end in zip(rows, given)]
        given = [[end - begin for begin, end in zip(row, [*row[1:], max(exits, default=0)])]
                 for row, exits in zip(rows, ends)]  # fmt: skip
    count = tokens_of("the tree", [sum(row) for row in given], tokens)
    made = [[torch.repeat_interleave(torch.tensor([*end, count]),
                                     torch.tensor([*row, count - sum(row)]))]
            for end, row in zip(ends, given)]  # fmt: skip
    return Intervals(columns_of(made, device_of(device, parents, lengths, entry, exit)), "top-left")


def _ends(parents, lengths):
    """The token behind the last one below each node."""
    if len(parents) != len(lengths):
        raise SpecError(f"parents has {len(parents)} nodes and lengths {len(lengths)}: pass as "
                        "many")  # fmt: skip
    ends, path, token = [0] * len(parents), [], 0
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = token
        if parent >= 0 and not path:
            wrong = (f"neither node {node - 1} nor one of its ancestors" if node else
                     "no earlier node: the first one is a root, -1")  # fmt: skip
            raise SpecError(f"parents[{node}] is {parent}, which is {wrong}: pass nodes in "
                            "depth-first order, each before its children")  # fmt: skip
        path.append(node)
        token += lengths[node]
    for node in path:
        ends[node] = token
    return ends


def _checked_times(entry, exit):
    """`exit`; SpecError unless both are of one tree in depth-first order."""
    if len(entry) != len(exit):
        raise SpecError(f"entry has {len(entry)} nodes and exit {len(exit)}: pass as many")
    following, path = [*entry[1:], max(exit, default=0)], []
    for node, (begin, end) in enumerate(zip(entry, exit)):
        while path and path[-1] <= begin:
            path.pop()
        inside = not path or end <= path[-1]
        if (begin and not node) or not begin < following[node] <= end or not inside:
            raise SpecError(
                f"entry[{node}] is {begin} and exit[{node}] {end}: pass the first token of each "
                "node, from 0 on and rising, and the token behind the last one below it, in "
                "depth-first order"
            )
        path.append(end)
    return exit
