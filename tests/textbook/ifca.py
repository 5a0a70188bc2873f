"""IFCA: Ghosh et al. 2020, Algorithm 1, with model averaging."""

from __future__ import annotations

import torch.nn.functional as F

from textbook.plain import average, detach, logits, train
from textbook.world import Book, Params, World


def ifca(world: World, clusters: int) -> Book:
    """Let each client train the model with the least loss; average each over its clients."""
    prefixes = ["model.", *(f"ifca.model{k}." for k in range(1, clusters))]
    models = [
        {f"model.{n.removeprefix(at)}": t for n, t in world.start.items() if n.startswith(at)}
        for at in prefixes
    ]
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
        for k in range(clusters):
            shares[k].append(len(trained[k]) / len(jobs))
        models = [
            average(trained[k], samples[k]) if trained[k] else models[k] for k in range(clusters)
        ]

    shared = {
        f"{at}{name.removeprefix('model.')}": tensor
        for at, p in zip(prefixes, models, strict=True)
        for name, tensor in p.items()
    }
    scored = {client: models[best(client)] for client in range(world.clients)}
    columns = {f"ifca.share_{k}": values for k, values in enumerate(shares)}
    return Book(shared, columns=columns, own=scored)
