"""FedLD's clients: Zeng et al. 2024, eq. (3), and its variants.

Symbols: f_b, the logits of sample b; y_b, its class; rho_b, its margin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.mixup import mixes, mixture
from textbook.plain import Parts, logits, other_class_logits, run_with_loss
from textbook.world import Book, Job, Params, World


def margins(f: Tensor, y: Tensor) -> Tensor:
    """Return the margin of each sample: the logit of its class minus its largest other logit.

    f: logits [B, C].
    y: classes [B].
    """
    return f[range(len(y)), y] - other_class_logits(f, y).amax(1)


def margin_control(world: World, lam: float, kind: str, threshold: float = 0.0) -> Book:
    """Run FedAvg with the cross-entropy plus lam times a penalty on large logits.

    f_b, rho_b: the logits and the margin (`margins`) of sample b.
    kind: "marg_log": mean log(1 + |f_b|^2), eq. (3). "batch_softmax": log(1 + s), where s is the
    sum of all squared class probabilities over all samples in the batch. "logit_l2": mean |f_b|^2.
    Any other text: mean max(rho_b - threshold, 0)^2.
    """

    def penalty(f: Tensor, y: Tensor) -> Tensor:
        if kind == "marg_log":
            return (1 + f.square().sum(1)).log().mean()
        if kind == "batch_softmax":
            return (1 + f.softmax(1).square().sum()).log()
        if kind == "logit_l2":
            return f.square().sum(1).mean()
        return (margins(f, y) - threshold).relu().square().mean()

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        f = logits(p, x)
        return F.cross_entropy(f, y), lam * penalty(f, y)

    return run_with_loss(world, lambda job, received: loss)


def damped_margin(world: World, temperature: float, mixed: float | None = None) -> Book:
    """Run FedAvg with the loss CE((1 - sigmoid(rho_b / T)) f_b, y_b) of each sample b.

    CE: cross-entropy. f_b: logits. y_b: class. rho_b: margin (`margins`).
    temperature: T.
    mixed: the alpha of Mixup; None without Mixup. With Mixup, the label with the larger weight
    decides rho_b.
    """

    def losses(job: Job, received: Params) -> Parts:
        drawn = mixes(world, job, mixed) if mixed else []

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            lam, partner = drawn[step] if mixed else (1.0, torch.arange(len(y)))
            f = logits(p, mixture(x, lam, partner))
            rho = margins(f, y if lam > 0.5 else y[partner])
            damped = (1 - (rho / temperature).sigmoid()).unsqueeze(1) * f
            return lam * F.cross_entropy(damped, y) + (1 - lam) * F.cross_entropy(
                damped, y[partner]
            ), 0.0

        return loss

    return run_with_loss(world, losses)
