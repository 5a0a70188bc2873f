"""The replicas of a run: a server for each, their exchanges and their mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.declare import Declarations
from raysim.api.messages import Failure, GroupSums, Job, PublishedVersion, Update
from raysim.api.setup import MethodDeclaration
from raysim.api.topology import ClusterView, MixingRow, Network
from raysim.simulation.planner import PlannedAggregation
from raysim.simulation.replica_memory import ReplicaMemory
from raysim.simulation.server import Server
from raysim.simulation.versions import Versions
from raysim.vectors.tree_sum import add_up, weighted_sum

MEAN_REPLICAS = 64  # replicas on disk that are read at once for a mean; a power of 2

Arrival: TypeAlias = Update | Failure


class Replicas:
    """The replicas (models of the server) of a run, each with a `Server` of its own.

    Attributes:
    - version: the number of the run's aggregations so far, over all replicas.
    - report: columns for the history's row of the last aggregation.
    - numbers: an integer for each replica, which changes with the replica's model. Replicas with
      equal models may have the same integer.
    - clients_of: int64 [clients], the replica that serves each client. If clients choose their
      replica, it is the one that the client trained last.
    - cluster_state: the arrays of the rule that moves clients between replicas.

    set_clients: called with `clients_of` and a server, to tell the server its clients. None if
    clients never move.
    budget: the most bytes that replicas may use in memory. If they need more, idle replicas are
    moved to a file in `folder`.
    """

    def __init__(
        self,
        network: Network,
        servers: Sequence[Server],
        declarations: Declarations,
        set_clients: Callable[[np.ndarray, Server], None] | None = None,
        budget: float = math.inf,
        folder: str = "",
    ):
        self.network, self.servers = network, servers
        self.is_single = len(servers) == 1
        self._memory = ReplicaMemory(servers, budget, folder, not network.on_clients)
        self.version = 0
        self.report: dict[str, float] = {}
        self.numbers = [0] * len(servers)
        self._last_number = 0
        if network.chosen_by_loss:  # all models are different
            self.numbers = list(range(len(servers)))
            self._last_number = len(servers) - 1
        self._set_clients = set_clients
        self.clients_of = network.replica_of
        self.cluster_state: dict[str, np.ndarray] = {}
        if network.moves_clients:
            self.clients_of = np.array(network.replica_of)
        if network.clusters is not None:
            floats = declarations.layout.trained
            self.cluster_state = network.clusters.state(len(self.clients_of), floats)
        self._changed: list[int] = list(range(len(servers)))  # not published yet
        self._sends = any(
            send.to == "all" for declared in declarations.methods for send in declared.sends
        )

    @property
    def first(self) -> Server:
        """The server of the first replica."""
        return self.servers[0]

    @property
    def summable(self) -> bool:
        """True if a worker may send the sum of several updates instead of each update.

        False if a method needs single updates, or if clients move between replicas.
        """
        return self.first.summable and not self.network.moves_clients

    @property
    def bytes_on_disk(self) -> int:
        """The bytes of all replicas on disk."""
        return self._memory.bytes_on_disk

    def read(self, replica: int) -> Server:
        """Make room in memory for a replica's tensors, and return the replica's server.

        Call this function directly before you read tensors of the server. Tensors that are on disk
        are then loaded when you read them.
        """
        self._memory.note_read(replica)
        return self.servers[replica]

    def replica_of(self, client: int) -> int:
        """Return the replica that serves a client."""
        return 0 if self.is_single else self.clients_of.item(client)

    def server_of(self, client: int) -> Server:
        """Return the server of the replica that serves a client."""
        return self.servers[self.replica_of(client)]

    def assemble(
        self, declared: MethodDeclaration, parts: Sequence[Mapping[str, np.ndarray]]
    ) -> None:
        """Let a method make server state before round 0; all replicas get the same state.

        declared: the method's declaration.
        parts: for each client, the arrays that it sent, by "method.name". Arrays of other methods
        are ignored.
        """
        first, *other_servers = self.servers
        first.assemble(declared, parts)
        for server in other_servers:
            # Replicas on clients have no hooks that could change a tensor.
            shares = self.network.on_clients
            for name, tensor in first.state.items():
                server.state[name] = tensor if shares else tensor.clone()

    # --- versions ---------------------------------------------------------------------------------
    def publish(self, versions: Versions) -> None:
        """Store the version of every replica that changed since the last call.

        If the replicas in memory exceed the budget, move idle replicas to disk. A replica is idle
        if no job in flight started from its current version.
        """
        moved: set[int] = set()
        if not self.is_single:
            moved = self._memory.keep_within_budget(
                self._changed, lambda replica: versions.is_held(self.numbers[replica])
            )
        for replica in self._changed:
            number, make = self.numbers[replica], functools.partial(self._published, replica)
            versions.publish(replica, number, make, replica in moved)
        for replica in moved:
            versions.unload(self.numbers[replica])
        self._changed = []

    def _published(self, replica: int) -> PublishedVersion:
        return self.read(replica).published(self.numbers[replica])

    # --- clients that move ------------------------------------------------------------------------
    def assign(self, jobs: Sequence[Job], results: Sequence[Arrival]) -> Sequence[Job]:
        """Return the jobs of an aggregation, each with the replica that aggregates its update.

        This is the replica that serves the client now. If clients choose their replica by the loss,
        the chosen replica serves the client from now on.
        """
        if not self.network.moves_clients:
            return jobs
        assigned: list[Job] = []
        moved: set[int] = set()
        for job, result in zip(jobs, results, strict=True):
            replica, base = self.replica_of(job.client), job.base
            if self.network.chosen_by_loss and isinstance(result, Update):
                chosen = result.replica
                base = job.bases[chosen]
                if chosen != replica:
                    moved |= {replica, chosen}
                    self.clients_of[job.client] = replica = chosen
            assigned.append(job._replace(replica=replica, base=base))
        self._tell_servers(moved)
        return assigned

    def _tell_servers(self, replicas: Iterable[int]) -> None:
        assert self._set_clients is not None, "only for replicas whose clients move"
        for replica in replicas:
            self._set_clients(self.clients_of, self.servers[replica])

    def _regroup(self, by_replica: Mapping[int, Sequence[Update]]) -> set[int]:
        """Let the topology's cluster rule move clients to replicas that have no clients.

        Return the replicas with new clients. Each of them first becomes a copy of the replica that
        the clients leave.
        by_replica: for each replica, the updates of its clients, in the order of aggregation.
        """
        rule = self.network.clusters
        if rule is None:
            return set()
        changed: set[int] = set()
        columns: dict[str, list[float]] = {}
        trained = self.first.layout.trained
        for replica, updates in by_replica.items():
            server, report = self.servers[replica], dict[str, float]()
            weights = server.counts.astype(np.float64)
            if server.weighting == "uniform":
                weights = (server.counts > 0).astype(np.float64)
            view = ClusterView(
                replica,
                np.flatnonzero(server.counts),
                self.version + 1,
                np.array([update.client for update in updates], np.int64),
                [update.delta[:trained] for update in updates if update.delta is not None],
                weights,
                self._free_replicas(),
                self.cluster_state,
                report,
            )
            for target, clients in rule.regroup(view).items():
                self._check_move(target, clients, view)
                self._copy_server(server, self.servers[target])
                self.clients_of[clients] = target
                changed.add(target)
                self._tell_servers((replica, target))
            for name, value in report.items():
                columns.setdefault(name, []).append(value)
        self.report |= {name: math.fsum(values) / len(values) for name, values in columns.items()}
        self.report["topology.clusters"] = len(self.servers) - len(self._free_replicas())
        return changed

    def _free_replicas(self) -> list[int]:
        return [replica for replica, server in enumerate(self.servers) if not server.able]

    def _check_move(self, target: int, clients: np.ndarray, view: ClusterView) -> None:
        """Raise ValueError if the cluster rule may not move these clients to a replica.

        The replica `target` must have no clients, and at least one client must stay in the replica
        that the clients leave.
        """
        is_member = np.isin(clients, view.members)
        reason = ""
        if target not in view.free:
            reason = "the target is not in view.free"
        elif not is_member.all():
            reason = "some clients are not in this replica"
        elif len(clients) >= len(view.members):
            reason = "no client would stay"
        if reason:
            raise ValueError(
                f"topology: {type(self.network.clusters).__name__}.regroup moves clients "
                f"{clients.tolist()} of replica {view.replica} to replica {target}: {reason}. "
                f"Choose the target from view.free, which is {list(view.free)}. Choose the clients "
                "from view.members, but not all of them."
            )

    @staticmethod
    def _copy_server(source: Server, target: Server) -> None:
        """Copy the vector, the version and the server state of a replica to another replica."""
        target.vector, target.counters = source.vector, source.counters
        target.version = source.version
        target.state = {name: tensor.clone() for name, tensor in source.state.items()}

    # --- an aggregation ---------------------------------------------------------------------------
    def receive(self, jobs: Sequence[Job], results: Sequence[Arrival]) -> list[Arrival]:
        """Let methods replace the updates of an aggregation when they arrive.

        Return the results with the replaced updates.
        results: an update or a failure for each job.
        """
        if self.is_single:
            return self.first.receive(results)
        received = list(results)
        for replica, positions in _positions_by_replica(jobs).items():
            arrivals = self.servers[replica].receive([results[position] for position in positions])
            for position, arrival in zip(positions, arrivals, strict=True):
                received[position] = arrival
        return received

    def step(
        self,
        aggregation: PlannedAggregation,
        jobs: Sequence[Job],
        updates: Sequence[Update | None],
        sums: GroupSums,
        versions: Versions,
    ) -> None:
        """Make the next version of each replica that has updates; exchange if the plan says so.

        jobs: in the order in which they are aggregated.
        updates: one for each job; None for a failed job.
        sums: the sums of updates that workers have computed, by the numbers of their jobs.
        Raises AggregationError if a next version cannot be made.
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
        have_exchanged: bool,
    ) -> set[int]:
        """Let each replica that has jobs aggregate their updates; return the changed replicas.

        have_exchanged: True if the replicas have exchanged already in this aggregation, so that
        their vectors differ from the published versions.
        """
        staleness = aggregation.staleness
        reports: dict[str, list[float]] = {}
        by_replica = _positions_by_replica(jobs)
        for replica, positions in by_replica.items():
            server = self.read(replica)
            server.version = aggregation.site_version
            server.has_moved = have_exchanged
            bases = _Bases(
                versions, {jobs[position].version: jobs[position].base for position in positions}
            )
            server.step(
                [updates[position] for position in positions],
                sums,
                [staleness[position] for position in positions],
                bases,
            )
            for name, value in server.report.items():
                reports.setdefault(name, []).append(value)
        self.report = {name: math.fsum(values) / len(values) for name, values in reports.items()}
        present = {
            replica: [update for position in positions if (update := updates[position]) is not None]
            for replica, positions in by_replica.items()
        }
        if self.network.chosen_by_loss:
            for replica in range(len(self.servers)):
                share = len(present.get(replica, ())) / max(1, len(updates))
                self.report[f"topology.share_{replica}"] = share
        return set(by_replica) | self._regroup(present)

    def _exchange(self, replicas: Sequence[int]) -> set[int]:
        """Let replicas exchange in an aggregation; return the replicas that may have changed.

        Parameters and float buffers are averaged. Integer buffers get the maximum. Server state is
        not exchanged.
        replicas: the replicas that aggregate.
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
        """Return the weighted mean of replicas' vectors, and the maximum of their integer buffers.

        The maximum is elementwise.
        row: the numbers of the replicas (`row.sources`) and their weights (`row.weights`).
        """
        sources = [self.read(source) for source in row.sources]
        vectors = [server.vector.numpy() for server in sources]
        counters = np.max([server.counters.numpy() for server in sources], axis=0)
        return weighted_sum(vectors, row.weights), torch.from_numpy(counters)

    def _give_numbers(self) -> None:
        """Set new integers in `self.numbers` for the replicas that the last aggregation changed.

        Changed replicas with the same vector get the same integer, unless a method sends further
        tensors with the vector.
        """
        number_of: dict[int, int] = {}
        for replica in self._changed:
            vector = replica if self._sends else id(self.servers[replica].vector)
            if vector not in number_of:
                self._last_number += 1
                number_of[vector] = self._last_number
            self.numbers[replica] = number_of[vector]

    # --- the mean of the replicas -----------------------------------------------------------------
    def scored(self) -> tuple[Tensor, Tensor]:
        """Return the model to score: the weighted mean of all replicas, [layout.shared].

        A replica is represented by its vector, unless a method declares another vector, such as a
        mean of versions. The weights are those of `mean`. Also return the elementwise maximum of
        the integer buffers, [layout.shared_counters].
        """
        return self._mean_of([server.scored() for server in self.servers])

    def mean(self) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of all replicas' vectors, [layout.shared].

        Also return the elementwise maximum of the integer buffers, [layout.shared_counters].
        If clients move between replicas, a replica's weight is the number of its clients' training
        samples. Otherwise the topology gives fixed weights.
        """
        return self._mean_of([server.vector for server in self.servers])

    def _mean_weights(self) -> list[float]:
        """Return the weight of each replica in the mean of all replicas.

        If clients move between replicas, a replica's weight is the share of all samples that its
        clients have. Otherwise the topology gives fixed weights.
        """
        if not self.network.moves_clients:
            return list(self.network.mean_weights.tolist())
        samples = np.array([server.samples for server in self.servers], np.float64)
        return list((samples / samples.sum()).tolist())

    def _mean_of(self, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if all(vector is vectors[0] for vector in vectors):  # for example after an exchange
            return vectors[0], self.first.counters
        counters = np.max([server.counters.numpy() for server in self.servers], axis=0)
        return self._weighted_mean(vectors), torch.from_numpy(counters)

    def _weighted_mean(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the mean of vectors, weighted by the replicas' weights.

        vectors: one vector of each replica.
        """
        weights = self._mean_weights()
        arrays = [vector.numpy() for vector in vectors]
        if not self.bytes_on_disk:
            return weighted_sum(arrays, weights)
        # Few replicas are in memory at once. Each sum is one part of the tree, so the bits are the
        # same.
        sums: dict[range, np.ndarray] = {}
        for start in range(0, len(arrays), MEAN_REPLICAS):
            part = range(start, min(start + MEAN_REPLICAS, len(arrays)))
            for replica in part:
                self.read(replica)
            members = slice(part.start, part.stop)
            sums[part] = weighted_sum(arrays[members], weights[members]).numpy()
        total = add_up(list(sums), *sums.values())
        assert total is not None, "there are replicas"
        return torch.from_numpy(total)

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the replicas to their mean.

        The result is sqrt(sum_r w_r |x_r - m|^2). x_r are the shared parameters (without buffers)
        of replica r, w_r is the weight of r, and m = sum_r w_r x_r.
        """
        trained = self.first.layout.trained
        mean = self.mean()[0][:trained]
        total = 0.0
        for replica, weight in enumerate(self._mean_weights()):
            vector = self.read(replica).vector[:trained]
            distance = torch.linalg.vector_norm(vector - mean, dtype=torch.float64)
            total += weight * float(distance) ** 2
        return math.sqrt(total)

    # --- checkpoints ------------------------------------------------------------------------------
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint needs, by name; {} if clients never move.

        They are `clients_of` and the arrays of the rule that moves clients.
        """
        if not self.network.moves_clients:
            return {}
        rule = {f"rule/{name}": array for name, array in self.cluster_state.items()}
        return {"clients_of": self.clients_of, **rule}

    def restore(
        self, version: int, numbers: Sequence[int], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Continue from a checkpoint; the server of each replica must already be restored.

        version: the number of aggregations before the checkpoint.
        numbers: the attribute `numbers` in the checkpoint.
        arrays: the result of the method `arrays` in the checkpoint.
        """
        self.version, self.numbers = version, list(numbers)
        self._last_number = max(numbers)
        if not arrays:
            return
        self.clients_of = np.array(arrays["clients_of"])
        for name, array in self.cluster_state.items():
            array[...] = arrays[f"rule/{name}"]
        self._tell_servers(range(len(self.servers)))


class _Bases(Mapping[int, PublishedVersion]):
    """The base versions of one replica's jobs, as a mapping from `Job.version` to the version.

    versions: the published versions of all replicas, by `Job.base`.
    number_of: maps `Job.version` to `Job.base` for this replica's jobs.
    """

    def __init__(self, versions: Versions, number_of: Mapping[int, int]):
        self._versions, self._number_of = versions, number_of

    def __getitem__(self, version: int) -> PublishedVersion:
        return self._versions[self._number_of[version]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)


def _positions_by_replica(jobs: Sequence[Job]) -> dict[int, list[int]]:
    """Map each replica to the positions of its jobs in `jobs`."""
    positions: dict[int, list[int]] = {}
    for position, job in enumerate(jobs):
        positions.setdefault(job.replica, []).append(position)
    return dict(sorted(positions.items()))


def _keeps_vector(row: MixingRow) -> bool:
    return row.targets == row.sources and row.weights == (1.0,)
