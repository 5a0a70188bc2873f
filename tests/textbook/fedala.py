"""FedALA: Zhang et al. 2023, Algorithm 1, for the head or for the whole model.

x: the received parameters. y': the parameters that the client trained last. W: learned weights from
0 to 1, one per parameter. A job starts from y' + (x - y') W.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from raysim.primitives.streams import stream
from textbook.plain import (
    average,
    copy_for_training,
    cross_entropy,
    detach,
    gradients,
    logits,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def fedala(world: World, rate: float, share: float, top: str = "model.head") -> Book:
    """Compute a run of FedALA, in which jobs start from a learned mixture of two models.

    A client's first job starts from the received parameters. Each later job starts from a mixture
    of the received parameters and the client's last trained parameters. Before the job, the client
    trains the weights of the mixture: one for each parameter, from 0 to 1.
    rate: the learning rate of the weights.
    share: the fraction of the client's samples that train the weights.
    top: the module that is mixed.
    """
    x, names = dict(world.start), trainable(world.start, top)
    trained, shares = dict[int, Params](), dict[int, Params]()

    def mixture(client: int, w: Params) -> Params:
        old = trained[client]
        return x | {name: old[name] + (x[name] - old[name]) * w[name] for name in names}

    def learnt(job: Job) -> Params:
        """Train the weights W with which a client mixes two models, and return W.

        A client's first training makes passes over the samples until the loss is stable, at most
        100. Each later training makes one pass.
        """
        i, first = job.client, job.client not in shares
        w = shares.get(i, {name: torch.ones_like(x[name]) for name in names})
        inputs, labels = world.data[i]
        order = stream(world.seed, "fedala.subset", i, job.turn).permutation(len(labels))
        rows = torch.from_numpy(order[: max(1, int(share * len(labels)))])
        seen = list[float]()
        while True:
            for chosen in rows.split(world.local.batch):
                p = copy_for_training(mixture(i, w))
                loss = F.cross_entropy(logits(p, inputs[chosen], False), labels[chosen])
                for name, grad in gradients(loss, p, names).items():
                    moved = w[name] - rate * grad * (x[name] - trained[i][name])
                    w = w | {name: moved.clamp(0, 1)}
            seen.append(float(loss.detach()))
            last = torch.tensor(seen[-10:], dtype=torch.float64)
            settled = len(seen) > 10 and float(last.std(correction=0)) < 0.1
            if not first or settled or len(seen) == 100:
                return w

    def client(job: Job) -> Params:
        received = x
        if job.client in trained:
            shares[job.client] = learnt(job)
            received = mixture(job.client, shares[job.client])
        p, sgd = copy_for_training(received), optimizer(world, job)
        for step, batch in enumerate(job.batches):
            sgd.step(p, gradients(cross_entropy(p, step, *batch), p, trainable(p)))
        return detach(p)

    for jobs in world.rounds:
        models = [client(job) for job in jobs]
        trained |= {job.client: p for job, p in zip(jobs, models, strict=True)}
        x = average(models, weights(world, jobs))

    def flatten(p: Params) -> torch.Tensor:
        return torch.cat([p[name].flatten() for name in names])

    private = {
        i: {
            "fedala.trained": flatten(p),
            "fedala.weights": flatten(shares[i]) if i in shares else torch.empty(0),
        }
        for i, p in trained.items()
    }
    own = {i: mixture(i, shares[i]) if i in shares else x for i in range(world.clients)}
    return Book(x, private, own=own)
