"""FedAvgM: Hsu et al. 2019; FedAdagrad, FedAdam, FedYogi: Reddi et al. 2021, Algorithm 2.

As in TensorFlow, bias correction changes the learning rate, and not the constant tau that is added
to the root of the second moment.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from textbook.plain import Loss, cross_entropy, trainable
from textbook.servers import flatten, run_server_rule
from textbook.world import Book, World


class ServerMomentum:
    """Server momentum: u <- beta u + D, and x <- x + eta u.

    x: the server's parameters. D: the mean update. u: the momentum, which starts at 0.
    lr, momentum: eta and beta.
    nesterov: True uses x <- x + eta (D + beta u).
    """

    def __init__(self, world: World, lr: float, momentum: float, nesterov: bool = False):
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.u = torch.zeros_like(flatten(world.start, trainable(world.start)))

    def __call__(self, x: Tensor, delta: Tensor) -> Tensor:
        self.u = self.momentum * self.u + delta
        return x + self.lr * (delta + self.momentum * self.u if self.nesterov else self.u)

    @property
    def server(self) -> dict[str, Tensor]:
        return {"fedavgm.momentum": self.u}


class Adaptive:
    """The server rules of FedAdagrad, FedAdam and FedYogi.

    A call adds lr m / (sqrt(v) + tau) to the parameters. The moments m and v of the mean update
    start at 0 and tau^2.
    name: "fedadagrad", "fedadam" or "fedyogi": how v changes.
    beta1, beta2: the decay of m and v; "fedadagrad" has no decay of v.
    bias_correction: True multiplies lr by sqrt(1 - beta2^t) / (1 - beta1^t) in step t = 1, 2, ....
    """

    def __init__(
        self,
        world: World,
        name: str,
        lr: float,
        beta1: float,
        tau: float,
        beta2: float = 0.0,
        bias_correction: bool = False,
    ):
        self.name, self.lr, self.beta1, self.tau, self.beta2 = name, lr, beta1, tau, beta2
        self.bias_correction, self.steps = bias_correction, 0
        self.m = torch.zeros_like(flatten(world.start, trainable(world.start)))
        self.v = torch.full_like(self.m, tau**2)

    def __call__(self, x: Tensor, delta: Tensor) -> Tensor:
        self.steps += 1
        square, forgot = delta**2, 1 - self.beta2
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        self.v = {
            "fedadagrad": self.v + square,
            "fedadam": self.beta2 * self.v + forgot * square,
            "fedyogi": self.v - forgot * square * torch.sign(self.v - square),
        }[self.name]
        rate = self.lr
        if self.bias_correction:
            rate *= (1 - self.beta2**self.steps) ** 0.5 / (1 - self.beta1**self.steps)
        return x + rate * self.m / (self.v.sqrt() + self.tau)

    @property
    def server(self) -> dict[str, Tensor]:
        return {f"{self.name}.first_moment": self.m, f"{self.name}.second_moment": self.v}


def fedavgm(world: World, lr: float, momentum: float, nesterov: bool = False) -> Book:
    """Compute a run of FedAvgM, whose server applies momentum to the mean update.

    lr, momentum, nesterov: arguments of the class `ServerMomentum`.
    """
    return _book(world, ServerMomentum(world, lr, momentum, nesterov))


def adaptive(world: World, loss: Loss = cross_entropy, **settings: object) -> Book:
    """Compute a run of FedAdagrad, FedAdam or FedYogi.

    loss: the local loss.
    settings: arguments of the class `Adaptive`. One of them, `name`, chooses the method.
    """
    return _book(world, Adaptive(world, **settings), loss)


def _book(world: World, optimiser: ServerMomentum | Adaptive, loss: Loss = cross_entropy) -> Book:
    return replace(
        run_server_rule(world, lambda at: optimiser(at.x, at.mean), loss), server=optimiser.server
    )
