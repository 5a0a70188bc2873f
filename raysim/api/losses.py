"""Losses that a run may choose in place of the usual one: each gives a loss per sample of outputs [B, C] and labels.

A user's own is a class like these, or a function: `__call__(outputs, labels)` to [B], of plain tensor operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss

from raysim.primitives.checks import above, at_least, in_range
from raysim.primitives.kinds import Kind

RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Smoothed:
    """Cross-entropy with smoothed labels (Szegedy et al., CVPR 2016)."""

    kind: ClassVar[Kind] = "classification"
    share: float = 0.1

    def __post_init__(self) -> None:
        in_range("loss.share", self.share, least=0, below=1)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """[B]."""
        return cross_entropy(outputs, labels, reduction="none", label_smoothing=self.share)


@dataclass(frozen=True)
class Focal:
    """Cross-entropy, times (1 - probability of the label)^gamma: samples that are right already weigh less.

    Lin et al., ICCV 2017, for several classes and without class weights.
    """

    kind: ClassVar[Kind] = "classification"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        at_least(
            "loss.gamma", self.gamma, 1
        )  # below it the gradient has no bound where a label is sure

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """[B]."""
        losses = cross_entropy(outputs, labels, reduction="none")
        return (-torch.expm1(-losses)) ** self.gamma * losses


@dataclass(frozen=True)
class Huber:
    """Half the squared error up to `delta`, and linear beyond it (Huber 1964); the mean over the outputs."""

    kind: ClassVar[Kind] = "regression"
    delta: float = 1.0

    def __post_init__(self) -> None:
        above("loss.delta", self.delta, 0)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """[B]."""
        return huber_loss(outputs, labels, reduction="none", delta=self.delta).mean(1)


def check_loss(loss: RowLoss, kind: Kind, outputs: int) -> None:
    """Raise ValueError, in one sentence, for a loss that does not fit these labels, or gives no value a sample."""
    meant: Kind = getattr(loss, "kind", kind)
    if meant != kind:
        raise ValueError(
            f"loss={loss_name(loss)} is for {meant}, and this data is for {kind}: choose another, or loss=usual"
        )
    labels = (
        torch.zeros(2, dtype=torch.int64) if kind == "classification" else torch.zeros(2, outputs)
    )
    try:
        made: object = loss(torch.zeros(2, outputs), labels)
    except Exception as error:  # of the user's own code
        raise ValueError(
            f"loss={loss_name(loss)} cannot take outputs [2, {outputs}] and labels {list(labels.shape)} "
            f"({type(error).__name__}: {error}): a loss of {kind} takes such, and gives one value a sample"
        ) from error
    if not isinstance(made, Tensor):
        what = "nothing" if made is None else f"a {type(made).__name__} and no tensor"
        raise ValueError(f"loss={loss_name(loss)} returns {what}: give one value for each sample")
    if not made.ndim or len(made) != 2:
        raise ValueError(
            f"loss={loss_name(loss)} gives {list(made.shape)} values of two samples: give one for each; PyTorch's own "
            "losses do with reduction='none'"
        )


def loss_name(loss: RowLoss) -> str:
    """What a loss is called in a sentence."""
    loss = getattr(loss, "func", loss)  # a function whose other arguments are given
    name = str(getattr(loss, "__name__", type(loss).__name__))
    return name.lower() if type(loss).__module__ == __name__ else name  # ours are words
