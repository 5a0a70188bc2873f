"""CFL: split a cluster of clients in two if their updates point in different directions.

Source: Sattler, Mueller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multitask Optimization Under Privacy Constraints" (IEEE TNNLS 2021; arXiv:1910.01991), Algorithms 1
to 3. Client i of a cluster has the update d_i. Its weight w_i is its number of samples, or 1 with
weighting=uniform. c_1 and c_2 are two parts of the cluster; eps_1, eps_2 and gamma_max are
settings:

    (1)  |sum_i w_i d_i / sum_i w_i| < eps_1   and   max_i |d_i| > eps_2
    (2)  a_ij = <d_i, d_j> / (|d_i| |d_j|)
    (3)  a_cross(c_1, c_2) = max of a_ij for i in c_1 and j in c_2
    (4)  gamma_max < sqrt((1 - a_cross(c_1, c_2)) / 2)

Of all divisions into two parts, the one with the smallest a_cross is used. The cluster is split
into these parts if (1) and (4) are true.

Departures from the paper
- Not all clients have to take part in each round. The conditions use a client's last update since
  its cluster began. A cluster is split only when every member has such an update.
- A cluster is split after the aggregation. Both new clusters start from the aggregated model.
- There is no split before `start` aggregations, and none when `clusters` models exist.
- A cluster of `min_size` clients or fewer is not split, as in the authors' code.
- A client may be training when its cluster is split. Its new cluster then aggregates its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raysim.api.topology import ClusterRule, ClusterView
from raysim.vectors.gram import gram_matrix
from raysim.vectors.tree_sum import weighted_sum


def bipartition(similarities: np.ndarray) -> tuple[np.ndarray, float]:
    """Divide n clients into the two groups that are least similar (Algorithm 1 of the paper).

    The similarity of two groups is the largest similarity between a client of one group and a
    client of the other.
    Return a bool array [n], which is False for the group of client 0, and the similarity of the two
    groups.
    similarities: float64 [n, n], the similarity of each two clients, with n at least 2.
    """
    count = len(similarities)
    one, other = np.triu_indices(count, 1)
    order = np.argsort(-similarities[one, other], kind="stable")
    part_of = np.arange(count)
    parts = count
    for first, second in zip(one[order].tolist(), other[order].tolist(), strict=True):
        if part_of[first] == part_of[second]:
            continue
        if parts == 2:
            return part_of != part_of[0], float(similarities[first, second])
        part_of[part_of == part_of[second]] = part_of[first]
        parts -= 1
    raise AssertionError(
        "the clients are in two groups, but no two clients are in different groups. This "
        "contradiction is a bug in raysim; please report it."
    )


def cosine_similarities(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the cosine similarity of each pair of vectors, float64 [n, n].

    The similarity to a vector of zeros is 0.
    rows: n vectors [d].
    """
    products: np.ndarray = gram_matrix([torch.from_numpy(row) for row in rows]).numpy()
    norms = np.sqrt(np.diag(products))
    scales = np.outer(norms, norms)
    similarities = np.zeros_like(products)
    np.divide(products, scales, out=similarities, where=scales > 0)
    return similarities


@dataclass(frozen=True)
class SplitByUpdates(ClusterRule):
    """The rule of CFL: split a cluster into two if its clients' updates disagree.

    A cluster is split only if the first three limits are met.
    mean_norm: eps_1, the upper limit of the norm of the mean update.
    max_norm: eps_2, the lower limit of the norm of the longest update.
    gamma: gamma_max, the lower limit of sqrt((1 - a) / 2). a is the largest cosine similarity
    between clients of the two new clusters.
    start: the number of aggregations before the first split.
    min_size: clusters of this many clients, or fewer, are not split.
    """

    mean_norm: float = 0.4
    max_norm: float = 1.6
    gamma: float = 0.0
    start: int = 20
    min_size: int = 2

    def state(self, clients: int, floats: int) -> dict[str, np.ndarray]:
        """Return the rule's initial state: no update of any client is known.

        "updates" [clients, floats]: the last update of each client since its cluster began.
        "is_known" [clients]: True for a client with such an update.
        """
        return {
            "updates": np.zeros((clients, floats), np.float32),
            "is_known": np.zeros(clients, bool),
        }

    def regroup(self, view: ClusterView) -> Mapping[int, np.ndarray]:
        """Split a cluster if its updates meet the conditions of CFL; return {} otherwise.

        The key of the only entry is a replica that had no clients. The value is the clients that
        this replica serves from now on.
        """
        updates, is_known = view.state["updates"], view.state["is_known"]
        for client, delta in zip(view.clients.tolist(), view.deltas, strict=True):
            updates[client] = delta
            is_known[client] = True
        members = view.members[is_known[view.members]]
        if not len(members):
            return {}
        rows = [updates[client] for client in members.tolist()]
        weights = view.weights[members]
        mean = weighted_sum(rows, (weights / weights.sum()).tolist())
        norms = [_norm(torch.from_numpy(row)) for row in rows]
        mean_norm, max_norm = _norm(mean), max(norms)
        view.report["topology.mean_norm"] = mean_norm
        view.report["topology.max_norm"] = max_norm
        is_complete = len(members) == len(view.members) > self.min_size
        if not (is_complete and view.free and view.version >= self.start):
            return {}
        if not (mean_norm < self.mean_norm and max_norm > self.max_norm):
            return {}
        is_second, across = bipartition(cosine_similarities(rows))
        if self.gamma >= math.sqrt(max(0.0, 1 - across) / 2):
            return {}
        is_known[members] = False
        return {view.free[0]: members[is_second]}


def _norm(vector: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
