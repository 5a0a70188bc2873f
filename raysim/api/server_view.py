"""What hooks see of the server, and of one aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.declarations import Task
from raysim.api.messages import Published, Update
from raysim.vectors.layout import Layout

Weighting: TypeAlias = Literal["samples", "uniform"]


@dataclass(frozen=True)
class Aggregation:
    """What one step of the server is made of: the updates in the order of acceptance, and how much each counts.

    deltas: [layout.shared] of each update, on the CPU. There are none in a run whose hosts may sum them beforehand: one
    in which no method fills `weigh` or `combine`, or has `needs_single_updates`.
    """

    updates: Sequence[Update]
    deltas: Sequence[Tensor]
    weights: Sequence[float]  # of each update, not normalised
    staleness: Sequence[int]  # of each update: aggregations between its dispatch and its arrival
    bases: Mapping[int, Published]  # by version: what the updates started from
    normaliser: Callable[[Sequence[float]], float] = sum  # from the weights to the divisor

    @property
    def divisor(self) -> float:
        """What the weighted sum of deltas is divided by: the sum of the weights, unless a method asks for another."""
        return float(self.normaliser(self.weights))

    def reweighted(
        self, weights: Sequence[float], normaliser: Callable[[Sequence[float]], float] | None = None
    ) -> Aggregation:
        """The same updates with other weights, and with another rule for the divisor if one is given."""
        return replace(self, weights=weights, normaliser=normaliser or self.normaliser)

    def base(self, update: Update) -> Tensor:
        """[layout.shared] the vector that the client received; with its delta added, the client's model."""
        return torch.from_numpy(self.bases[update.version].vector)


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
    able: int  # clients that have some
    population: int  # all clients but the unseen ones (`evaluate.unseen`): N of the papers
    samples: int  # of all clients
    vector: Tensor  # [layout.shared]
    counters: Tensor  # [layout.shared_counters]
    state: dict[str, Tensor]  # what methods keep, by "method.name"; all of it is in a checkpoint
    report: dict[str, float]  # columns of this step's history row, by "method.name"

    @property
    def clients(self) -> int:
        """All clients of the run, sampled or not."""
        ...

    @property
    def params(self) -> Tensor:
        """[layout.trained] the shared trainable parameters."""
        ...

    @property
    def sample_ends(self) -> np.ndarray:
        """float64 [able]: where the share of [0, 1) ends that each client with samples has, by its samples."""
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
