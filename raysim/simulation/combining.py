"""Which sums are added up on their node before they travel, so that one vector arrives instead of one for each group.

The server adds group after group, in the order of acceptance. So each node gets a stretch of consecutive groups, and
adds what its hosts have summed to what the node before hands on: the same additions in the same order, so the same
bits. The groups of the coordinator's own node come last and are added by the server. A vector passes through the nodes
in parts, so that several nodes work at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from raysim.vectors.blocks import in_blocks, parts

PART = 1 << 25  # floats of a sum that pass from node to node at once (128 MiB)


def pieces(length: int) -> list[slice]:
    """The parts of a vector."""
    return parts(0, length, PART)


def joined(found: Sequence[np.ndarray]) -> np.ndarray:
    """The vector of these parts."""
    if len(found) == 1:
        return found[0]
    ends = np.cumsum([len(part) for part in found])
    whole = np.empty(ends[-1], found[0].dtype)

    def put(which: slice) -> None:
        part = found[which.start]
        whole[ends[which.start] - len(part) : ends[which.start]] = part

    in_blocks(len(found), put, size=1)
    return whole


def by_node(works: Sequence[float], nodes: Sequence[int]) -> list[int]:
    """A host for each group, given its work: consecutive groups on each node, in a node long ones first.

    nodes: of each host; the last groups go to node 0.
    """
    order = sorted(set(nodes), key=lambda node: (node == 0, node))
    members = [[host for host, own in enumerate(nodes) if own == node] for node in order]
    ends = np.cumsum([len(hosts) for hosts in members]) / len(nodes)
    middles = (np.cumsum(works) - np.asarray(works) / 2) / max(sum(works), 1e-9)
    places = np.minimum(np.searchsorted(ends, middles), len(order) - 1)
    loads, chosen = [0.0] * len(nodes), [0] * len(works)
    for group in sorted(range(len(works)), key=works.__getitem__, reverse=True):
        host = chosen[group] = min(members[places[group]], key=loads.__getitem__)
        loads[host] += works[group]
    return chosen


def chain(hosts: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Places of sums, given their hosts in the order of acceptance: node after node."""
    return [list(own) for _, own in groupby(range(len(hosts)), key=lambda place: nodes[hosts[place]])]


def turns(links: int, parts: int) -> Iterator[tuple[int, int]]:
    """In which order the links of a chain get the parts of a vector: every link has one while others have others."""
    for turn in range(links + parts - 1):
        yield from ((link, turn - link) for link in range(links) if 0 <= turn - link < parts)
