"""The topologies with several replicas: edge servers, clusters, and clients that gossip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from raysim.api.topology import (
    WEIGHT_TOLERANCE,
    Federation,
    Network,
    Topology,
    connection_warnings,
    mixing_matrix,
)
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import FLOAT_BYTES
from raysim.primitives.streams import stream
from raysim.simulation.clustering import SplitByUpdates

MAX_KMEANS_ROUNDS = 50


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Edge servers, each with its own clients and schedule, that exchange models through a cloud.

    Source: Liu, Zhang, Song and Letaief, "Client-Edge-Cloud Hierarchical Federated Learning" (ICC
    2020), Algorithm 1 (HierFAVG). An edge server (an edge) that has aggregated `every` times waits
    for all other edges. Then each edge gets the mean of all edges' models. The weight of an edge is
    the sum of its clients' weights.

    every: kappa_2 in the paper.
    seconds: None exchanges models as in the paper. Otherwise an exchange is due every `seconds` of
    virtual time. The next aggregation of any edge starts the exchange, and no edge waits.
    assign: how clients are divided among edges. "random" draws them at random. "region" puts
    clients from neighbouring regions of the fleet together. "data" puts clients with similar
    fractions of each class together. Only with "data" can the numbers of clients of two edges
    differ by more than one.
    bandwidth_up, bandwidth_down: median bytes per second of the links between edges and cloud.
    bandwidth_sigma: standard deviation of the logarithm of an edge's bandwidth.
    """

    edges: int = 4
    every: int = 2
    seconds: float | None = None
    assign: str = "random"
    bandwidth_up: float = 12.5e6
    bandwidth_down: float = 12.5e6
    bandwidth_sigma: float = 0.0

    def __post_init__(self) -> None:
        at_least("topology.edges", self.edges, 1)
        at_least("topology.every", self.every, 1)
        if self.seconds is not None:
            above("topology.seconds", self.seconds, 0)
        one_of("topology.assign", self.assign, ("random", "region", "data"))
        for name in ("bandwidth_up", "bandwidth_down"):
            bandwidth = getattr(self, name)
            if bandwidth != math.inf:
                above(f"topology.{name}", bandwidth, 0)
        in_range("topology.bandwidth_sigma", self.bandwidth_sigma, least=0, most=10)

    def connect(self, federation: Federation) -> Network:
        """Return the network of the edge servers, which exchange through the cloud.

        Raises ValueError if an edge server would have no clients with samples. Also raises it if
        `assign` needs regions or classes that this run does not have.
        """
        able = int(np.count_nonzero(federation.counts))
        if self.edges > able:
            raise ValueError(
                f"topology.edges={self.edges}: each edge server needs a client with samples, but "
                f"only {able} clients have samples. Set topology.edges={able} or less."
            )
        edge_of = self._edge_of(federation)
        weights = np.bincount(edge_of, federation.weights, minlength=self.edges)
        if not weights.all():
            edge = int(np.flatnonzero(weights == 0)[0])
            raise ValueError(
                f"topology.edges={self.edges} leaves edge server {edge} without clients that "
                "have samples. Decrease topology.edges, or set topology.assign=random."
            )
        shares = weights / weights.sum()
        normal = stream(federation.seed, "topology.bandwidth").standard_normal(self.edges)
        factors = np.exp(self.bandwidth_sigma * normal)
        size = federation.floats * FLOAT_BYTES
        seconds = size / (self.bandwidth_up * factors) + size / (self.bandwidth_down * factors)
        row = dict(enumerate(shares.tolist()))
        return Network(
            edge_of,
            mixing_matrix([row] * self.edges, "topology"),
            weights,
            self.every,
            self.seconds or 0.0,
            float(seconds.max()),
            2 * self.edges * federation.floats,
            own_schedules=True,
            name="edge",
            summary=self._summary(float(seconds.max())),
        )

    def _summary(self, seconds: float) -> str:
        """Describe how often the edge servers exchange, and how long an exchange takes.

        seconds: the virtual seconds of an exchange.
        """
        when = f"every {self.every} aggregations of an edge" if self.every > 1 else "after each one"
        if self.seconds is not None:
            when = f"every {self.seconds:g} s"
        return f"they exchange {when}, for {seconds:.3g} s of virtual time"

    def _edge_of(self, federation: Federation) -> np.ndarray:
        """Return the edge server of each client, int64 [clients]."""
        generator = stream(federation.seed, "topology.edges")
        if self.assign == "random":
            order = _clients_first(generator.permutation(federation.clients), federation.counts)
            return _deal(order, self.edges)
        if self.assign == "region":
            regions = federation.regions()
            if regions is None:
                raise ValueError(
                    "topology.assign=region needs a fleet with regions, but this fleet has none. "
                    "Set fleet.availability=diurnal, or topology.assign=random."
                )
            order = np.argsort(regions, kind="stable")
            return _cut(order, self.edges)
        label_counts = federation.label_counts()
        if label_counts is None:
            raise ValueError(
                "topology.assign=data compares shares of classes, but the labels of this data are "
                "not classes. Set topology.assign=random."
            )
        totals = np.maximum(label_counts.sum(1, keepdims=True), 1)
        return k_means(label_counts / totals, federation.counts > 0, self.edges, generator)


@dataclass(frozen=True)
class Clustered(Topology):
    """Several models on one server, each for a cluster of clients with similar data.

    rule="updates" begins with one cluster. A cluster is split into two if the updates of its
    clients point in different directions. Source: CFL, Sattler, Mueller and Samek, "Clustered
    Federated Learning" (IEEE TNNLS 2021); see `raysim.simulation.clustering`.

    rule="loss" has `clusters` models. The first model has the initial values of the run. All other
    models draw initial values by PyTorch's rules. A client receives all models, and computes the
    loss of each model on its training samples, in eval mode and without augmentation. It trains the
    model with the smallest loss, and is also scored with this model. Source: IFCA, Ghosh, Chung,
    Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning" (NeurIPS 2020),
    Algorithm 1 with model averaging.

    clusters: the largest number of models.
    mean_norm, max_norm, gamma, start, min_size: the settings of `SplitByUpdates`, only for
    rule="updates".
    """

    rule: str = "updates"
    clusters: int = 4
    mean_norm: float = 0.4
    max_norm: float = 1.6
    gamma: float = 0.0
    start: int = 20
    min_size: int = 2

    def __post_init__(self) -> None:
        one_of("topology.rule", self.rule, ("updates", "loss"))
        at_least("topology.clusters", self.clusters, 2)
        above("topology.mean_norm", self.mean_norm, 0)
        at_least("topology.max_norm", self.max_norm, 0)
        in_range("topology.gamma", self.gamma, least=0, below=1)
        at_least("topology.start", self.start, 0)
        at_least("topology.min_size", self.min_size, 1)

    def connect(self, federation: Federation) -> Network:
        """Return the description of the replicas; at first all clients belong to the first replica.

        Raises ValueError if `clusters` is more than the number of clients with samples.
        """
        able = int(np.count_nonzero(federation.counts))
        if self.clusters > able:
            raise ValueError(
                f"topology.clusters={self.clusters}: each cluster needs a client with samples, but "
                f"only {able} clients have samples. Set topology.clusters={able} or less."
            )
        chosen_by_loss, rule = self.rule == "loss", None
        summary = "each client trains the one with the smallest loss"
        if not chosen_by_loss:
            rule = SplitByUpdates(
                self.mean_norm, self.max_norm, self.gamma, self.start, self.min_size
            )
            summary = (
                f"one at first, split where a mean update is shorter than {self.mean_norm:g} and "
                f"one of the updates longer than {self.max_norm:g}"
            )
        return Network(
            np.zeros(federation.clients, np.int64),
            shares=np.ones(self.clusters),
            chosen_by_loss=chosen_by_loss,
            clusters=rule,
            name="cluster",
            summary=summary,
        )


@dataclass(frozen=True)
class Gossip(Topology):
    """A topology without a server: each client has its own replica, and clients exchange replicas.

    The clients whose jobs are aggregated exchange with their neighbours in a graph. For exchanges
    of all clients, set the schedule's cohort to the number of clients. An exchange adds to the time
    and traffic of the client's job. Sources:
    - D-PSGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?"
      (NeurIPS 2017). Set exchange="neighbours" and schedule=synchronous.
    - AD-PSGD: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (ICML
      2018). Set exchange="pairwise" and schedule=immediate.
    In both papers, a local training is one step, and mix="before".

    graph: which clients are neighbours. "erdos_renyi" connects each pair with `probability`.
    "expander" has `degree` / 2 rings through all clients in random order. "edges" has the pairs in
    `edges`.
    edges: pairs of clients [i, j] or [i, j, w]; either all pairs have a weight w, or none. w is the
    weight of replica j in the mean of client i, and of replica i in the mean of client j. Without
    w, `weights` decides. With exchange="pairwise", a pair with w = 0 does not exchange, and all
    other w have no effect.
    exchange: "neighbours" makes each replica a weighted mean of itself and its neighbours. The
    weight of a neighbour without an aggregated job goes to the client itself. With "pairwise", a
    client draws one neighbour, with or without an aggregated job, and both replicas become their
    mean.
    weights: the weight of neighbour j in the mean of client i. Clients i and j have d_i and d_j
    neighbours. "metropolis" is 1 / (1 + max(d_i, d_j)), and "uniform" is 1 / (1 + d_i).
    mix: "after" adds the updates to the replicas, and then exchanges the replicas. "before"
    exchanges the replicas, and then adds the updates.
    every: the number of aggregations from one exchange to the next.
    degree: for "expander", the number of neighbours of a client. A client has fewer neighbours if
    it is next to the same client in several rings.
    """

    graph: str = "ring"
    edges: Sequence[Sequence[float]] | None = None
    exchange: str = "neighbours"
    weights: str = "metropolis"
    mix: str = "after"
    every: int = 1
    probability: float = 0.3
    degree: int = 4

    def __post_init__(self) -> None:
        one_of("topology.graph", self.graph, (*GRAPHS, "edges"))
        one_of("topology.exchange", self.exchange, ("neighbours", "pairwise"))
        one_of("topology.weights", self.weights, ("metropolis", "uniform"))
        one_of("topology.mix", self.mix, ("after", "before"))
        at_least("topology.every", self.every, 1)
        in_range("topology.probability", self.probability, above=0, most=1)
        at_least("topology.degree", self.degree, 2)
        if self.degree % 2:
            raise ValueError(
                f"topology.degree={self.degree} must be even, because an expander consists of "
                "rings, and each ring gives a client two neighbours. Set an even number."
            )
        if self.graph == "edges" and self.edges is None:
            raise ValueError(
                "topology.graph=edges needs a list of edges, but topology.edges is null. Set "
                "topology.edges, for example to [[0,1],[1,2]], or choose another graph."
            )
        if self.graph != "edges" and self.edges is not None:
            raise ValueError(
                f"topology.graph={self.graph} has its own edges, but topology.edges is also set. "
                "Set topology.graph=edges to use your edges, or topology.edges=null."
            )

    def connect(self, federation: Federation) -> Network:
        """Return the network: a replica for each client, and the weights of its neighbours.

        Raises ValueError if the clients cannot form the graph, or if `edges` is not valid.
        """
        clients, able = federation.clients, np.flatnonzero(federation.counts).tolist()
        neighbours: list[set[int]] = [set() for _ in range(clients)]
        weight_of_edge: dict[tuple[int, int], float] = {}
        if self.edges is not None:
            weight_of_edge = _read_edges(self.edges, clients, neighbours)
        else:
            generator = stream(federation.seed, "topology.graph")
            for one, other in GRAPHS[self.graph](self, len(able), generator):
                neighbours[able[one]].add(able[other])
                neighbours[able[other]].add(able[one])
        rows = _rows_of_edges(weight_of_edge, clients) if weight_of_edge else self._rows(neighbours)
        mixing = mixing_matrix(rows, "topology.edges" if weight_of_edge else "topology")
        degrees = np.array([len(row) for row in neighbours])
        partners = np.minimum(degrees, 1) if self.exchange == "pairwise" else degrees
        return Network(
            np.arange(clients),
            mixing,
            (federation.counts > 0).astype(np.float64),
            self.every,
            on_clients=True,
            client_floats=partners * federation.floats,
            pairwise=self.exchange == "pairwise",
            mixes_first=self.mix == "before",
            seed=federation.seed,
            warnings=connection_warnings(mixing, "topology.graph", set(able)),
            name="client",
            summary=f"{self.graph} with {degrees[able].mean():.3g} neighbours in the mean; they "
            f"exchange with {self.exchange if self.exchange == 'neighbours' else 'one of them'}",
        )

    def _rows(self, neighbours: Sequence[set[int]]) -> list[dict[int, float]]:
        """Return for each client i the weights w_ij of the exchange: x_i becomes sum_j w_ij x_j.

        x_j is the replica of client j, which is a neighbour of client i, or client i itself. Row i
        is a dictionary of w_ij by j.
        """
        rows: list[dict[int, float]] = []
        for client, own_neighbours in enumerate(neighbours):
            row: dict[int, float] = {}
            for other in sorted(own_neighbours):
                degree = len(own_neighbours)
                if self.weights == "metropolis":
                    degree = max(degree, len(neighbours[other]))
                row[other] = 1 / (1 + degree)
            # If all neighbours have equal weights, the client gets this weight, too, to the last
            # bit.
            is_equal = len(set(row.values())) == 1 and len(row) + 1 == round(1 / min(row.values()))
            row[client] = min(row.values()) if is_equal else 1 - math.fsum(row.values())
            rows.append(row)
        return rows


def _read_edges(
    edges: Sequence[Sequence[float]], clients: int, neighbours: Sequence[set[int]]
) -> dict[tuple[int, int], float]:
    """Add the user's edges to `neighbours`, and return the weights of the edges.

    A weight is returned by (i, j) and by (j, i). The result is {} if no edge has a weight.

    edges: each [i, j] or [i, j, weight].
    neighbours: for each client the set of its neighbours.
    Raises ValueError for an edge that is not valid, and if only some edges have weights.
    """
    weights: dict[tuple[int, int], float] = {}
    for edge in edges:
        numbers = list(edge)
        one, other = (int(number) for number in numbers[:2]) if len(numbers) in (2, 3) else (-1, -1)
        is_whole = numbers[:2] == [one, other]
        if not is_whole or one == other or not (0 <= one < clients and 0 <= other < clients):
            raise ValueError(
                f"topology.edges contains {numbers}. Give [i, j] or [i, j, weight] for two clients "
                f"from 0 to {clients - 1}."
            )
        neighbours[one].add(other)
        neighbours[other].add(one)
        if len(numbers) == 3:
            weights[one, other] = weights[other, one] = float(numbers[2])
    if weights and len(weights) < sum(map(len, neighbours)):
        raise ValueError(
            "topology.edges has weights for some edges only. Give all edges a weight, or none."
        )
    return weights


def _rows_of_edges(
    weights: Mapping[tuple[int, int], float], clients: int
) -> list[dict[int, float]]:
    """Return for each client i the weights w_ij of the exchange: x_i becomes sum_j w_ij x_j.

    w_ii is 1 minus the sum of the neighbours' weights.

    weights: w_ij by (i, j), for both directions of each edge.
    Raises ValueError if the weights of a client's neighbours sum to more than 1.
    """
    rows: list[dict[int, float]] = [{} for _ in range(clients)]
    for (one, other), weight in weights.items():
        rows[one][other] = weight
    for client, row in enumerate(rows):
        total = math.fsum(row.values())
        if total > 1 + WEIGHT_TOLERANCE:
            raise ValueError(
                f"topology.edges: the weights of client {client}'s neighbours sum to {total:g}, "
                "but may sum to at most 1, because the rest is the weight of the client itself. "
                "Decrease these weights."
            )
        row[client] = max(0.0, 1 - total)
    return rows


# --- graphs: pairs of the numbers 0 to clients - 1 ------------------------------------------------
Pairs: TypeAlias = Iterable[tuple[int, int]]


def _ring(gossip: Gossip, clients: int, generator: np.random.Generator) -> Pairs:
    return _cycle(range(clients))


def _cycle(order: Sequence[int]) -> Pairs:
    """Return the pairs of neighbours in the ring that visits the clients in this order.

    A ring of one client has no pairs.
    """
    pairs = zip(order, [*order[1:], order[0]], strict=True)
    return [(one, other) for one, other in pairs if one != other]


def _torus(gossip: Gossip, clients: int, generator: np.random.Generator) -> Pairs:
    rows = next(size for size in range(math.isqrt(clients), 0, -1) if clients % size == 0)
    columns = clients // rows
    if rows == 1 and clients > 2:
        raise ValueError(
            f"topology.graph=torus arranges clients in a grid of several rows, but {clients} "
            f"clients fit only in a single row, because {clients} is a prime number. Change "
            "partition.clients, or set topology.graph=ring."
        )
    pairs: list[tuple[int, int]] = []
    for row in range(rows):
        for column in range(columns):
            place = row * columns + column
            right = row * columns + (column + 1) % columns
            below = (row + 1) % rows * columns + column
            pairs += [(place, other) for other in (right, below) if other != place]
    return pairs


def _erdos_renyi(gossip: Gossip, clients: int, generator: np.random.Generator) -> Pairs:
    one, other = np.triu_indices(clients, 1)
    is_drawn = generator.random(len(one)) < gossip.probability
    return zip(one[is_drawn].tolist(), other[is_drawn].tolist(), strict=True)


def _expander(gossip: Gossip, clients: int, generator: np.random.Generator) -> Pairs:
    if gossip.degree >= clients:
        raise ValueError(
            f"topology.degree={gossip.degree} needs more than {gossip.degree} clients with "
            f"samples, but there are {clients}. Decrease topology.degree, or set "
            "topology.graph=complete."
        )
    pairs: list[tuple[int, int]] = []
    for _ in range(gossip.degree // 2):
        pairs += _cycle(generator.permutation(clients).tolist())
    return pairs


def _complete(gossip: Gossip, clients: int, generator: np.random.Generator) -> Pairs:
    return itertools.combinations(range(clients), 2)


GRAPHS: dict[str, Callable[[Gossip, int, np.random.Generator], Pairs]] = {
    "ring": _ring,
    "torus": _torus,
    "erdos_renyi": _erdos_renyi,
    "expander": _expander,
    "complete": _complete,
}


# --- clients of edges -----------------------------------------------------------------------------
def _clients_first(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Move the clients that have no samples to the end of `order`; return the new order."""
    return order[np.argsort(counts[order] == 0, kind="stable")]


def _deal(order: np.ndarray, groups: int) -> np.ndarray:
    """Divide clients among groups in turn; return the group of each client, int64 [clients].

    order: the numbers of all clients. The first client goes to group 0, the next one to group 1,
    and so on, again and again.
    """
    group_of = np.empty(len(order), np.int64)
    group_of[order] = np.arange(len(order)) % groups
    return group_of


def _cut(order: np.ndarray, groups: int) -> np.ndarray:
    """Cut an order of clients into consecutive groups whose sizes differ by at most one.

    Return the group of each client, int64 [clients].
    """
    group_of = np.empty(len(order), np.int64)
    for group, clients in enumerate(np.array_split(order, groups)):
        group_of[clients] = group
    return group_of


def k_means(
    points: np.ndarray, is_counted: np.ndarray, groups: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the group of each point, int64 [n], by Lloyd's algorithm.

    The first centers are drawn with k-means++ (Arthur and Vassilvitskii 2007). An empty group gets
    the counted point that is farthest from its center and not alone in its group.
    points: float [n, features].
    is_counted: bool [n], True for a counted point. The centers are means of counted points only. At
    least `groups` points must be counted.
    """
    counted = points[is_counted]
    centers = _first_centers(counted, groups, generator)
    nearest = np.full(len(counted), -1)
    for _ in range(MAX_KMEANS_ROUNDS):
        distances = _squared_distances(counted, centers)
        before, nearest = nearest, distances.argmin(1)
        for group in range(groups):
            if not (nearest == group).any():
                distance = distances[np.arange(len(counted)), nearest]
                distance[np.bincount(nearest, minlength=groups)[nearest] == 1] = -1
                nearest[distance.argmax()] = group
        if (nearest == before).all():
            break
        centers = np.stack([counted[nearest == group].mean(0) for group in range(groups)])
    group_of: np.ndarray = _squared_distances(points, centers).argmin(1)
    group_of[is_counted] = nearest
    return group_of


def _first_centers(points: np.ndarray, groups: int, generator: np.random.Generator) -> np.ndarray:
    chosen = [int(generator.integers(len(points)))]
    while len(chosen) < groups:
        distances = _squared_distances(points, points[chosen]).min(1)
        distances[chosen] = 0
        if not distances.any():  # all points lie on centers
            rest = np.setdiff1d(np.arange(len(points)), chosen)
            chosen.append(int(rest[0]))
            continue
        chosen.append(int(generator.choice(len(points), p=distances / distances.sum())))
    return points[chosen]


def _squared_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Return the squared distance of each point to each center, float [n, groups]."""
    return np.stack([np.square(points - center).sum(1) for center in centers], axis=1)
