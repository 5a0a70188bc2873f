"""Losses that a run can use instead of the usual loss of the task (`loss=...`).

A loss maps outputs [B, C] and labels to a value for each sample, [B]. `raysim.run(loss=...)` also
accepts a user's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss

from raysim.primitives.checks import above, at_least, in_range
from raysim.primitives.kinds import POSITION_KINDS, Kind

RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Smoothed:
    """Cross-entropy with smoothed labels (Szegedy et al., CVPR 2016).

    share: weight of the uniform distribution in each label, in [0, 1).
    """

    kind: ClassVar[Kind] = "classification"
    share: float = 0.1

    def __post_init__(self) -> None:
        in_range("loss.share", self.share, least=0, below=1)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample [B]."""
        return cross_entropy(outputs, labels, reduction="none", label_smoothing=self.share)


@dataclass(frozen=True)
class Focal:
    """Cross-entropy times (1 - p)^gamma, where p is the predicted probability of the label.

    Well predicted samples get a small weight (Lin et al., ICCV 2017). Departures: there may be more
    than two classes, and classes have no weights.
    gamma: the exponent, at least 1.
    """

    kind: ClassVar[Kind] = "classification"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        # With gamma below 1 PyTorch's gradient is nan where the probability of the label is 1.
        at_least("loss.gamma", self.gamma, 1)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample [B]."""
        losses = cross_entropy(outputs, labels, reduction="none")
        return (-torch.expm1(-losses)) ** self.gamma * losses


@dataclass(frozen=True)
class Huber:
    """Huber's loss (1964), averaged over the outputs of a sample.

    The loss of an output is half the squared error up to the error `delta`, and linear in larger
    errors.
    delta: in the unit of the labels; above 0.
    """

    kind: ClassVar[Kind] = "regression"
    delta: float = 1.0

    def __post_init__(self) -> None:
        above("loss.delta", self.delta, 0)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample [B]."""
        return huber_loss(outputs, labels, reduction="none", delta=self.delta).flatten(1).mean(1)


def check_loss(
    loss: RowLoss, kind: Kind, output_shape: Sequence[int], label_shape: Sequence[int]
) -> None:
    """Raise ValueError if a loss does not fit the kind of the task or the shape of its labels.

    loss: a function of outputs [B, ...] and labels [B, ...] that must return a tensor [B, ...].
    output_shape, label_shape: the shapes for one sample.
    """
    name = loss_name(loss)
    kind_of_loss: Kind = getattr(loss, "kind", kind)
    fits_positions = kind in POSITION_KINDS and kind_of_loss == "classification"
    if kind_of_loss != kind and not fits_positions:
        raise ValueError(
            f"loss={name} is for {kind_of_loss}, but this data is for {kind}. Choose another loss, "
            "or loss=usual."
        )
    is_classes = kind in ("classification", *POSITION_KINDS)
    labels = torch.zeros(2, *label_shape, dtype=torch.int64 if is_classes else torch.float32)
    try:
        losses: object = loss(torch.zeros(2, *output_shape), labels)
    except Exception as error:  # any error of a user's own code
        raise ValueError(
            f"loss={name} fails for outputs {[2, *output_shape]} and labels {list(labels.shape)} "
            f"({type(error).__name__}: {error}). A loss for {kind} must accept these shapes and "
            "return one value for each sample."
        ) from error
    if not isinstance(losses, Tensor):
        returned = "nothing" if losses is None else f"a {type(losses).__name__}"
        raise ValueError(
            f"loss={name} returns {returned}. Return a tensor with one value for each sample."
        )
    if not losses.ndim or len(losses) != 2:
        raise ValueError(
            f"loss={name} returns the shape {list(losses.shape)} for two samples. Return one value "
            "for each sample; PyTorch's own losses do with reduction='none'."
        )


def loss_name(loss: RowLoss) -> str:
    """Return the name of a loss for messages.

    For a loss of this module it is the name of the option in `loss=...`, such as "focal".
    """
    loss = getattr(loss, "func", loss)  # a functools.partial of a function
    name = str(getattr(loss, "__name__", type(loss).__name__))
    return name.lower() if type(loss).__module__ == __name__ else name
