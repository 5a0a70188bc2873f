"""Mixup: train on weighted means of two samples of a client, and of their labels.

Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (ICLR 2018), as FedBR (ICML 2023,
Appendix A) uses it. Each local batch draws a permutation pi and one weight lam:

    x~ = lam x + (1 - lam) x_pi    y~ = lam onehot(y) + (1 - lam) onehot(y_pi)
    lam ~ Beta(alpha, alpha), alpha = 0.2

Inputs are mixed after augmentation and normalisation. The model is trained only on mixed batches.

Choices
- lam is not replaced by max(lam, 1 - lam).
- DomainBed's Mixup differs: it mixes batches of different domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above

if TYPE_CHECKING:
    from raysim.api.context import Batch
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


def soft_targets(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels as rows of class probabilities, [..., C], where C is `num_classes`.

    labels: int64 class numbers [...]; or probabilities [..., C], which are returned unchanged.
    dtype: the type of the rows made from class numbers.
    """
    if labels.is_floating_point():
        return labels
    # torch's one_hot waits for the device to know the largest label.
    classes = torch.arange(num_classes, device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(dtype)


def mixed_batch(
    inputs: Tensor, labels: Tensor, num_classes: int, lam: float | Tensor, permutation: Tensor
) -> dict[str, Tensor]:
    """Return each sample mixed with its partner: "inputs" [B, ...] and "targets" [B, C].

    inputs: [B, ...].
    labels: int64 [B], or probabilities [B, C], where C is `num_classes`.
    lam: the weight of a sample, a number or scalar tensor from 0 to 1. The sample's partner has the
    weight 1 - lam.
    permutation: int64 [B], the position of each sample's partner.
    """
    targets = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {
        "inputs": lam * inputs + (1.0 - lam) * inputs[permutation],
        "targets": lam * targets + (1.0 - lam) * targets[permutation],
    }


# The method computes the same without this function, which states the rule on plain tensors.
def mixed_loss(logits: Tensor, labels: Tensor, lam: float | Tensor, permutation: Tensor) -> Tensor:
    """Return Mixup's loss: the cross-entropy with the mixed targets, a mean over the batch.

    logits: [B, C], the outputs for mixed inputs.
    labels: int64 [B].
    lam: the weight of a sample's label; the label of its partner has the weight 1 - lam.
    permutation: int64 [B], the position of each sample's partner.
    """
    log_probabilities = F.log_softmax(logits, dim=-1)
    first = F.nll_loss(log_probabilities, labels)
    second = F.nll_loss(log_probabilities, labels[permutation])
    return lam * first + (1.0 - lam) * second


class Mixup(Method):
    """A method that trains on weighted means of two samples and of their labels.

    `Batch.pair` keeps the labels of both samples, for methods that need class numbers.
    alpha: the weight of each batch is drawn from the distribution Beta(alpha, alpha).
    """

    name = "mixup"
    paper = "Zhang et al., ICLR 2018"

    def __init__(self, alpha: float = 0.2):
        self.alpha = above("method.mixup.alpha", alpha, 0.0, "leave mixup out for no mixing")

    def setup(self, run: Setup) -> None:
        """Declare a weight and a permutation for each step."""
        run.needs("numbers")
        run.targets("soft")
        run.draw("lam", self.draw_weights)
        run.draw("permutation", self.draw_partners)

    def draw_weights(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Return the weight lam of each batch: a scalar tensor for each batch."""
        weights = generator.beta(self.alpha, self.alpha, size=job.plan.steps)
        return torch.from_numpy(weights).unbind()

    def draw_partners(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Return a random permutation for each batch: int64 [B], each sample's partner."""
        return [torch.from_numpy(generator.permutation(size)) for size in job.plan.sizes]

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Mix inputs and targets within the batch."""
        lam = job.drawn("lam")
        permutation = job.drawn("permutation").to(batch.inputs.device)
        mixed = mixed_batch(batch.inputs, batch.targets, job.num_classes, lam, permutation)
        pair = (batch.targets, batch.targets[permutation], lam)
        return replace(batch, inputs=mixed["inputs"], targets=mixed["targets"], pair=pair)
