"""Define topologies: which models the server has, and which clients train each model.

A replica is one model of the server, with its server state. A client starts from the replica that
serves it, and its update is aggregated into that replica. An exchange replaces each replica by a
weighted mean of several replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from raysim.primitives.streams import stream

WEIGHT_TOLERANCE = 1e-6  # the sum of a replica's weights may differ from 1 by this much
MAX_SHOWN = 8  # at most so many components, and replicas of a component, in a warning

# For each replica the weights of all replicas in its next vector: dense [replicas, replicas], or
# a dictionary of weights by replica for each replica.
Weights: TypeAlias = np.ndarray | Sequence[Mapping[int, float]]


class Mixing(NamedTuple):
    """A mixing matrix: row r has the weights of the mean that becomes replica r's next vector.

    Only weights above 0 are stored.

    starts: int64 [replicas + 1]. Row r has the entries from starts[r] to starts[r + 1] - 1.
    sources: int64, the replica of each weight, ascending within a row.
    weights: float64; those of a row sum to 1.
    """

    starts: np.ndarray
    sources: np.ndarray
    weights: np.ndarray

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.starts) - 1

    def row(self, replica: int) -> tuple[list[int], list[float]]:
        """Return a row of the matrix: the averaged replicas and their weights in the mean.

        The mean of these replicas' vectors becomes the next vector of `replica`. Replicas with the
        weight 0 are left out.
        """
        entries = slice(self.starts[replica], self.starts[replica + 1])
        return self.sources[entries].tolist(), self.weights[entries].tolist()


class MixingRow(NamedTuple):
    """A part of an exchange: some replicas are replaced by a weighted mean of replicas.

    targets: the replicas that are replaced.
    sources: the replicas in the mean.
    weights: the weights of the sources; they sum to 1.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Federation:
    """The facts of a run that a topology may use.

    counts: int64 [clients], the number of training samples of each client.
    weighting: "samples" or "uniform", before methods change the weights.
    floats: the number of floats of a replica.
    label_counts: returns how many training samples of each class each client has, [clients,
    classes]; None if the task is not a classification.
    regions: returns the region of each client as a number, [clients]; None without regions.
    """

    seed: int
    counts: np.ndarray
    weighting: str
    floats: int
    label_counts: Callable[[], np.ndarray | None] = lambda: None
    regions: Callable[[], np.ndarray | None] = lambda: None

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.counts)

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of each client in an aggregation: float64 [clients]; 0 without samples."""
        if self.weighting == "samples":
            return self.counts.astype(np.float64)
        return (self.counts > 0).astype(np.float64)


@dataclass(frozen=True, eq=False)
class ClusterView:
    """The argument of a cluster rule: a replica and its clients after an aggregation.

    members: int64 [m], the replica's clients with training samples, ascending.
    clients: int64 [n], the members with an update in the aggregation.
    deltas: for each of `clients`, its update, float32 [layout.trained].
    weights: float64 [clients of the run], the weight of each client in an aggregation.
    free: the replicas without clients, ascending.
    state: the rule's arrays, which it may change in place; checkpoints contain them.
    report: numbers for the aggregation's row of the history, by column; the rule adds them.
    """

    replica: int
    members: np.ndarray
    version: int
    clients: np.ndarray
    deltas: Sequence[np.ndarray]
    weights: np.ndarray
    free: Sequence[int]
    state: dict[str, np.ndarray]
    report: dict[str, float]


class ClusterRule:
    """A rule that moves clients from one replica to another, depending on their updates.

    The rule must not change its attributes during a run. It stores everything that it must remember
    in the arrays `ClusterView.state`.
    """

    def state(self, clients: int, floats: int) -> dict[str, np.ndarray]:
        """Return the initial arrays of the rule, by name.

        floats: the number of trained parameters.
        """
        return {}

    def regroup(self, view: ClusterView) -> Mapping[int, np.ndarray]:
        """Choose clients of the replica `view.replica` that move to replicas without clients.

        Return a dictionary that maps replicas in `view.free` to the clients that they serve from
        now on, or {}. At least one client must stay. A replica that gets clients starts as a copy
        of `view.replica`. After an aggregation, raysim calls this function for each replica that
        got updates.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no function 'regroup'. Define it in this class."
        )


@dataclass(frozen=True, eq=False)
class Network:
    """The replicas of a run and their exchanges.

    With `chosen_by_loss` or `clusters`, clients move between replicas, and a replica may have no
    clients.

    replica_of: int64 [clients], the replica that serves each client (at the start, if clients
    move).
    mixing: the weights in an exchange, from `mixing_matrix`; None means no exchanges.
    shares: float64 [replicas], the weights of the replicas in their mean, which is scored as the
    shared model. None means equal weights. If clients move, a replica's weight is instead the
    number of its clients' training samples.

    own_schedules: True gives each replica a schedule of its own.
    every: the number of aggregations between two exchanges. With `own_schedules`, each replica must
    make this number of aggregations. Otherwise all aggregations of the run count.
    seconds: the virtual seconds between two exchanges; 0 uses `every`.
    link_seconds: the virtual seconds that an exchange takes.
    link_floats: the floats that travel in an exchange, for all replicas together.

    on_clients: True if clients store their replicas, so that jobs do not send or receive the model.
    Only replicas with an update then take part in an exchange, unless `pairwise` is True.
    client_floats: [clients], the floats that each client sends to other clients in an exchange, and
    also receives. None unless `on_clients` is True.
    pairwise: True if each replica with updates draws a neighbour (by `seed`), and both replicas
    become their mean.
    mixes_first: True if an exchange comes before the updates of the aggregation are added.

    chosen_by_loss: True if each job receives all replicas and trains the one with the smallest loss
    on the client's training samples. All replicas except number 0 then start from new random
    parameters.
    clusters: the rule that moves clients between replicas by their updates.

    warnings: texts for the user.
    name: the word for a replica in texts for the user, such as "edge".
    summary: the text about the exchanges in the plan of a run.
    """

    replica_of: np.ndarray
    mixing: Mixing | None = None
    shares: np.ndarray | None = None
    every: int = 1
    seconds: float = 0.0
    link_seconds: float = 0.0
    link_floats: int = 0
    own_schedules: bool = False
    on_clients: bool = False
    client_floats: np.ndarray | None = None
    pairwise: bool = False
    mixes_first: bool = False
    seed: int = 0
    chosen_by_loss: bool = False
    clusters: ClusterRule | None = None
    warnings: tuple[str, ...] = ()
    name: str = "replica"
    summary: str = ""

    @property
    def exchanges(self) -> bool:
        """True if there are exchanges between replicas."""
        return self.mixing is not None

    @property
    def moves_clients(self) -> bool:
        """True if clients may change from one replica to another."""
        return self.chosen_by_loss or self.clusters is not None

    @cached_property
    def replicas(self) -> int:
        """The number of replicas."""
        if self.mixing is not None:
            return self.mixing.replicas
        if self.shares is not None:
            return len(self.shares)
        return int(self.replica_of.max()) + 1

    @cached_property
    def mean_weights(self) -> np.ndarray:
        """The weight of each replica in the mean of the replicas: float64 [replicas]."""
        if self.shares is None:
            return np.full(self.replicas, 1 / self.replicas)
        return np.asarray(self.shares / self.shares.sum())

    def members(self, clients: np.ndarray) -> list[np.ndarray]:
        """Group some clients by the replica that serves them; return a group for each replica.

        clients: int64 [n]; the clients of a group keep this order.
        """
        replicas = self.replica_of[clients]
        order = np.argsort(replicas, kind="stable")
        ends = np.cumsum(np.bincount(replicas, minlength=self.replicas))[:-1]
        return np.split(clients[order], ends)

    def exchange(self, version: int, replicas: Sequence[int]) -> Iterator[Sequence[MixingRow]]:
        """Yield the exchanges of replicas in an aggregation, one after another.

        An exchange is a list of weighted means. All means of an exchange are computed before any
        replica changes. With `pairwise`, there is an exchange for each of `replicas` that has a
        neighbour. Otherwise there is only one exchange.
        version: the number of the run's aggregations so far.
        replicas: the replicas with updates in the aggregation, ascending.
        """
        if self.pairwise:
            yield from self._pairs(version, replicas)
        elif not self.on_clients or len(replicas) == self.replicas:
            yield self._all_rows
        else:
            assert self.mixing is not None, "only for replicas that exchange"
            yield mixing_rows(self.mixing, replicas)

    def _pairs(self, version: int, replicas: Sequence[int]) -> Iterator[Sequence[MixingRow]]:
        assert self.mixing is not None, "only for replicas that exchange"
        generator = stream(self.seed, "topology.pairs", version)
        for replica in replicas:
            neighbours = [other for other in self.mixing.row(replica)[0] if other != replica]
            if neighbours:
                pair = replica, neighbours[int(generator.integers(len(neighbours)))]
                yield [MixingRow(pair, pair, (0.5, 0.5))]

    @cached_property
    def _all_rows(self) -> list[MixingRow]:
        assert self.mixing is not None, "only for replicas that exchange"
        return mixing_rows(self.mixing, range(self.replicas))


def one_replica(clients: int) -> Network:
    """Return the `Network` of a run in which one model of the server serves all clients.

    clients: the number of clients.
    """
    return Network(np.broadcast_to(np.int64(0), clients))  # needs no memory per client


def mixing_rows(mixing: Mixing, present: Sequence[int]) -> list[MixingRow]:
    """Return the weights of an exchange in which only some replicas take part.

    Each present replica becomes a weighted mean of present replicas. The weights of absent replicas
    are added to the present replica's weight for itself, so that the sum is 1.
    mixing: the weights of all replicas.
    present: the replicas that take part.
    """
    is_present = np.zeros(mixing.replicas, bool)
    is_present[list(present)] = True
    targets_of: dict[tuple[tuple[int, ...], tuple[float, ...]], list[int]] = {}
    for target in present:
        weight_of: dict[int, float] = {}
        absent = 0.0
        for source, weight in zip(*mixing.row(target), strict=True):
            if is_present[source]:
                weight_of[source] = weight
            else:
                absent += weight
        if absent:
            weight_of[target] = weight_of.get(target, 0.0) + absent
        sources = tuple(sorted(weight_of))
        key = sources, tuple(weight_of[source] for source in sources)
        targets_of.setdefault(key, []).append(target)
    return [
        MixingRow(tuple(targets), sources, weights)
        for (sources, weights), targets in targets_of.items()
    ]


def mixing_matrix(weights: Weights, key: str) -> Mixing:
    """Return the mixing matrix of an exchange in sparse form.

    weights: row r has the weights of the mean that becomes replica r's next vector. Give an array
    [replicas, replicas], or a dictionary for each row. A dictionary maps replicas to weights;
    missing replicas have the weight 0.
    key: the name of the setting, for errors.
    Raises ValueError for a weight that is negative, not finite, or of a replica that does not
    exist. Also raises ValueError if a row does not sum to 1.
    """
    rows: list[Mapping[int, float]] = []
    if isinstance(weights, np.ndarray):
        for dense in weights:
            entries = np.flatnonzero(dense)
            rows.append(dict(zip(entries.tolist(), dense[entries].tolist(), strict=True)))
    else:
        rows = list(weights)
    starts, sources, values = [0], list[int](), list[float]()
    for replica, row in enumerate(rows):
        _check_row(row, replica, len(rows), key)
        for source in sorted(row):
            if row[source] > 0:
                sources.append(source)
                values.append(float(row[source]))
        starts.append(len(sources))
    return Mixing(np.array(starts), np.array(sources, np.int64), np.array(values))


def _check_row(row: Mapping[int, float], replica: int, replicas: int, key: str) -> None:
    for source, weight in row.items():
        if not 0 <= source < replicas:
            raise ValueError(
                f"{key}: replica {replica} has a weight for replica {source}, but there are "
                f"{replicas} replicas. Number replicas from 0 to {replicas - 1}."
            )
        if not 0 <= weight < np.inf:
            raise ValueError(
                f"{key}: the weight of replica {source} for replica {replica} is {weight:g}. Give "
                "a finite weight from 0 on."
            )
    total = sum(row.values())
    if abs(total - 1) > WEIGHT_TOLERANCE:
        raise ValueError(
            f"{key}: the averaging weights of replica {replica} sum to {total:g}, but they must "
            "sum to 1. Correct these weights."
        )


def components(mixing: Mixing) -> list[list[int]]:
    """Return the connected components of the graph of exchanges, the largest first.

    Each component is a list of replicas.
    """
    neighbours: list[set[int]] = [set() for _ in range(mixing.replicas)]
    for replica in range(mixing.replicas):
        for source in mixing.row(replica)[0]:
            neighbours[replica].add(source)
            neighbours[source].add(replica)
    left = set(range(mixing.replicas))
    parts: list[list[int]] = []
    for start in range(mixing.replicas):
        if start not in left:
            continue
        part, ahead = {start}, [start]
        while ahead:
            reached = neighbours[ahead.pop()] - part
            part |= reached
            ahead += reached
        left -= part
        parts.append(sorted(part))
    return sorted(parts, key=len, reverse=True)


def connection_warnings(
    mixing: Mixing, key: str, replicas: Set[int] | None = None
) -> tuple[str, ...]:
    """Return a warning if exchanges do not connect all replicas; else ().

    The warning lists the groups of replicas that exchanges connect.
    key: the configuration key that connects the replicas.
    replicas: only groups with at least one of these replicas count; None means all groups.
    """
    parts = components(mixing)
    if replicas is not None:
        parts = [part for part in parts if not replicas.isdisjoint(part)]
    if len(parts) <= 1:
        return ()
    texts = [_shorten(part) for part in parts[:MAX_SHOWN]]
    rest = f" and {len(parts) - MAX_SHOWN} more" if len(parts) > MAX_SHOWN else ""
    return (
        f"{key}: the replicas form {len(parts)} components that never exchange with each other: "
        f"{', '.join(texts)}{rest}. Add edges between them if all replicas should agree.",
    )


def _shorten(replicas: Sequence[int]) -> str:
    rest = [f"... ({len(replicas)})"] if len(replicas) > MAX_SHOWN else []
    return f"[{', '.join([*map(str, replicas[:MAX_SHOWN]), *rest])}]"


class Topology:
    """A rule that decides the replicas of a run and their exchanges; override `connect`.

    The rule must not change its attributes during a run. For random numbers, call
    `raysim.primitives.streams.stream(federation.seed, NAME)` in `connect(federation)`, with a text
    NAME of your choice.
    """

    def connect(self, federation: Federation) -> Network:
        """Return the replicas of a run and their exchanges.

        federation: the facts of the run that the rule may use.
        Raise ValueError if the settings do not fit the run.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no function 'connect'. Define it in this class."
        )


@dataclass(frozen=True)
class Star(Topology):
    """The default topology: one model for all clients."""

    def connect(self, federation: Federation) -> Network:
        """Return a network with one replica."""
        return one_replica(federation.clients)
