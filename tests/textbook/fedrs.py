"""FedRS: Li and Zhan 2021, the restricted softmax, with the scale of the paper or of the code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import HEAD, Parts, features, run_with_loss
from textbook.world import Book, Job, Params, World


def fedrs(world: World, alpha: float, relative: bool = False) -> Book:
    """Run FedAvg with a cross-entropy whose logits are scaled by class; the head has no bias.

    alpha: the scale of classes that the client lacks; other classes have 1.
    relative: True: the scale of class c is alpha + (1 - alpha) n_c / max n, as in the released
    code. n_c is the client's number of samples of class c.
    """

    def losses(job: Job, received: Params) -> Parts:
        counts = torch.bincount(world.data[job.client][1], minlength=world.classes).double()
        scales = (
            alpha + (1 - alpha) * counts / counts.max()
            if relative
            else torch.where(counts > 0, 1.0, alpha)
        )

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            scaled = p[f"{HEAD}.weight"] * scales.unsqueeze(1)
            return F.cross_entropy(features(p, x) @ scaled.T, y), 0.0

        return loss

    return run_with_loss(world, losses)
