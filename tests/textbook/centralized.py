"""Centralized training: SGD on the samples of all clients together, in the data set's order.

A round processes about as many samples as a round of the federated run.
"""

from __future__ import annotations

import numpy as np

from raysim.primitives.streams import stream
from textbook.plain import (
    RowMean,
    copy_for_training,
    cross_entropy,
    detach,
    gradients,
    optimizer,
    row_mean,
    trainable,
)
from textbook.world import Book, World


def centralized(world: World) -> Book:
    """Run SGD on the training samples of all clients.

    world.drawn has the data set (`images`, `labels`), each client's training samples (`rows`), and
    the federated run's clients per round (`cohort`) and local settings (`local`).
    """
    drawn, asked = world.drawn, world.drawn["local"]
    rows = np.sort(np.concatenate(drawn["rows"]))
    x, y = drawn["images"][rows], drawn["labels"][rows]
    share = drawn["cohort"] / len(drawn["rows"])
    if asked.steps is not None:
        goal = asked.steps * drawn["cohort"]
    elif (asked.epochs * share) % 1:
        goal = round(asked.epochs * share * len(rows) / asked.batch)
    else:
        goal = int(asked.epochs * share) * -(-len(rows) // asked.batch)
    p, losses = copy_for_training(world.start), []
    for turn, (job,) in enumerate(world.rounds):
        sgd, order, steps = optimizer(world, job), stream(world.seed, "batches", 0, turn), RowMean()
        made = 0
        while made < goal:
            positions = order.permutation(len(rows))
            for chosen in [
                positions[i : i + asked.batch] for i in range(0, len(rows), asked.batch)
            ][: goal - made]:
                loss = cross_entropy(p, 0, x[chosen], y[chosen])
                sgd.step(p, gradients(loss, p, trainable(p)))
                steps.add(loss, x[chosen])
                made += 1
        losses.append(row_mean([steps]))
    return Book(detach(p), columns={"train_loss": losses})
