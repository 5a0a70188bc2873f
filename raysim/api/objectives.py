"""The loss and the metrics of each kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from raysim.api.losses import RowLoss
from raysim.primitives.kinds import LOWER_IS_BETTER, Kind


def mean(values: np.ndarray) -> float:
    """Return the mean over samples [n], computed in float64."""
    return float(values.mean(dtype=np.float64))


@dataclass(frozen=True)
class Metric:
    """A score of samples.

    rows: function from outputs [B, C] and labels to a value for each sample [B], or to L values [B,
    L] for L labels. summarise: function from the values of n >= 1 samples, [n] or [n, L], to the
    score.
    """

    name: str
    rows: Callable[[Tensor, Tensor], Tensor]
    summarise: Callable[[np.ndarray], float] = mean

    @property
    def higher(self) -> bool:
        """True if a higher score is better."""
        return self.name not in LOWER_IS_BETTER


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a kind of task.

    loss: function from outputs [B, C] and labels to the mean over the batch. losses: function from
    the same to a loss for each sample [B]. metrics: the metrics; the first one is the usual one.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    losses: RowLoss
    metrics: tuple[Metric, ...]

    def with_loss(self, row_loss: RowLoss) -> Objective:
        """Return the same objective with another loss."""

        def losses(outputs: Tensor, labels: Tensor) -> Tensor:
            values = row_loss(outputs, labels)
            return values if values.ndim == 1 else values.flatten(1).mean(1)

        return replace(
            self, loss=lambda outputs, labels: losses(outputs, labels).mean(), losses=losses
        )

    def metric(self, name: str | None, kind: Kind) -> Metric:
        """Return the metric of this name; None returns the usual one. Raises ValueError."""
        names = [metric.name for metric in self.metrics]
        if name is not None and name not in names:
            raise ValueError(
                f"evaluate.metric={name} does not score {kind}. Set it to {' or '.join(names)}."
            )
        return self.metrics[0 if name is None else names.index(name)]


def is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return bool [B]: True if the largest output is the label's output."""
    return outputs.argmax(1) == labels


def is_among_five(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return bool [B]: True if the label's output is among the five largest."""
    return (outputs.topk(min(5, outputs.shape[1]), 1).indices == labels.unsqueeze(1)).any(1)


def label_codes(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return uint8 [B, L]: 2 if a sample has the label, plus 1 if its output is positive."""
    return 2 * (labels > 0).to(torch.uint8) + (outputs > 0).to(torch.uint8)


def macro_f1(codes: np.ndarray) -> float:
    """Return the mean over the labels of 2 TP / (2 TP + FP + FN), from `label_codes` [n, L].

    TP, FP and FN count true positives, false positives and false negatives. A label that no sample
    has and that is never predicted counts as 0, as in scikit-learn's `f1_score(average="macro")`
    with the default of `zero_division`.
    """
    right = (codes == 3).sum(0)
    present_or_predicted = (codes & 1).sum(0, dtype=np.int64) + (codes >> 1).sum(0, dtype=np.int64)
    return float(np.mean(2 * right / np.maximum(present_or_predicted, 1)))


def f1_of_each(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the F1 score [B] of each sample over its labels; 0 for a sample without labels.

    The mean is scikit-learn's `f1_score(average="samples")` with the default of `zero_division`.
    """
    predicted = outputs > 0
    present = labels > 0
    right = (predicted & present).sum(1)
    present_or_predicted = predicted.sum(1) + present.sum(1)
    return 2 * right / present_or_predicted.clamp(min=1)


def share_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the share of labels whose presence is predicted correctly."""
    return ((outputs > 0) == (labels > 0)).float().mean(1)


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the mean absolute error over the outputs."""
    return (outputs - labels).abs().mean(1)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the mean squared error over the outputs."""
    return (outputs - labels).square().mean(1)


OBJECTIVES: Mapping[Kind, Objective] = {
    "classification": Objective(
        cross_entropy,
        lambda outputs, labels: cross_entropy(outputs, labels, reduction="none"),
        (Metric("accuracy", is_right), Metric("top5_accuracy", is_among_five)),
    ),
    "multilabel": Objective(
        binary_cross_entropy_with_logits,
        lambda outputs, labels: binary_cross_entropy_with_logits(
            outputs, labels, reduction="none"
        ).mean(1),
        (
            Metric("f1", label_codes, macro_f1),
            Metric("f1_samples", f1_of_each),
            Metric("label_accuracy", share_right),
        ),
    ),
    "regression": Objective(
        mse_loss, squared_error, (Metric("mae", absolute_error), Metric("mse", squared_error))
    ),
}
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
