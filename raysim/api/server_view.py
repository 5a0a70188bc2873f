"""What hooks see of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from raysim.api.declarations import Task
from raysim.api.messages import Published, Update
from raysim.vectors.layout import Layout

Weighting: TypeAlias = Literal["samples", "uniform"]


class Server(Protocol):
    """The shared vector x, and what methods keep beside it. Only `state` and `report` are a hook's to write."""

    layout: Layout
    seed: int
    task: Task
    version: int  # aggregations so far
    weighting: Weighting
    group: int  # consecutive updates that are summed together
    size: int  # most updates in one aggregation
    counts: np.ndarray  # int64 [clients] training samples
    vector: Tensor  # [layout.shared]
    counters: Tensor  # [layout.shared_counters]
    state: dict[str, Tensor]  # what methods keep, by "method.name"; all of it is in a checkpoint
    report: dict[str, float]  # columns of this step's history row, by "method.name"
    # Of the aggregation at work:
    updates: Sequence[Update]
    weights: list[float]
    divided_by: float
    staleness: list[int]  # of each update, at its arrival
    bases: Mapping[int, Published]  # base versions of the updates
    following: Tensor  # [layout.trained] where `apply` may write the next parameters

    @property
    def clients(self) -> int:
        """All clients of the run, sampled or not."""
        ...

    @property
    def params(self) -> Tensor:
        """[layout.trained] the shared trainable parameters."""
        ...

    def stream(self, purpose: str) -> np.random.Generator:
        """The random stream of this purpose and version."""
        ...

    def weight(self, client: int) -> float:
        """A client's raw weight before any method changes it."""
        ...

    def fills(self, slot: str) -> bool:
        """Whether a method of the run fills this hook."""
        ...
