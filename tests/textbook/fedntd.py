"""FedNTD: Lee et al. 2022: cross-entropy plus beta times the distillation loss `not_true`.

The teacher is the received model in eval mode.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from textbook.mixup import mixes, mixture
from textbook.plain import Parts, detach, logits, other_class_logits, run_with_loss
from textbook.world import Book, Job, Params, World


def not_true(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """Return tau^2 KL(teacher | student) over the classes other than the true one.

    student, teacher: logits [B, C].
    y: the true classes, [B].
    tau: the temperature.
    """
    q_s, q_t = (
        (other_class_logits(student, y) / tau).softmax(1),
        (other_class_logits(teacher, y) / tau).softmax(1),
    )
    return tau**2 * (q_t * (q_t / q_s).log()).sum(1).mean()


def fedntd(world: World, beta: float, tau: float, mixed: float | None = None) -> Book:
    """Run FedAvg with the local loss CE + beta NTD.

    NTD is the loss `not_true`, whose teacher is the received model.
    tau: the temperature of NTD.
    mixed: the parameter alpha of Mixup; None: no Mixup. Both losses of a mixed sample are weighted
    means over its two labels.
    """

    def losses(job: Job, received: Params) -> Parts:
        teacher, drawn = detach(received), mixes(world, job, mixed) if mixed else []

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            labels = [(1.0, y)]
            if mixed:
                lam, partner = drawn[step]
                x, labels = mixture(x, lam, partner), [(lam, y), (1 - lam, y[partner])]
            s, t = logits(p, x), logits(teacher, x, training=False)
            task = sum(share * F.cross_entropy(s, label) for share, label in labels)
            return task, beta * sum(share * not_true(s, t, label, tau) for share, label in labels)

        return loss

    return run_with_loss(world, losses)
