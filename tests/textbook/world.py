"""The types of a textbook's arguments and results. They do not depend on raysim's training code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Params = dict[str, Tensor]  # By full name, such as "model.extractor.1.weight".


@dataclass(frozen=True)
class Job:
    """One job of one client.

    turn: the index of the job among the client's jobs.
    version: the received version.
    samples: the number of the client's training samples.
    batches: for each step, inputs float64 [B, ...] and labels int64 [B].
    draws: for each step, a method's random values by name.
    """

    client: int
    turn: int
    version: int
    samples: int
    batches: Sequence[tuple[Tensor, Tensor]]
    draws: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class World:
    """Everything that a textbook needs to compute the results of a run by itself.

    clients, classes: the numbers of clients and of classes.
    rounds: the jobs of each aggregation, in order.
    data, tests: the inputs and labels of each client, for training and for tests.
    central: the inputs and labels of the central test set.
    start: the initial values of all networks, buffers included, without frozen parameters.
    personal: the names of the tensors that stay on the client.
    local: the settings local.*.
    weighting: "samples" or "uniform", before a method's hooks change the weights.
    drawn: all other values that a textbook needs, by name: frozen parameters, and random values
    that raysim drew.
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
    """The results that raysim must have at the end, named as in raysim's checkpoints.

    shared, server: the shared model and the server state.
    private: the state of each client that took part.
    columns: the history's columns, one value per round.
    own: the tensors with which each client is scored.
    """

    shared: Mapping[str, Tensor]
    private: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    server: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
