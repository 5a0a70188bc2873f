"""FedBABU: Oh et al. 2022: clients train the extractor, and the head stays at its initial values.

Each client is scored with a fine-tuned copy of the shared model.
"""

from __future__ import annotations

import numpy as np

from textbook.pfedavg import tuned
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


def fedbabu(world: World, epochs: int, head_only: bool) -> Book:
    """Compute a run of FedBABU: FedAvg of the extractor, and fine-tuning before each scoring.

    Jobs never train the head. Each client is scored with its fine-tuned copy of the shared model.
    epochs: the number of fine-tuning epochs.
    head_only: True fine-tunes only the head.
    """

    def client(job: Job, x: Params) -> Params:
        p, sgd = copy_for_training(x), optimizer(world, job)
        for inputs, labels in job.batches:
            loss = cross_entropy(p, 0, inputs, labels)
            sgd.step(p, gradients(loss, p, trainable(p, "model.extractor")))
        return detach(p)

    x, before, after = detach(world.start), list[float](), list[float]()
    head = {name: tensor for name, tensor in x.items() if name.startswith("model.head.")}
    own: dict[int, Params] = {}
    for version, jobs in enumerate(world.rounds, 1):
        x = average([client(job, x) for job in jobs], weights(world, jobs)) | head
        own = {i: tuned(world, x, i, version, epochs, head_only) for i in range(world.clients)}
        before.append(accuracy(world, dict.fromkeys(own, x)))
        after.append(accuracy(world, own))
    shared = {name: tensor for name, tensor in x.items() if name not in head}
    columns = {"accuracy": before, "accuracy_finetuned": after}
    return Book(shared, columns=columns, own=own)


def accuracy(world: World, models: dict[int, Params]) -> float:
    """Return the mean over clients of the accuracy of each client's model on its test samples."""
    shares = []
    for client, (inputs, labels) in enumerate(world.tests):
        right = logits(models[client], inputs, False).argmax(1) == labels
        shares.append(float(right.double().mean()))
    return float(np.mean(shares))
