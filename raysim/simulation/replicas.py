"""The replicas of a run: a server for each, their exchanges and their mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.declare import Declarations
from raysim.api.messages import Failure, GroupSums, Job, PublishedVersion, Update
from raysim.api.setup import MethodDeclaration
from raysim.api.topology import MixingRow, Network
from raysim.simulation.planner import PlannedAggregation
from raysim.simulation.server import Server
from raysim.simulation.versions import Versions
from raysim.vectors.blocks import fold_groups

Arrival: TypeAlias = Update | Failure


class Replicas:
    """The servers of all replicas. With one replica it does what its server does.

    version: the aggregations of the run so far, of any replica. report: columns of the last
    aggregation's row. numbers: for each replica the number of its published version. A replica gets
    the next number when it changes; replicas that are equal may share one.
    """

    def __init__(self, network: Network, servers: Sequence[Server], declarations: Declarations):
        self.network, self.servers = network, servers
        self.version = 0
        self.report: dict[str, float] = {}
        self.numbers = [0] * len(servers)
        self._last_number = 0
        self._changed: list[int] = list(range(len(servers)))  # not published yet
        self._sends = any(send.to == "all" for each in declarations.methods for send in each.sends)

    @property
    def first(self) -> Server:
        """The server of the first replica."""
        return self.servers[0]

    @property
    def is_single(self) -> bool:
        """True if there is one replica."""
        return len(self.servers) == 1

    @property
    def summable(self) -> bool:
        """True if workers may sum the updates of a replica."""
        return self.first.summable

    def replica_of(self, client: int) -> int:
        """Return the replica that serves a client."""
        return 0 if self.is_single else self.network.replica_of.item(client)

    def server_of(self, client: int) -> Server:
        """Return the server of the replica that serves a client."""
        return self.servers[self.replica_of(client)]

    def assemble(
        self, declared: MethodDeclaration, parts: Sequence[Mapping[str, np.ndarray]]
    ) -> None:
        """Let a method make server state before round 0, the same for all replicas."""
        first, *others = self.servers
        first.assemble(declared, parts)
        for server in others:
            # Replicas on clients have no hooks that could change a tensor.
            shares = self.network.on_clients
            for name, tensor in first.state.items():
                server.state[name] = tensor if shares else tensor.clone()

    # --- versions ---------------------------------------------------------------------------------
    def publish(self, versions: Versions) -> None:
        """Store the versions of all replicas that changed since the last call."""
        for replica in self._changed:
            number = self.numbers[replica]
            versions.publish(replica, number, functools.partial(self._published, replica))
        self._changed = []

    def _published(self, replica: int) -> PublishedVersion:
        return replace(self.servers[replica].published(), number=self.numbers[replica])

    # --- an aggregation ---------------------------------------------------------------------------
    def receive(self, jobs: Sequence[Job], results: Sequence[Arrival]) -> list[Arrival]:
        """Let methods replace the updates of an aggregation on arrival; return all updates."""
        if self.is_single:
            return self.first.receive(results)
        received = list(results)
        for replica, places in _places_by_replica(jobs).items():
            arrivals = self.servers[replica].receive([results[place] for place in places])
            for place, arrival in zip(places, arrivals, strict=True):
                received[place] = arrival
        return received

    def step(
        self,
        aggregation: PlannedAggregation,
        jobs: Sequence[Job],
        updates: Sequence[Update | None],
        sums: GroupSums,
        versions: Versions,
    ) -> None:
        """Make the next version of every replica with updates; let replicas exchange if planned.

        jobs, updates: in the order of acceptance; None for a failed client. sums: the sums that
        workers made. versions: the vectors that updates started from. Raises AggregationError.
        """
        staleness = aggregation.staleness
        changed: set[int] = set()
        mixes_first = aggregation.meets and self.network.mixes_first
        if mixes_first:
            changed = self._exchange(sorted({job.replica for job in jobs}))
        if self.is_single:
            self.first.step(updates, sums, staleness, versions)
            self.report = self.first.report
            changed.add(0)
        else:
            changed |= self._step_each(aggregation, jobs, updates, sums, versions, mixes_first)
        if aggregation.meets and not mixes_first:
            changed |= self._exchange(sorted({job.replica for job in jobs}))
        self.version += 1
        self._changed = sorted(changed)
        self._give_numbers()

    def _step_each(
        self,
        aggregation: PlannedAggregation,
        jobs: Sequence[Job],
        updates: Sequence[Update | None],
        sums: GroupSums,
        versions: Versions,
        mixes_first: bool,
    ) -> set[int]:
        """Make the step of each replica with jobs; return these replicas."""
        staleness = aggregation.staleness
        reports: dict[str, list[float]] = {}
        by_replica = _places_by_replica(jobs)
        for replica, places in by_replica.items():
            server = self.servers[replica]
            server.version = aggregation.site_version
            server.has_moved = mixes_first
            bases = _Bases(versions, {jobs[place].version: jobs[place].base for place in places})
            server.step(
                [updates[place] for place in places],
                sums,
                [staleness[place] for place in places],
                bases,
            )
            for name, value in server.report.items():
                reports.setdefault(name, []).append(value)
        self.report = {name: math.fsum(values) / len(values) for name, values in reports.items()}
        return set(by_replica)

    def _exchange(self, replicas: Sequence[int]) -> set[int]:
        """Let replicas exchange after an aggregation; return those that may have changed.

        Buffers of floats are averaged like parameters; integer buffers take the maximum. Server
        state stays with its replica.
        """
        changed: set[int] = set()
        for rows in self.network.exchange(self.version, replicas):
            means = [(row, *self._mean(row)) for row in rows if not _keeps_vector(row)]
            for row, vector, counters in means:
                for target in row.targets:
                    self.servers[target].vector = vector
                    self.servers[target].counters = counters
                changed.update(row.targets)
        return changed

    def _mean(self, row: MixingRow) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of some replicas, and the maximum of their counters."""
        sources = [self.servers[source] for source in row.sources]
        vectors = [server.vector.numpy() for server in sources]
        counters = np.max([server.counters.numpy() for server in sources], axis=0)
        return fold_groups([(vectors, row.weights)]), torch.from_numpy(counters)

    def _give_numbers(self) -> None:
        """Give the changed replicas new numbers. Those with one vector share a number."""
        number_of: dict[int, int] = {}
        for replica in self._changed:
            vector = replica if self._sends else id(self.servers[replica].vector)
            if vector not in number_of:
                self._last_number += 1
                number_of[vector] = self._last_number
            self.numbers[replica] = number_of[vector]

    # --- the mean of the replicas -----------------------------------------------------------------
    def scored(self) -> tuple[Tensor, Tensor]:
        """Return the mean of the vectors that evaluation uses [layout.shared], and the counters."""
        return self._mean_of([server.scored() for server in self.servers])

    def mean(self) -> tuple[Tensor, Tensor]:
        """Return the mean of the replicas [layout.shared], and the maximum of their counters."""
        return self._mean_of([server.vector for server in self.servers])

    def _mean_of(self, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if all(vector is vectors[0] for vector in vectors):  # as after a meeting
            return vectors[0], self.first.counters
        weights = self.network.mean_weights.tolist()
        counters = np.max([server.counters.numpy() for server in self.servers], axis=0)
        arrays = [vector.numpy() for vector in vectors]
        return fold_groups([(arrays, weights)]), torch.from_numpy(counters)

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the replicas' parameters to their mean."""
        trained = self.first.layout.trained
        mean = self.mean()[0][:trained]
        total = 0.0
        for server, weight in zip(self.servers, self.network.mean_weights.tolist(), strict=True):
            distance = torch.linalg.vector_norm(server.vector[:trained] - mean, dtype=torch.float64)
            total += weight * float(distance) ** 2
        return math.sqrt(total)

    # --- checkpoints ------------------------------------------------------------------------------
    def restore(self, version: int, numbers: Sequence[int]) -> None:
        """Continue from a checkpoint; the servers are already restored."""
        self.version, self.numbers = version, list(numbers)
        self._last_number = max(numbers)


class _Bases(Mapping[int, PublishedVersion]):
    """The vectors that the updates of one replica started from, by the replica's versions."""

    def __init__(self, versions: Versions, number_of: Mapping[int, int]):
        self._versions, self._number_of = versions, number_of

    def __getitem__(self, version: int) -> PublishedVersion:
        return self._versions[self._number_of[version]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)


def _places_by_replica(jobs: Sequence[Job]) -> dict[int, list[int]]:
    """Return the positions of each replica's jobs, in ascending order of replicas."""
    places: dict[int, list[int]] = {}
    for place, job in enumerate(jobs):
        places.setdefault(job.replica, []).append(place)
    return dict(sorted(places.items()))


def _keeps_vector(row: MixingRow) -> bool:
    return row.targets == row.sources and row.weights == (1.0,)
