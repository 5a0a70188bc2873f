"""pFedAvg: FedAvg, in which each client is scored with a personal model.

The personal model is the client's last trained model, or a fine-tuned copy of the shared model.
Fine-tuning starts with a new optimizer. Its learning rate is that of a job which starts from the
same version. If only the head is fine-tuned, the extractor is in eval mode.
"""

from __future__ import annotations

import numpy as np
import torch

from raysim.primitives.streams import stream
from textbook.plain import (
    average,
    copy_for_training,
    detach,
    features,
    gradients,
    head,
    is_buffer,
    logits,
    optimizer,
    train,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def after_local(world: World) -> Book:
    """Run FedAvg, and score each client with the model that it trained last.

    A client that never trained is scored with the shared model.
    """
    x, last = dict(world.start), dict[int, Params]()
    for jobs in world.rounds:
        models = [detach(train(world, job, x)) for job in jobs]
        last |= {job.client: model for job, model in zip(jobs, models, strict=True)}
        x = average(models, weights(world, jobs))
    floats = [name for name in sorted(x, key=is_buffer) if x[name].is_floating_point()]
    private = {
        i: {"pfedavg.model": torch.cat([y[name].flatten() for name in floats])}
        for i, y in last.items()
    }
    return Book(
        x,
        private,
        own={i: {name: last.get(i, x)[name] for name in floats} for i in range(world.clients)},
    )


def finetuned(world: World, epochs: int, head_only: bool = False, last: bool = False) -> Book:
    """Run FedAvg, and score a fine-tuned copy of the shared model for each client.

    epochs: the number of fine-tuning epochs.
    head_only: True: only the head is fine-tuned.
    last: True: score after the last round only; False: after each round.
    """
    x, accuracy, tuned_models = dict(world.start), list[float](), dict[int, Params]()
    for version, jobs in enumerate(world.rounds, 1):
        x = average([train(world, job, x) for job in jobs], weights(world, jobs))
        tuned_models = {
            client: tuned(world, x, client, version, epochs, head_only)
            for client in range(world.clients)
        }
        tests = [
            (logits(tuned_models[client], inputs, False).argmax(1) == y)
            for client, (inputs, y) in enumerate(world.tests)
        ]
        scored = version == len(world.rounds) or not last
        accuracy.append(
            float(np.mean([right.double().mean() for right in tests])) if scored else np.nan
        )
    return Book(x, columns={"accuracy_finetuned": accuracy}, own=tuned_models)


def tuned(
    world: World, model: Params, client: int, version: int, epochs: int, head_only: bool
) -> Params:
    """Return a copy of a model that is fine-tuned on a client's training samples.

    Samples in `world.drawn["spared"]`, which jobs do not use, are added.
    version: determines the random stream and the learning rate.
    epochs: the number of passes over the samples.
    head_only: True fine-tunes only the head.
    """
    spared = world.drawn.get("spared")
    parts = [world.data[client], *([spared[client]] if spared else [])]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    p, order = copy_for_training(model), stream(world.seed, "finetune", client, version)
    sgd, batch = optimizer(world, Job(client, 0, version, len(y), (), ())), world.local.batch
    for _ in range(epochs):
        positions = order.permutation(len(y))
        for start in range(0, len(y), batch):
            chosen = positions[start : start + batch]
            if len(chosen) == 1 and start and any(is_buffer(name) for name in p):
                continue  # BatchNorm knows no variance of a single sample
            loss = torch.nn.functional.cross_entropy(
                head(p, features(p, x[chosen], not head_only)), y[chosen]
            )
            sgd.step(p, gradients(loss, p, trainable(p, "model.head" if head_only else "model")))
    return detach(p)
