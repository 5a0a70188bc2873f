"""FedMix and NaiveMix: Yoon et al. 2021, Proposition 1 and the local update.

x, y: inputs and labels of a batch. x_bar, y_bar: a pair, the mean input and label of random samples
of one client. CE(u, y): the cross-entropy for the input u.

A step draws from all clients' pairs without replacement, or makes new pairs (`fresh`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import Parts, logits, run_with_loss
from textbook.world import Book, Job, Params, World

Pairs = tuple[Tensor, Tensor]  # mean inputs [R, ...], mean labels [R, C]


def means(world: World, client: int, rows: np.ndarray) -> Pairs:
    """Return the mean inputs and mean labels of some sets of a client's samples.

    rows: [sets, samples], the positions of the samples of each set.
    """
    x, y = world.data[client]
    one_hot = torch.eye(world.classes, dtype=x.dtype)[y]
    return torch.stack([x[row].mean(0) for row in rows]), torch.stack(
        [one_hot[row].mean(0) for row in rows]
    )


def pooled(world: World, count: int, samples: int) -> Pairs:
    """Return the pairs of all clients, one client after another.

    A pair is the mean input and the mean label of `samples` random samples of one client.
    count: the number of pairs of each client.
    """
    parts = []
    for client, (x, _) in enumerate(world.data):
        rows = stream(world.seed, "contribute", client).integers(len(x), size=(count, samples))
        parts.append(means(world, client, rows))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def drawn(world: World, job: Job, pool: Pairs | None, samples: int, single: bool) -> list[Pairs]:
    """Return for each step of a job the pairs that FedMix mixes with the batch.

    A pair is the mean input and the mean label of random samples of one client.
    pool: the pairs of all clients; None makes new pairs in each step.
    samples: the number of samples in a new pair.
    single: True: one pair for the whole batch, not for each row.
    """
    generator, steps = stream(world.seed, "fedmix.pairs", job.client, job.turn), len(job.batches)
    rows = 1 if single else max(len(y) for _, y in job.batches)
    if pool is not None:
        chosen = [generator.choice(len(pool[0]), size=rows, replace=False) for _ in range(steps)]
        return [(pool[0][c], pool[1][c]) for c in chosen]
    sizes = np.array([len(y) for _, y in world.data])
    clients = generator.choice(np.arange(len(sizes)), size=(steps, rows, 1))
    places = generator.integers(sizes[clients], size=(steps, rows, samples))
    step_pairs = []
    for owners, wanted in zip(clients[..., 0], places, strict=True):
        pairs = [means(world, owner, row[None]) for owner, row in zip(owners, wanted, strict=True)]
        step_pairs.append((torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])))
    return step_pairs


def fedmix(
    world: World,
    lam: float,
    count: int,
    samples: int,
    single: bool = False,
    naive: bool = False,
    public: bool = False,
    fresh: bool = False,
) -> Book:
    """Compute a run of FedMix, whose loss also uses averages of random clients' samples.

    A pair is the mean input and the mean label of some samples of one client. The loss approximates
    the loss of Mixup, which mixes each row of a batch with a pair (Proposition 1):

        loss = mean of l1 + l2 + l3        u = (1 - lam) x
        l1 = (1 - lam) CE(u, y)    l2 = lam CE(u, y_bar)    l3 = lam <grad_u l1, x_bar>

    lam: the weight of the pair.
    count: the number of pairs that each client sends.
    samples: the number of samples in a pair.
    single: True uses the same pair for all rows of a batch.
    naive: True computes NaiveMix, which mixes the inputs in place of the approximation.
    public: True divides the gradient term of the loss by the batch size, as public implementations
    do.
    fresh: True makes new pairs from raw data in each step, as FedBR's code does.
    """
    pool = None if fresh else pooled(world, count, samples)

    def losses(job: Job, received: Params) -> Parts:
        pairs = drawn(world, job, pool, samples, single)

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            x_bar, y_bar = (part[: len(y)].expand(len(y), *part.shape[1:]) for part in pairs[step])
            u = ((1 - lam) * x + (lam * x_bar if naive else 0.0)).requires_grad_()
            log_p = logits(p, u).log_softmax(1)
            l1, l2 = (
                (1 - lam) * F.nll_loss(log_p, y, reduction="none"),
                lam * -(y_bar * log_p).sum(1),
            )
            if naive:
                return (l1 + l2).mean(), 0.0
            (slope,) = torch.autograd.grad(l1.sum(), u, create_graph=True)
            l3 = lam * (slope * x_bar).flatten(1).sum(1) / (len(y) if public else 1)
            return (l1 + l2 + l3).mean(), 0.0

        return loss

    book = run_with_loss(world, losses)
    return (
        book
        if pool is None
        else replace(book, server={"fedmix.inputs": pool[0], "fedmix.targets": pool[1]})
    )
