"""What is learnt from which labels: the loss that training descends, and the metrics that models are scored with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from raysim.api.losses import RowLoss
from raysim.primitives.kinds import LOWER_IS_BETTER, Kind


@dataclass(frozen=True)
class Metric:
    """A number per sample, of which histories and reports show means. rows: outputs [B, C] and labels to [B]."""

    name: str
    rows: Callable[[Tensor, Tensor], Tensor]

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

        return replace(self, loss=lambda outputs, labels: losses(outputs, labels).mean(), losses=losses)

    def metric(self, name: str | None, kind: Kind) -> Metric:
        """The metric of that name, or the usual one. Raises ValueError for another kind's."""
        names = [metric.name for metric in self.metrics]
        if name is not None and name not in names:
            raise ValueError(f"evaluate.metric={name} does not score {kind}: use {' or '.join(names)}")
        return self.metrics[0 if name is None else names.index(name)]


def is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest output is the label's."""
    return outputs.argmax(1) == labels


def is_among_five(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the label's output is among the five largest."""
    return (outputs.topk(min(5, outputs.shape[1]), 1).indices == labels.unsqueeze(1)).any(1)


def f1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of labels with positive outputs and those that are there: twice the common ones over all; 1 where none are."""
    predicted, there = outputs > 0, labels > 0
    both, all_ = (predicted & there).sum(1), predicted.sum(1) + there.sum(1)
    return torch.where(all_ > 0, 2 * both / all_.clamp(min=1), 1.0)


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
        lambda outputs, labels: binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1),
        (Metric("f1", f1), Metric("label_accuracy", share_right)),
    ),
    "regression": Objective(mse_loss, squared_error, (Metric("mae", absolute_error), Metric("mse", squared_error))),
}
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
