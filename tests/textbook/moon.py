"""MOON: Li et al. 2021, eqs. (3) and (4), Algorithm 1.

The contrastive loss l_con of eq. (3) compares the features of the trained model with those of the
received model and of the client's earlier models. In a client's first job, l_con is 0. A
projection, if any, is part of the extractor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import EXTRACTOR, Parts, detach, features, head, run_with_loss
from textbook.world import Book, Job, Params, World


def represented(p: Mapping[str, Tensor], x: Tensor, training: bool = True) -> Tensor:
    """Return the encoder's features, after the projection if there is one."""
    if f"{EXTRACTOR}.3.weight" not in p:
        return features(p, x, training)
    inner = f"{EXTRACTOR}.0."
    z = features(
        {n.replace(inner, f"{EXTRACTOR}."): p[n] for n in p if n.startswith(inner)}, x, training
    )
    for layer in (1, 3):
        z = F.linear(
            z if layer == 1 else z.relu(),
            p[f"{EXTRACTOR}.{layer}.weight"],
            p[f"{EXTRACTOR}.{layer}.bias"],
        )
    return z


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine similarity of each row of a with the same row of b.

    It is 0 if a row has only zeros.
    """
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)


def moon(
    world: World, mu: float, tau: float, projection: tuple[int, ...] = (), pool: int = 1
) -> Book:
    """Compute a run of MOON: FedAvg with the loss CE + mu times a contrastive loss.

    The contrastive loss pulls features to those of the received model, and away from those of the
    client's earlier models.
    tau: the temperature.
    projection: the widths of the two projection layers; empty: no projection.
    pool: the largest number of earlier models in the loss. The newest ones are used.
    """
    layers = [f"{EXTRACTOR}.{layer}.bias" for layer in (1, 3)]
    assert (
        tuple(len(world.start[name]) for name in layers if layers[1] in world.start) == projection
    )
    before: dict[int, list[Params]] = {}

    def losses(job: Job, received: Params) -> Parts:
        frozen, negatives = detach(received), list(before.get(job.client, []))

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
            z = represented(p, x)
            task = F.cross_entropy(head(p, z), y)
            if not negatives:
                return task, 0.0
            pull = (cosine(z, represented(frozen, x, training=False)) / tau).exp()
            push = sum(
                (cosine(z, represented(old, x, training=False)) / tau).exp() for old in negatives
            )
            return task, mu * -(pull / (pull + push)).log().mean()

        return loss

    def trained(job: Job, p: Params) -> None:
        model = {name: tensor.clone() for name, tensor in detach(p).items()}
        before[job.client] = [*before.get(job.client, []), model][-pool:]

    def flatten(p: Params) -> Tensor:
        return torch.cat([p[name].flatten() for name in world.start if p[name].is_floating_point()])

    book = run_with_loss(world, losses, trained)
    private = {
        i: {"moon.previous": torch.stack([flatten(p) for p in models])}
        for i, models in before.items()
    }
    return replace(book, private=private)
