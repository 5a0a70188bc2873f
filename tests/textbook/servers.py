"""What textbooks of server rules share: FedAvg's rounds, in which another rule makes the next parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from textbook.plain import Loss, averaged, cross_entropy, detached, train, trainable, weights
from textbook.world import Book, Job, Params, World


def flat(p: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Some tensors as one vector [d]."""
    return torch.cat([p[name].detach().flatten() for name in names])


def unflat(values: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> Params:
    """A vector [d] as tensors again."""
    sizes = [like[name].numel() for name in names]
    return {n: part.view(like[n].shape) for n, part in zip(names, values.split(sizes), strict=True)}


@dataclass(frozen=True)
class Cohort:
    """What the server has at hand at one aggregation."""

    version: int
    jobs: Sequence[Job]  # in the order of acceptance
    x: Tensor  # [d] the parameters
    changes: Tensor  # [m, d] of every client's parameters, from what it received
    weights: Tensor  # [m]

    @property
    def mean(self) -> Tensor:
        """[d] FedAvg's update."""
        return self.weights @ self.changes / self.weights.sum()


Weigh = Callable[[World, int, Sequence[Job]], list[float]]


def stepped(
    world: World,
    rule: Callable[[Cohort], Tensor],
    loss: Loss = cross_entropy,
    weigh: Weigh = lambda world, version, jobs: weights(world, jobs),
    after: Callable[[Params], None] = lambda x: None,
) -> Book:
    """A job trains on from the model of its version; `rule` makes the next parameters; buffers are averaged.

    after: sees every new model.
    """
    names, models = trainable(world.start), [dict(world.start)]
    for version, jobs in enumerate(world.rounds):
        trained = [detached(train(world, job, models[job.version], loss)) for job in jobs]
        changes = [
            flat(y, names) - flat(models[job.version], names)
            for y, job in zip(trained, jobs, strict=True)
        ]
        raw, x = weigh(world, version, jobs), models[-1]
        new = rule(
            Cohort(
                version,
                jobs,
                flat(x, names),
                torch.stack(changes),
                torch.tensor(raw, dtype=torch.float64),
            )
        )
        models.append(averaged(trained, raw) | unflat(new, x, names))
        after(models[-1])
    return Book(models[-1])


def slices(world: World) -> list[slice]:
    """Where each tensor of the parameters lies in their vector."""
    found, start = [], 0
    for name in trainable(world.start):
        found.append(slice(start, start := start + world.start[name].numel()))
    return found
