"""Define what a method's hooks see on the server.

They see the method's server state, settings of the run, and the updates of one aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.declarations import Local, Task
from raysim.api.entries import Entries
from raysim.api.messages import PublishedVersion, Update
from raysim.vectors.layout import Layout

Weighting: TypeAlias = Literal["samples", "uniform"]


@dataclass(frozen=True)
class Aggregation:
    """The updates of one aggregation, as one method sees them.

    updates: the updates, in the planner's order.
    deltas: `Update.delta` of each update, [layout.shared], on the CPU; empty unless a method
    overrides `weigh` or `combine`, or calls `Setup.read_updates` or `Setup.change_updates`.
    weights: one for each update, not normalised.
    bases: the base versions, by `update.version`.
    normaliser: a function of the weights that returns the divisor of the weighted sum.
    combined: in the hook `step`, the result [layout.trained] of `combine`; else None.
    """

    updates: Sequence[Update]
    deltas: Sequence[Tensor]
    weights: Sequence[float]
    staleness: Sequence[int]
    bases: Mapping[int, PublishedVersion]
    normaliser: Callable[[Sequence[float]], float] = sum
    method: str = ""
    combined: Tensor | None = None

    @property
    def divisor(self) -> float:
        """The number by which the weighted sum of the updates is divided.

        This is the sum of the weights, unless a method has passed a `normaliser` to `with_weights`.
        """
        return float(self.normaliser(self.weights))

    @property
    def clients(self) -> list[int]:
        """The client of each update."""
        return [update.client for update in self.updates]

    def uploads(self, name: str) -> list[Tensor]:
        """Return the tensors that clients uploaded for the method, one for each update.

        name: the name that the method declared with `Setup.upload`.
        """
        key = f"{self.method}.{name}"
        return [torch.from_numpy(update.extras[key]) for update in self.updates]

    def with_weights(
        self,
        weights: Sequence[float],
        normaliser: Callable[[Sequence[float]], float] | None = None,
    ) -> Aggregation:
        """Return the same updates with other weights.

        weights: a weight for each update.
        normaliser: a function of the weights that returns the number by which the weighted sum of
        the updates is divided; None keeps the current function.
        """
        return replace(self, weights=weights, normaliser=normaliser or self.normaliser)

    def base(self, update: Update) -> Tensor:
        """Return the version [layout.shared] that the job of an update received."""
        return torch.from_numpy(self.bases[update.version].vector)


class ServerView:
    """The server's data, as the hooks of one method see them.

    Hooks may change only the entries of these two attributes:
    state: the method's server state: tensors by the names that `setup` passed to
    `Setup.server_state`. Checkpoints contain them.
    report: numbers for this aggregation's row of the history, by name.
    """

    def __init__(self, server: Any, method: str):
        self._server = server
        self._method = method
        self.state: Entries[Tensor] = Entries(server, "state", method)
        self.report: Entries[float] = Entries(server, "report", method)

    @property
    def layout(self) -> Layout:
        """The position of each tensor in the flat vector."""
        return self._server.layout  # type: ignore[no-any-return]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._server.seed  # type: ignore[no-any-return]

    @property
    def task(self) -> Task:
        """The learning task: shapes, classes, loss and metrics."""
        return self._server.task  # type: ignore[no-any-return]

    @property
    def local(self) -> Local:
        """The settings `local.*`; `local.rate(version)` is the learning rate of clients."""
        return self._server.local  # type: ignore[no-any-return]

    @property
    def version(self) -> int:
        """The number of aggregations so far."""
        return self._server.version  # type: ignore[no-any-return]

    @property
    def replica(self) -> int:
        """The number of this replica, from 0; 0 if the topology has only one model."""
        return self._server.replica  # type: ignore[no-any-return]

    @property
    def weighting(self) -> Weighting:
        """The weights of updates before a method changes them: "samples" or "uniform"."""
        return self._server.weighting  # type: ignore[no-any-return]

    @property
    def max_updates(self) -> int:
        """The largest number of updates in one aggregation, without late updates."""
        return self._server.size  # type: ignore[no-any-return]

    @property
    def sample_counts(self) -> np.ndarray:
        """The number of training samples of each client: int64 [clients].

        With several replicas, the entry of a client that this replica does not serve is 0. If each
        client stores its own replica, as with gossip, all entries are the true numbers.
        """
        return self._server.counts  # type: ignore[no-any-return]

    @property
    def clients_with_samples(self) -> int:
        """The number of clients whose entry in `sample_counts` is above 0."""
        return self._server.able  # type: ignore[no-any-return]

    @property
    def total_samples(self) -> int:
        """The number of training samples of the clients of this replica: `sum(sample_counts)`."""
        return self._server.samples  # type: ignore[no-any-return]

    @property
    def population(self) -> int:
        """The number of clients that this replica serves, except unseen ones; papers call it N.

        If each client stores its own replica, as with gossip, it is the number of all clients.
        """
        return self._server.population  # type: ignore[no-any-return]

    @property
    def clients(self) -> int:
        """The number of all clients of the run."""
        return self._server.clients  # type: ignore[no-any-return]

    @property
    def vector(self) -> Tensor:
        """The current version: [layout.shared]."""
        return self._server.vector  # type: ignore[no-any-return]

    @property
    def params(self) -> Tensor:
        """The shared trainable parameters [layout.trained] of the current version."""
        return self._server.params  # type: ignore[no-any-return]

    @property
    def counters(self) -> Tensor:
        """The integer buffers [layout.shared_counters] of the current version."""
        return self._server.counters  # type: ignore[no-any-return]

    @property
    def sample_ends(self) -> np.ndarray:
        """The cumulative shares of training samples: float64 [clients_with_samples].

        Entry k is the share of all samples that the first k + 1 clients have. Clients whose entry
        in `sample_counts` is 0 are left out.
        """
        return self._server.sample_ends  # type: ignore[no-any-return]

    def stream(self, purpose: str) -> np.random.Generator:
        """Return a new random generator for a purpose of the method in the current version.

        Generators of the same purpose, version and replica draw the same numbers.
        purpose: a name for the use of the numbers, such as "noise".
        """
        return self._server.stream(f"{self._method}.{purpose}")  # type: ignore[no-any-return]

    def weight(self, client: int) -> float:
        """Return the weight of a client's updates, before methods change it."""
        return self._server.weight(client)  # type: ignore[no-any-return]
