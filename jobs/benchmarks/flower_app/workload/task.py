"""Define the workloads W1 and W2 of `raysim bench` for a Flower app, on synthetic samples.

The environment variable WORKLOAD chooses one of them, because Flower's `run_simulation` passes no
run config to an app.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RATE = 0.01
NAME = os.environ.get("WORKLOAD", "W2")


@dataclass(frozen=True)
class Workload:
    """The sizes of a workload.

    clients: the number of all clients.
    samples: the number of samples of each client.
    cohort: the number of clients in a round.
    batch: the number of samples in a step.
    """

    clients: int
    samples: int
    cohort: int
    batch: int


WORKLOADS = {"W1": Workload(100, 600, 10, 32), "W2": Workload(1000, 60, 100, 10)}
WORKLOAD = WORKLOADS[NAME]


def build_model() -> nn.Module:
    """Return the model of the workload that the environment variable WORKLOAD names.

    "W1" has a CNN of 1.7 million parameters, "W2" (the default) a small MLP.
    """
    if NAME == "W2":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    convolutions = [
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    head = [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*convolutions, *head)


@lru_cache(maxsize=1000)
def client_samples(client: int) -> tuple[Tensor, Tensor]:
    """Return inputs [n, 1, 28, 28] and labels int64 [n] of a client.

    A process computes them once for each client.
    """
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(WORKLOAD.samples, 1, 28, 28, generator=generator)
    return inputs, torch.randint(10, (WORKLOAD.samples,), generator=generator)


def train(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Train one epoch with SGD; return the mean loss over the samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    total = 0.0
    for rows in torch.randperm(len(labels)).split(WORKLOAD.batch):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return total / len(labels)
