"""Capture a computation as a CUDA graph, with branches that run in parallel.

On other devices nothing is captured; the computation is executed again each time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

Compute: TypeAlias = Callable[[], Sequence[Tensor]]
# Takes a computation and returns a function that replays it.
Record: TypeAlias = Callable[[Compute], Compute]


def recorder(device: torch.device) -> Record:
    """Return the function that records computations on a device.

    This function takes a computation, which has no arguments and returns tensors. It returns a
    function that repeats the computation: on a GPU by a CUDA graph, elsewhere by a call.
    """
    if device.type != "cuda":
        return lambda compute: compute
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: _capture(compute, pool)


def _capture(compute: Compute, pool: Any) -> Compute:
    """Record a computation as a CUDA graph; return a function that replays it.

    The returned tensors are valid until the next replay of a graph with the same `pool` of GPU
    memory.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        no_garbage_collection(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        outputs = compute()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return outputs

    return replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stop the garbage collector inside `with`.

    If it freed another CUDA graph during a capture, the capture would fail.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Branches:
    """Branches of work that run in parallel in a CUDA graph; elsewhere one after another.

    While a CUDA graph is captured, put the work of each branch into `with branches.branch(n)`, and
    then call `join` once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: list[torch.cuda.Stream] = []
        self._open = 0

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        """Run the work inside `with` in a branch.

        The branch starts after all work that was issued outside of branches so far. It does not
        wait for other branches.
        number: the number of the branch, from 0.
        """
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not is_capturing:  # without a capture, streams would only occupy memory
            yield
            return
        self._open = number + 1
        while len(self._streams) <= number:
            self._streams.append(torch.cuda.Stream(self.device))
        self._streams[number].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._streams[number]):
            yield

    def join(self) -> None:
        """Let the work that follows wait for all branches."""
        for stream in self._streams[: self._open]:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._open = 0
