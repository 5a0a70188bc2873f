"""FedLD's clients: Zeng et al. 2024, eq. (3), and the variants of it that its spec lists."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from textbook.plain import logits, untrue, with_loss
from textbook.world import Book, Params, World


def margins(f: Tensor, y: Tensor) -> Tensor:
    """rho_b = f_b,y - max_{c != y} f_b,c."""
    return f[range(len(y)), y] - untrue(f, y).amax(1)


def margin_control(world: World, lam: float, kind: str, threshold: float = 0.0) -> Book:
    """CE + lam times a penalty on large logits."""

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

    return with_loss(world, lambda job, received: loss)


def damped_margin(world: World, temperature: float) -> Book:
    """CE((1 - sigmoid(rho_b / T)) f_b, y_b)."""

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        f = logits(p, x)
        return F.cross_entropy((1 - (margins(f, y) / temperature).sigmoid()).unsqueeze(1) * f, y), 0.0

    return with_loss(world, lambda job, received: loss)
