"""The types that a textbook gets and returns: plain values, without raysim's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Params = dict[str, Tensor]  # By full name, such as "model.extractor.1.weight".


@dataclass(frozen=True)
class Job:
    """One job of one client.

    turn: number of this client's job, from 0. version: the model version that it received. samples:
    the number of the client's training samples. batches: for each step, inputs float64 [B, ...] and
    labels int64 [B]. draws: for each step, random values by full name.
    """

    client: int
    turn: int
    version: int
    samples: int
    batches: Sequence[tuple[Tensor, Tensor]]
    draws: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class World:
    """A run without its training.

    seed: the run's seed. clients, classes: their numbers. rounds: for each aggregation its jobs, in
    the order in which they are aggregated. data: for each client, all its training samples, in
    order. central: the central test set. start: initial values of all networks, buffers included.
    personal: names of tensors that stay on the client. local: the settings local.*. weighting:
    "samples" or "uniform", before any method changes it. drawn: random values that only some
    textbooks need, by name. tests: for each client, its own test samples.
    """

    seed: int
    clients: int
    classes: int
    rounds: Sequence[Sequence[Job]]
    data: Sequence[tuple[Tensor, Tensor]]
    central: tuple[Tensor, Tensor]
    start: Params
    personal: frozenset[str]
    local: Any
    weighting: str
    drawn: Mapping[str, Any] = field(default_factory=dict)
    tests: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class Book:
    """The tensors that must be there at the end, named as in raysim's checkpoints.

    shared: the shared model. private: the state of each client that took part. server: the server's
    state. columns: columns of the history, a value for each round. own: for each client, the
    tensors of the model that it is scored with.
    """

    shared: Mapping[str, Tensor]
    private: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    server: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
