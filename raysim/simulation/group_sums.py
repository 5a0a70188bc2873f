"""Add up the sums of groups on their nodes: one vector travels instead of one per group.

The server adds group after group, in the order of acceptance. To keep the bits, each node gets
consecutive groups and adds the sums of its workers to the sum from the node before: these are the
same additions in the same order. The groups of the coordinator's node come last and are added by
the server. A vector passes through the nodes in pieces, so that several nodes work at the same
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from raysim.api.messages import GroupSums
from raysim.simulation.calls import Call, WorkerCalls
from raysim.simulation.runtime import Ref, Runtime
from raysim.vectors.blocks import in_blocks, split_range

PART_FLOATS = 1 << 25  # of a sum that pass from node to node at once (128 MiB)


class RemoteSum(NamedTuple):
    """The sum of a group of jobs, which is still on the worker that made it."""

    jobs: tuple[int, ...]
    worker: int
    ref: Ref


def add_up_on_nodes(
    sums: Sequence[RemoteSum], calls: WorkerCalls, runtime: Runtime, floats: int
) -> GroupSums:
    """Let nodes add up the sums of their workers; return the total, or nothing if all failed.

    sums: in the order of acceptance, at least one. floats: the length of a sum.
    """
    links = group_by_node([group_sum.worker for group_sum in sums], runtime.nodes)
    pieces = split_range(0, floats, PART_FLOATS)
    latest: list[Call | None] = [None] * len(pieces)  # by piece: the call that added to it last
    for place, index in pipeline_order(len(links), len(pieces)):
        link, piece, previous = links[place], pieces[index], latest[index]
        previous_sum = None
        if previous is not None:
            calls.wait(previous)
            previous_sum = previous.remote_refs[0]
        worker = sums[link[index % len(link)]].worker
        refs = [sums[member].ref for member in link]
        args = (piece.start, piece.stop, previous_sum, *refs)
        latest[index] = calls.start(Call(worker, "combine", args, remote_values=1))
    totals: list[np.ndarray] = []
    for call in latest:
        assert call is not None, "every piece goes through every node"
        calls.wait(call)
        total = runtime.get(call.remote_refs[0])
        if total is None:
            return {}
        totals.append(total)
    jobs: list[int] = []
    for group_sum in sums:
        jobs.extend(group_sum.jobs)
    return {tuple(jobs): join(totals)}


def group_by_node(workers: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Return the positions of sums, node after node.

    workers: the worker of each sum, in the order of acceptance.
    """
    positions = range(len(workers))
    groups = groupby(positions, key=lambda position: nodes[workers[position]])
    return [list(group) for _, group in groups]


def pipeline_order(links: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Yield pairs (link, piece) in an order that lets all links work on different pieces."""
    for turn in range(links + pieces - 1):
        yield from ((link, turn - link) for link in range(links) if 0 <= turn - link < pieces)


def join(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the vector that consists of these pieces."""
    if len(pieces) == 1:
        return pieces[0]
    ends = np.cumsum([len(piece) for piece in pieces])
    vector = np.empty(ends[-1], pieces[0].dtype)

    def copy(which: slice) -> None:
        piece, end = pieces[which.start], ends[which.start]
        vector[end - len(piece) : end] = piece

    in_blocks(len(pieces), copy, size=1)
    return vector
