"""FedAvg's rounds with another server rule at their end, and functions for flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from textbook.plain import Loss, average, cross_entropy, detach, train, trainable, weights
from textbook.world import Book, Job, Params, World


def flatten(p: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the named tensors of a model as one vector [d].

    names: the tensors, in their order in the vector.
    """
    return torch.cat([p[name].detach().flatten() for name in names])


def unflatten(values: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> Params:
    """Split a vector [d] into named tensors.

    like: tensors by name, which give the shapes of the result.
    names: the names of the tensors, in their order in the vector.
    """
    sizes = [like[name].numel() for name in names]
    return {n: part.view(like[n].shape) for n, part in zip(names, values.split(sizes), strict=True)}


@dataclass(frozen=True)
class Cohort:
    """The jobs of one aggregation, as a server rule gets them.

    version: the number of earlier aggregations.
    jobs: m jobs, in the order in which they are aggregated.
    x: the parameters before the aggregation, [d].
    changes: the updates, [m, d].
    weights: the weights before normalisation, [m].
    """

    version: int
    jobs: Sequence[Job]  # in the order of acceptance
    x: Tensor  # [d] the parameters
    changes: Tensor  # [m, d] each client's change of the parameters that it received
    weights: Tensor  # [m]

    @property
    def mean(self) -> Tensor:
        """Return FedAvg's mean update [d]."""
        return self.weights @ self.changes / self.weights.sum()


Weigh = Callable[[World, int, Sequence[Job]], list[float]]


def run_server_rule(
    world: World,
    rule: Callable[[Cohort], Tensor],
    loss: Loss = cross_entropy,
    weigh: Weigh = lambda world, version, jobs: weights(world, jobs),
    after: Callable[[Params], None] = lambda x: None,
) -> Book:
    """Compute a run in which the server calls `rule` to get the next parameters [d].

    Buffers become the weighted mean of the clients' buffers.
    weigh(world, version, jobs): the jobs' weights before normalisation.
    after(model): called with the new model's tensors at the end of each round.
    """
    names, models = trainable(world.start), [dict(world.start)]
    for version, jobs in enumerate(world.rounds):
        trained = [detach(train(world, job, models[job.version], loss)) for job in jobs]
        changes = [
            flatten(y, names) - flatten(models[job.version], names)
            for y, job in zip(trained, jobs, strict=True)
        ]
        raw_weights, x = weigh(world, version, jobs), models[-1]
        cohort = Cohort(
            version,
            jobs,
            flatten(x, names),
            torch.stack(changes),
            torch.tensor(raw_weights, dtype=torch.float64),
        )
        models.append(average(trained, raw_weights) | unflatten(rule(cohort), x, names))
        after(models[-1])
    return Book(models[-1])


def slices(world: World) -> list[slice]:
    """Return the slice of the vector for each tensor of the parameters."""
    result, start = [], 0
    for name in trainable(world.start):
        stop = start + world.start[name].numel()
        result.append(slice(start, stop))
        start = stop
    return result
