"""FedProto: Tan et al. 2022, Algorithm 1: clients only send class means of their features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import (
    RowMean,
    copy_for_training,
    detach,
    features,
    gradients,
    head,
    optimizer,
    row_mean,
    trainable,
)
from textbook.world import Book, Job, Params, World


def fedproto(world: World, lam: float = 1.0, by_prototype: bool = False) -> Book:
    """Run FedProto: train on cross-entropy plus lam times the distance to prototypes.

    The distance is the mean squared difference between features and their class's prototype. A
    prototype is the mean of the participants' class means, weighted by samples.
    by_prototype: True classifies by the nearest prototype, False with the client's head.
    """
    models = {client: dict(world.start) for client in range(world.clients)}
    prototypes = dict[int, Tensor]()
    usable = {client: dict[int, Tensor]() for client in range(world.clients)}
    width = len(world.start["model.extractor.1.bias"])
    columns = list[float]()

    def distance(z: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=z.dtype)
        for feature, label in zip(z, labels.tolist(), strict=True):
            if label in prototypes:
                total = total + (feature - prototypes[label]).square().sum() / width
        return total / len(labels)

    def train(job: Job, reported: RowMean) -> Params:
        p, sgd = copy_for_training(models[job.client]), optimizer(world, job)
        for inputs, labels in job.batches:
            z = features(p, inputs)
            task = F.cross_entropy(head(p, z), labels)
            reported.add(task, inputs)
            sgd.step(p, gradients(task + lam * distance(z, labels), p, trainable(p)))
        return detach(p)

    for jobs in world.rounds:
        losses = [RowMean() for _ in jobs]
        trained = [train(job, loss) for job, loss in zip(jobs, losses, strict=True)]
        columns.append(row_mean(losses))
        sums, counts = dict[int, Tensor](), dict[int, int]()
        for job, p in zip(jobs, trained, strict=True):
            models[job.client] = p
            inputs, labels = world.data[job.client]
            classes = set(labels.tolist())
            usable[job.client] = {k: c for k, c in prototypes.items() if k in classes}
            for k in classes:
                z = features(dict(p), inputs[labels == k], False)
                sums[k] = sums.get(k, torch.zeros(width, dtype=z.dtype)) + z.sum(0)
                counts[k] = counts.get(k, 0) + len(z)
        prototypes |= {k: sums[k] / counts[k] for k in sums}

    private = dict[int, Params]()
    for client in {job.client for jobs in world.rounds for job in jobs}:
        private[client] = dict(models[client])
        if by_prototype:
            state = {f"fedproto.prototypes[{k}]": c for k, c in usable[client].items()}
            private[client] |= state or {"fedproto.prototypes#empty": torch.zeros(0)}
    table = torch.zeros(world.classes, width, dtype=torch.float64)
    for k, c in prototypes.items():
        table[k] = c
    present = torch.tensor([k in prototypes for k in range(world.classes)])
    server = {"fedproto.prototypes": table, "fedproto.present": present}
    scored = models
    if by_prototype:
        scored = {i: model | nearest(usable[i], world.classes) for i, model in models.items()}
    return Book({}, private, server, {"train_loss": columns}, scored)


def nearest(prototypes: dict[int, Tensor], classes: int) -> Params:
    """Return a linear head that classifies by the nearest prototype; {} without prototypes.

    The logit of class k for features z is |z|^2 - |z - C_k|^2, or -1e30 for a class without a
    prototype.
    prototypes: the prototype C_k by class k.
    """
    if not prototypes:
        return {}
    d = len(next(iter(prototypes.values())))
    rows = [2 * prototypes.get(k, torch.zeros(d).double()) for k in range(classes)]
    bias = [
        -float(prototypes[k] @ prototypes[k]) if k in prototypes else -1e30 for k in range(classes)
    ]
    return {
        "model.head.weight": torch.stack(rows),
        "model.head.bias": torch.tensor(bias, dtype=torch.float64),
    }
