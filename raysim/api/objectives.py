"""What is learnt from which labels: the loss that training descends, and the metrics that models are scored with."""

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
    """Return the mean over samples [n], in float64."""
    return float(values.mean(dtype=np.float64))


@dataclass(frozen=True)
class Metric:
    """A score of samples.

    rows: from outputs [B, C] and labels to what is kept of each sample, [B] or [B, L].
    summarise: from what was kept of n >= 1 samples, [n] or [n, L], to their score.
    """

    name: str
    rows: Callable[[Tensor, Tensor], Tensor]
    summarise: Callable[[np.ndarray], float] = mean

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.name not in LOWER_IS_BETTER


@dataclass(frozen=True)
class Objective:
    """A kind of task: `loss` is the mean over a batch, `losses` has one value per sample; the first metric is usual."""

    loss: Callable[[Tensor, Tensor], Tensor]
    losses: RowLoss
    metrics: tuple[Metric, ...]

    def descending(self, rows: RowLoss) -> Objective:
        """The same with another loss, given per sample."""

        def losses(outputs: Tensor, labels: Tensor) -> Tensor:
            found = rows(outputs, labels)
            return found if found.ndim == 1 else found.flatten(1).mean(1)

        return replace(
            self, loss=lambda outputs, labels: losses(outputs, labels).mean(), losses=losses
        )

    def metric(self, name: str | None, kind: Kind) -> Metric:
        """The metric of that name, or the usual one. Raises ValueError for another kind's."""
        names = [metric.name for metric in self.metrics]
        if name is not None and name not in names:
            raise ValueError(
                f"evaluate.metric={name} does not score {kind}: use {' or '.join(names)}"
            )
        return self.metrics[0 if name is None else names.index(name)]


def is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest output is the label's."""
    return outputs.argmax(1) == labels


def is_among_five(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the label's output is among the five largest."""
    return (outputs.topk(min(5, outputs.shape[1]), 1).indices == labels.unsqueeze(1)).any(1)


def is_there_and_predicted(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return uint8 [B, L]: 2 where the label is there, plus 1 where its output is positive."""
    return 2 * (labels > 0).to(torch.uint8) + (outputs > 0).to(torch.uint8)


def macro_f1(codes: np.ndarray) -> float:
    """Return the mean over the labels of 2 TP / (2 TP + FP + FN), from `is_there_and_predicted` [n, L].

    A label that is neither there nor predicted in these samples counts as 0, as in scikit-learn's
    `f1_score(average="macro")` with its default of `zero_division`.
    """
    right = (codes == 3).sum(0)
    there_or_predicted = (codes & 1).sum(0, dtype=np.int64) + (codes >> 1).sum(0, dtype=np.int64)
    return float(np.mean(2 * right / np.maximum(there_or_predicted, 1)))


def f1_of_each(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's F1 over its labels, [B]; 0 where no label is there or predicted.

    The mean is scikit-learn's `f1_score(average="samples")` with its default of `zero_division`.
    """
    predicted, there = outputs > 0, labels > 0
    right = (predicted & there).sum(1)
    there_or_predicted = predicted.sum(1) + there.sum(1)
    return 2 * right / there_or_predicted.clamp(min=1)


def share_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Share of the labels that are predicted rightly, there or not."""
    return ((outputs > 0) == (labels > 0)).float().mean(1)


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over the outputs."""
    return (outputs - labels).abs().mean(1)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over the outputs."""
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
            Metric("f1", is_there_and_predicted, macro_f1),
            Metric("f1_samples", f1_of_each),
            Metric("label_accuracy", share_right),
        ),
    ),
    "regression": Objective(
        mse_loss, squared_error, (Metric("mae", absolute_error), Metric("mse", squared_error))
    ),
}
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
