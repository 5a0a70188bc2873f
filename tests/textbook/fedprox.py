"""FedProx: Li et al. 2020, eq. (2).

The gradient of the proximal term is added before weight decay and momentum.
"""

from __future__ import annotations

from torch import Tensor

from textbook.plain import cross_entropy, run_rounds, train, trainable
from textbook.world import Book, Job, Params, World


def fedprox(world: World, mu: float) -> Book:
    """Run FedAvg with the loss CE + mu/2 |y - x|^2.

    x: the received parameters; y: the parameters in training.
    """

    def client(job: Job, x: Params) -> Params:
        def loss(p: Params, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
            distance = sum((p[name] - x[name].detach()).square().sum() for name in trainable(p))
            return cross_entropy(p, step, inputs, labels) + mu / 2 * distance

        return train(world, job, x, loss)

    return run_rounds(world, client)
