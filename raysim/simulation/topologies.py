"""The topologies with several replicas: edge servers below a cloud, and peers that gossip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raysim.api.topology import Federation, Network, Topology, mixing_matrix
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import FLOAT_BYTES
from raysim.primitives.streams import stream

MAX_KMEANS_ROUNDS = 50


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Edge servers, each with its own clients and schedule, that meet at a cloud.

    Source: Liu, Zhang, Song and Letaief, "Client-Edge-Cloud Hierarchical Federated Learning" (ICC
    2020), Algorithm 1 (HierFAVG). After `every` aggregations an edge waits for the others. Then all
    edges become the mean of the edges, weighted by the weights of their clients.

    edges: the number of edge servers. every: aggregations of an edge from one meeting to the next;
    kappa_2 in the paper. seconds: None; or virtual seconds from one meeting to the next, instead of
    `every`: an edge then waits after its first aggregation at or after each multiple. assign: the
    clients of an edge. "random": equally many. "region": neighbouring regions of the fleet, with
    equally many clients. "data": clients with similar shares of classes.

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
        """Return the edges with their clients, which exchange through the cloud."""
        able = int(np.count_nonzero(federation.counts))
        if self.edges > able:
            raise ValueError(
                f"topology.edges={self.edges} is more than the {able} clients with samples. Set "
                f"topology.edges={able} or less."
            )
        edge_of = self._edge_of(federation)
        weights = np.bincount(edge_of, federation.weights, minlength=self.edges)
        if not weights.all():
            edge = int(np.flatnonzero(weights == 0)[0])
            raise ValueError(
                f"topology.edges={self.edges} leaves edge {edge} without clients that have "
                "samples. Lower topology.edges, or set topology.assign=random."
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
        )

    def _edge_of(self, federation: Federation) -> np.ndarray:
        """Return the edge of each client, int64 [clients]."""
        generator = stream(federation.seed, "topology.edges")
        if self.assign == "random":
            order = _clients_first(generator.permutation(federation.clients), federation.counts)
            return _deal(order, self.edges)
        if self.assign == "region":
            regions = federation.regions()
            if regions is None:
                raise ValueError(
                    "topology.assign=region needs a fleet with regions, and this one has none. "
                    "Set fleet.availability=diurnal, or topology.assign=random."
                )
            order = np.argsort(regions, kind="stable")
            return _cut(order, self.edges)
        label_counts = federation.label_counts()
        if label_counts is None:
            raise ValueError(
                "topology.assign=data compares shares of classes, and the labels of this data are "
                "no classes. Set topology.assign=random."
            )
        totals = np.maximum(label_counts.sum(1, keepdims=True), 1)
        return k_means(label_counts / totals, federation.counts > 0, self.edges, generator)


def _clients_first(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the clients in this order, those with samples before the others."""
    return order[np.argsort(counts[order] == 0, kind="stable")]


def _deal(order: np.ndarray, groups: int) -> np.ndarray:
    """Deal the clients to the groups in turn; return the group of each client."""
    group_of = np.empty(len(order), np.int64)
    group_of[order] = np.arange(len(order)) % groups
    return group_of


def _cut(order: np.ndarray, groups: int) -> np.ndarray:
    """Cut the order into parts of equal length; return the part of each client."""
    group_of = np.empty(len(order), np.int64)
    for group, clients in enumerate(np.array_split(order, groups)):
        group_of[clients] = group
    return group_of


def k_means(
    points: np.ndarray, is_counted: np.ndarray, groups: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the group of each point, int64 [n], by Lloyd's algorithm.

    points: [n, features]. is_counted: [n] bool, the points that decide the centers; at least
    `groups`. The first centers are drawn as in k-means++ (Arthur and Vassilvitskii 2007). A group
    that becomes empty takes the counted point that is farthest from its center.
    """
    counted = points[is_counted]
    centers = _first_centers(counted, groups, generator)
    nearest = np.full(len(counted), -1)
    for _ in range(MAX_KMEANS_ROUNDS):
        distances = _squared_distances(counted, centers)
        before, nearest = nearest, distances.argmin(1)
        for group in range(groups):
            if not (nearest == group).any():
                own = distances[np.arange(len(counted)), nearest]
                own[np.bincount(nearest, minlength=groups)[nearest] == 1] = -1
                nearest[own.argmax()] = group
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
    """Return the squared distance of each point to each center, [n, groups]."""
    return np.stack([np.square(points - center).sum(1) for center in centers], axis=1)
