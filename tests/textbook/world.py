"""What a textbook gets and what it returns; plain values, nothing of raysim's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Params = dict[str, Tensor]  # by full name: "model.extractor.1.weight"


@dataclass(frozen=True)
class Job:
    """One participation of one client."""

    client: int
    turn: int  # participations of this client before this one
    version: int  # aggregations behind the model that it received
    samples: int  # training samples that the client holds
    batches: Sequence[
        tuple[Tensor, Tensor]
    ]  # of each step: inputs float64 [B, ...], labels int64 [B]
    draws: Sequence[Mapping[str, Tensor]]  # of each step: random values by full name


@dataclass(frozen=True)
class World:
    """A run without its training. `rounds[t]` are the jobs that aggregation t takes, in the order of acceptance."""

    seed: int
    clients: int
    classes: int
    rounds: Sequence[Sequence[Job]]
    data: Sequence[tuple[Tensor, Tensor]]  # of each client: all its training samples, in order
    central: tuple[Tensor, Tensor]  # the central test set
    start: Params  # initial values of all networks, buffers among them
    personal: frozenset[str]  # names of those that raysim keeps on the client
    local: Any  # lr, lr_decay, momentum, weight_decay, batch, epochs, steps
    weighting: str  # "samples" or "uniform", before any method changes it
    drawn: Mapping[str, Any] = field(
        default_factory=dict
    )  # what a row of the table hands over besides
    tests: Sequence[tuple[Tensor, Tensor]] = ()  # of each client: the test samples of its own


@dataclass
class Book:
    """What must be there at the end; names as in raysim's checkpoints.

    columns: of the history, a value for each round. own: of each client, the tensors of the model it is scored with.
    """

    shared: Mapping[str, Tensor]
    private: Mapping[int, Mapping[str, Tensor]] = field(
        default_factory=dict
    )  # by client that took part
    server: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
