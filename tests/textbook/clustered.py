"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging) and CFL (Sattler et al. 2020) by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import average, detach, is_buffer, logits, train
from textbook.world import Params, World


@dataclass
class Clusters:
    """The result of a textbook with clusters.

    models: the model of each cluster at the end.
    model_of: for each client, the index of the model that it is scored with.
    columns: the history's columns.
    """

    models: list[Params]
    model_of: list[int]
    columns: dict[str, list[float]] = field(default_factory=dict)


def ifca(world: World, starts: Sequence[Mapping[str, Tensor]]) -> Clusters:
    """Run IFCA: each client trains the model with the smallest loss on the client's samples.

    The server averages each model over the clients that trained it.
    starts: for each cluster, the initial tensors of the cluster's model.
    """
    models = [detach(start) for start in starts]
    shares: list[list[float]] = [[] for _ in models]

    def best(client: int) -> int:
        inputs, labels = world.data[client]
        losses = [float(F.cross_entropy(logits(dict(p), inputs, False), labels)) for p in models]
        return losses.index(min(losses))

    for jobs in world.rounds:
        chosen = [best(job.client) for job in jobs]
        trained: list[list[Params]] = [[] for _ in models]
        samples: list[list[float]] = [[] for _ in models]
        for job, k in zip(jobs, chosen, strict=True):
            trained[k].append(detach(train(world, job, models[k])))
            samples[k].append(float(job.samples))
        for k in range(len(models)):
            shares[k].append(len(trained[k]) / len(jobs))
            if trained[k]:
                models[k] = average(trained[k], samples[k])
    columns = {f"topology.share_{k}": values for k, values in enumerate(shares)}
    return Clusters(models, [best(client) for client in range(world.clients)], columns)


def cfl(world: World, mean_norm: float, max_norm: float, most: int, gamma: float) -> Clusters:
    """Compute a run of CFL, which splits a cluster of clients whose updates disagree.

    All clients train in each round, as in the paper. `best_bipartition` divides a cluster into two
    parts. A cluster is split only if it has more than two clients and meets these conditions:
    mean_norm: the norm of the cluster's mean update is below this value.
    max_norm: the largest norm of the cluster's updates is above this value.
    most: there are fewer clusters than this number.
    gamma: sqrt((1 - c) / 2) is above this value. c is the largest cosine similarity between updates
    of different parts.
    """
    models, members = [detach(world.start)], [list(range(world.clients))]
    counts = []
    for jobs in world.rounds:
        job_of = {job.client: job for job in jobs}
        # Clusters that this round makes are averaged and split from the next round on.
        for k in range(len(models)):
            trained = [detach(train(world, job_of[client], models[k])) for client in members[k]]
            samples = [float(job_of[client].samples) for client in members[k]]
            updates = [flat(after) - flat(models[k]) for after in trained]
            models[k] = average(trained, samples)
            mean = sum(n * u for n, u in zip(samples, updates, strict=True)) / sum(samples)
            longest = max(float(update.norm()) for update in updates)
            if float(mean.norm()) >= mean_norm or longest <= max_norm or len(models) == most:
                continue
            if len(members[k]) <= 2:
                continue
            second, across = best_bipartition(updates)
            if gamma >= math.sqrt((1 - across) / 2):
                continue
            moved = [client for place, client in enumerate(members[k]) if place in second]
            members[k] = [client for client in members[k] if client not in moved]
            members.append(moved)
            models.append(models[k])
        counts.append(float(len(models)))
    model_of = [
        next(k for k, part in enumerate(members) if c in part) for c in range(world.clients)
    ]
    return Clusters(models, model_of, {"topology.clusters": counts})


def flat(p: Mapping[str, Tensor]) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([tensor.flatten() for name, tensor in p.items() if not is_buffer(name)])


def best_bipartition(updates: Sequence[Tensor]) -> tuple[set[int], float]:
    """Split the updates into two groups that are as different as possible.

    The split minimises c, the largest cosine similarity between updates of different groups.

    Return the group without updates[0], as positions in `updates`, and c.
    """
    best: tuple[float, set[int]] = (math.inf, set())
    places = range(len(updates))
    for size in range(1, len(updates)):
        for second in itertools.combinations(places[1:], size):
            across = max(
                float(F.cosine_similarity(updates[i], updates[j], dim=0))
                for i in second
                for j in places
                if j not in second
            )
            best = min(best, (across, set(second)), key=lambda pair: pair[0])
    return best[1], best[0]
