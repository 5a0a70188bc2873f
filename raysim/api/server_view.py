"""What hooks see of the server, and of one aggregation."""

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
    """What one step of the server is made of, as one method sees it.

    updates: in the order of acceptance. deltas: [layout.shared] of each update, on the CPU; empty
    in a run whose workers may add updates up, which is one where no method fills `weigh` or
    `combine` or declares `read_updates`. weights: of each update, not normalised. staleness: of
    each update, the aggregations between its base version and the current one. bases: what updates
    started from, by version. combined: [layout.trained] the direction as it was combined, before a
    method's `step` changed it; known in `step`.
    """

    updates: Sequence[Update]
    deltas: Sequence[Tensor]
    weights: Sequence[float]
    staleness: Sequence[int]
    bases: Mapping[int, PublishedVersion]
    normaliser: Callable[[Sequence[float]], float] = sum  # from the weights to the divisor
    method: str = ""
    combined: Tensor | None = None

    @property
    def divisor(self) -> float:
        """Return what the weighted sum is divided by: the sum of weights, or a method's choice."""
        return float(self.normaliser(self.weights))

    @property
    def clients(self) -> list[int]:
        """Return the client of each update."""
        return [update.client for update in self.updates]

    def uploads(self, name: str) -> list[Tensor]:
        """Return what each update brought under a name that the method declared as an upload."""
        key = f"{self.method}.{name}"
        return [torch.from_numpy(update.extras[key]) for update in self.updates]

    def with_weights(
        self,
        weights: Sequence[float],
        normaliser: Callable[[Sequence[float]], float] | None = None,
    ) -> Aggregation:
        """Return the same updates with other weights, and with another divisor if one is given."""
        return replace(self, weights=weights, normaliser=normaliser or self.normaliser)

    def base(self, update: Update) -> Tensor:
        """Return the vector [layout.shared] that an update started from."""
        return torch.from_numpy(self.bases[update.version].vector)


class ServerView:
    """The server as one method sees it. Only `state` and `report` are the method's to write.

    state: server state that the method declared, by its own names; part of every checkpoint.
    report: numbers for this aggregation's row of the history.
    """

    def __init__(self, server: Any, method: str):
        self._server = server
        self._method = method
        self.state: Entries[Tensor] = Entries(server, "state", method)
        self.report: Entries[float] = Entries(server, "report", method)

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in the flat vector."""
        return self._server.layout  # type: ignore[no-any-return]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._server.seed  # type: ignore[no-any-return]

    @property
    def task(self) -> Task:
        """What is learnt."""
        return self._server.task  # type: ignore[no-any-return]

    @property
    def local(self) -> Local:
        """The settings `local.*`: `server.local.rate(server.version)` is clients' learning rate."""
        return self._server.local  # type: ignore[no-any-return]

    @property
    def version(self) -> int:
        """Aggregations so far."""
        return self._server.version  # type: ignore[no-any-return]

    @property
    def weighting(self) -> Weighting:
        """How updates are weighted before a method changes it."""
        return self._server.weighting  # type: ignore[no-any-return]

    @property
    def summation_group(self) -> int:
        """How many consecutive updates are added up together."""
        return self._server.group  # type: ignore[no-any-return]

    @property
    def max_updates(self) -> int:
        """The most updates in one aggregation."""
        return self._server.size  # type: ignore[no-any-return]

    @property
    def sample_counts(self) -> np.ndarray:
        """int64 [clients] training samples."""
        return self._server.counts  # type: ignore[no-any-return]

    @property
    def clients_with_samples(self) -> int:
        """Clients that have training samples."""
        return self._server.able  # type: ignore[no-any-return]

    @property
    def total_samples(self) -> int:
        """Training samples of all clients."""
        return self._server.samples  # type: ignore[no-any-return]

    @property
    def population(self) -> int:
        """All clients except the unseen ones (`evaluate.unseen`): N of the papers."""
        return self._server.population  # type: ignore[no-any-return]

    @property
    def clients(self) -> int:
        """All clients of the run."""
        return self._server.clients  # type: ignore[no-any-return]

    @property
    def vector(self) -> Tensor:
        """[layout.shared] the current version."""
        return self._server.vector  # type: ignore[no-any-return]

    @property
    def params(self) -> Tensor:
        """[layout.trained] the shared trainable parameters of the current version."""
        return self._server.params  # type: ignore[no-any-return]

    @property
    def counters(self) -> Tensor:
        """[layout.shared_counters] integer buffers of the current version."""
        return self._server.counters  # type: ignore[no-any-return]

    @property
    def sample_ends(self) -> np.ndarray:
        """float64 [able]: where each client's share of [0, 1) ends, by its samples."""
        return self._server.sample_ends  # type: ignore[no-any-return]

    def stream(self, purpose: str) -> np.random.Generator:
        """Return the random generator of the method's purpose and this version."""
        return self._server.stream(f"{self._method}.{purpose}")  # type: ignore[no-any-return]

    def weight(self, client: int) -> float:
        """Return a client's weight before a method changes it."""
        return self._server.weight(client)  # type: ignore[no-any-return]
